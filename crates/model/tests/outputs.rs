//! What is read back of a pass, value by value: the cap, the choice of tokens,
//! stored keys and values, shapes.

use gguf::{Bytes, TensorType, TensorView};
use half::f16;
use model::backend::RowSet;
use model::{
    Backend, Batch, Forward, KvType, Model, Options, PageClass, Reference, RowOutput,
    SequencePages, Step, Want, padded, select,
};
use testing::{EXACT, changed, distance, open, pool_of, reference, testdata};

/// `values` as one row of a buffer of the reference backend.
fn row(be: &mut Reference, values: &[f32]) -> <Reference as Backend>::Buf {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let table = TensorView {
        name: "table".into(),
        ty: TensorType::F32,
        shape: vec![values.len() as u64, 1],
        data: Bytes::from(bytes),
    };
    let table = be.load(&table).expect("a table");
    be.step(&Step::new(
        &Batch::span(0, 0, &[0]),
        &[&SequencePages::new()],
    ))
    .expect("a step");
    let mut buf = be.alloc(RowSet::All, values.len()).expect("a buffer");
    be.embed(&mut buf, &table);
    buf
}

fn capped(values: &[f32], scale: f32, cap: Option<f32>) -> Vec<f32> {
    let mut be = Reference::new();
    let mut buf = row(&mut be, values);
    be.softcap(&mut buf, scale, cap);
    be.read(&buf).expect("a row")
}

#[test]
fn scale_and_cap() {
    let values: Vec<f32> = (-200..200).map(|i| i as f32 * 1.37 + 0.11).collect();
    for (scale, cap) in [
        (0.5, Some(20.0)),
        (0.196, Some(20.0)),
        (3.0, None),
        (1.0, Some(0.5)),
    ] {
        for (&x, found) in values.iter().zip(capped(&values, scale, cap)) {
            let scaled = f64::from(x) * f64::from(scale);
            let cap = cap.map(f64::from);
            let expected = cap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
            let error = (f64::from(found) / expected - 1.0).abs();
            assert!(
                error < 1e-6,
                "{x} by {scale}, {cap:?}: {found}, not {expected}"
            );
        }
    }
}

/// The cap makes a finite number of an infinity, which then is the largest.
#[test]
fn the_cap_hides_nothing() {
    let values = [1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 3e38, -3e38];
    let found = capped(&values, 2.0, Some(20.0));
    assert!((found[0] - 1.993_36).abs() < 1e-4, "{found:?}");
    // What becomes infinite by the scale is not finite either.
    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    let infinities = [f32::INFINITY, f32::NEG_INFINITY];
    assert_eq!(bits(&found[1..3]), bits(&infinities));
    assert!(found[3].is_nan());
    assert_eq!(bits(&found[4..]), bits(&infinities));
    assert_eq!(capped(&[3e38, -3e38], 1.0, Some(20.0)), [20.0, -20.0]);
}

/// A head that drives every logit to an infinity.
#[test]
fn infinite_logits_are_no_answer() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let damaged = changed(&file, |p| {
        p.map_all("output_norm.weight", |w| w * 1e3);
        let head = p.tensor("output.weight");
        // One weight a row, so that no infinity meets its opposite.
        let (n_embd, mut k) = (64, 0);
        let one = std::iter::from_fn(|| {
            k += 1;
            Some(if (k - 1) % n_embd == 0 { 3e38 } else { 0.0 })
        });
        let values: Vec<f32> = one.take(64 * 512).collect();
        head.data = values.iter().flat_map(|v: &f32| v.to_le_bytes()).collect();
    });
    let mut model = reference(&damaged, EXACT);
    let mut pool = pool_of(&model);
    let mut pages = SequencePages::new();
    pages.reserve(&mut pool, 4).expect("pages");
    let batch = Batch::span(0, 0, &[5, 6, 7, 8]);
    let want = [
        Want::Argmax,
        Want::Full,
        Want::TopK {
            k: 3,
            logsumexp: true,
        },
        Want::TopK {
            k: 3,
            logsumexp: false,
        },
    ];
    let outputs = model.pass(&batch, &[&pages], &want).expect("a pass");
    assert_eq!(outputs, vec![RowOutput::NonFinite { token: 0 }; 4]);
}

#[test]
fn what_is_chosen_of_a_row() {
    let top = |row: &[f32], k| match select(
        row,
        Want::TopK {
            k,
            logsumexp: false,
        },
    ) {
        RowOutput::TopK {
            top,
            logsumexp: None,
        } => top,
        other => panic!("{other:?}"),
    };
    let ids = |row: &[f32], k| top(row, k).iter().map(|t| t.0).collect::<Vec<u32>>();
    let argmax = |row: &[f32]| match select(row, Want::Argmax) {
        RowOutput::Argmax { token, logit } => (token, logit),
        other => panic!("{other:?}"),
    };
    // Equal logits: the lower id. The two zeros are equal.
    for (row, order) in [
        (vec![1.0, 3.0, 2.0], vec![1, 2, 0]),
        (vec![2.0, 1.0, 2.0], vec![0, 2, 1]),
        (vec![-0.0, 0.0, -1.0], vec![0, 1, 2]),
        (vec![0.0, -0.0, -1.0], vec![0, 1, 2]),
        (vec![-1.0, -0.0, 0.0, -0.0], vec![1, 2, 3, 0]),
        (vec![f32::MIN, -3e38], vec![1, 0]),
    ] {
        assert_eq!(argmax(&row).0, order[0], "{row:?}");
        for k in 0..=row.len() + 1 {
            assert_eq!(ids(&row, k), order[..k.min(row.len())], "{k} of {row:?}");
        }
    }
    // The logit itself is not changed.
    assert_eq!(argmax(&[-0.0, 0.0]).1.to_bits(), (-0f32).to_bits());
    assert_eq!(top(&[-0.0, 0.0], 1)[0].1.to_bits(), (-0f32).to_bits());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for want in [
            Want::Argmax,
            Want::Full,
            Want::TopK {
                k: 1,
                logsumexp: false,
            },
        ] {
            let found = select(&[9.0, bad, 1.0, bad], want);
            assert_eq!(found, RowOutput::NonFinite { token: 1 });
        }
    }
}

#[test]
fn log_of_the_sum_of_exponentials() {
    let of = |row: &[f32]| match select(
        row,
        Want::TopK {
            k: 1,
            logsumexp: true,
        },
    ) {
        RowOutput::TopK {
            logsumexp: Some(sum),
            ..
        } => sum,
        other => panic!("{other:?}"),
    };
    for (row, expected) in [
        (vec![0.0], 0.0),
        (vec![0.0, 0.0], std::f32::consts::LN_2),
        (vec![1.0, 2.0, 3.0], 3.407_606),
        (vec![-1000.0, -1000.0], -999.306_9),
        (vec![500.0, 100.0], 500.0),
        (vec![20.0, -20.0, 20.0], 20.693_148),
    ] {
        let found = of(&row);
        assert!((found - expected).abs() < 1e-4, "{row:?}: {found}");
    }
}

#[test]
fn shapes_are_few() {
    let steps = [
        1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576,
    ];
    assert_eq!(padded(0), 0);
    for n in 1..=576 {
        let expected = steps.into_iter().find(|&s| s >= n);
        assert_eq!(Some(padded(n)), expected, "{n} rows");
    }
}

/// The canonical form of a page, byte by byte, against what the graph handed
/// to the store.
#[test]
fn pages_hold_what_was_stored() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let rows = 5;
    for kv in [KvType::F16, KvType::F32] {
        let options = Options { kv, ..EXACT };
        let mut model: Model<Reference> = reference(&file, options);
        let mut pool = pool_of(&model);
        let mut pages = SequencePages::new();
        pages.reserve(&mut pool, rows as u32).expect("pages");
        model.backend_mut().record_probes();
        let batch = Batch::span(0, 0, &[400, 17, 33, 250, 3]);
        let want = vec![Want::Argmax; rows];
        model.pass(&batch, &[&pages], &want).expect("a pass");
        let values = model.backend_mut().take_probes().values;
        let layers = model.config().layers.clone();
        for class in [PageClass::Full, PageClass::Sliding] {
            let mut stored = Vec::new();
            for (il, _) in layers.iter().enumerate().filter(|(_, l)| l.class == class) {
                for name in ["Kcur_rope", "Vcur"] {
                    let probe = values.iter().find(|v| (v.0, v.1) == (name, il));
                    stored.extend(&probe.unwrap_or_else(|| panic!("no {name} {il}")).2);
                }
            }
            let little_endian: Vec<u8> = match kv {
                KvType::F16 => stored
                    .iter()
                    .flat_map(|&v| nearest(v).to_le_bytes())
                    .collect(),
                KvType::F32 => stored.iter().flat_map(|v| v.to_le_bytes()).collect(),
            };
            let page = pages.table(class)[0].expect("a page");
            let data = model.export_page(class, page, rows).expect("an export");
            assert!(data.bytes == little_endian, "{class} page in {kv}");
            // The import is the export's opposite, into another page.
            let other = pool.allocate(class).expect("a page");
            model.import_page(class, other, &data).expect("an import");
            let again = model.export_page(class, other, rows).expect("an export");
            assert_eq!(again, data);
        }
    }
}

/// The half-precision number nearest to `value`, ties to even, by search.
fn nearest(value: f32) -> u16 {
    let distance = |bits: u16| (f64::from(f16::from_bits(bits).to_f32()) - f64::from(value)).abs();
    let sign = ((value.to_bits() >> 16) & 0x8000) as u16;
    let mut low = 0u16;
    let mut high = 0x7bff;
    while high - low > 1 {
        let middle = (low + high) / 2;
        if f16::from_bits(middle).to_f32() <= value.abs() {
            low = middle;
        } else {
            high = middle;
        }
    }
    let (low, high) = (sign | low, sign | high);
    let is_even = |bits: u16| bits.is_multiple_of(2);
    match distance(low).total_cmp(&distance(high)) {
        std::cmp::Ordering::Less => low,
        std::cmp::Ordering::Greater => high,
        std::cmp::Ordering::Equal if is_even(low) => low,
        std::cmp::Ordering::Equal => high,
    }
}

#[test]
fn a_distance_keeps_a_nan() {
    for at in 0..3 {
        let mut left = [1.0, 2.0, 3.0];
        left[at] = f32::NAN;
        let (max_abs, relative_rms) = distance(&left, &[1.0, 1.0, 1.0]);
        assert!(max_abs.is_nan() && relative_rms.is_nan(), "NaN at {at}");
    }
    let (max_abs, _) = distance(&[1.0, 5.0, 2.0], &[1.0, 2.0, 2.0]);
    assert_eq!(max_abs, 3.0);
}
