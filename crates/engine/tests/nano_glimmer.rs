//! The service on the bundled model: real attention over shared pages.

mod common;

use common::{alone, end, greedy, hear, job, nano_file, run, seeded};
use engine::{Generated, SamplerSettings, Service, Settings};
use model::{KvType, Model, Options, Reference};

fn model(kv_bytes: u64) -> Model<Reference> {
    let options = Options {
        kv: KvType::F16,
        kv_bytes,
    };
    Model::load(Reference::new(), &nano_file(), options).expect("the bundled model")
}

fn tokens(salt: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + salt * 101 + 11) % 3900).collect()
}

/// Packed, from the cache, and after losing their pages: bit for bit what each
/// answer is alone.
#[test]
fn answers_are_those_of_the_loop_of_one_sequence() {
    let cases: Vec<(Vec<u32>, SamplerSettings)> = [(1, 5), (2, 130), (3, 255), (4, 260)]
        .into_iter()
        .map(|(salt, n)| {
            (
                tokens(salt, n),
                if salt % 2 == 0 { greedy() } else { seeded(7) },
            )
        })
        .collect();
    let expected: Vec<Vec<Generated>> = cases
        .iter()
        .map(|(tokens, sampling)| alone(model(64 << 20), tokens, sampling.clone(), 8))
        .collect();
    let slab_bytes = {
        use model::Forward;
        model(1 << 20).capacity().layout.slab_bytes() as u64
    };
    for n_slabs in [100, 4] {
        let settings = Settings {
            prefix_cache_bytes: u64::MAX,
            ..Settings::default()
        };
        let model = Box::new(model(n_slabs * slab_bytes));
        let service = Service::start(model, settings).expect("a service");
        let handle = service.handle();
        let together: Vec<_> = cases
            .iter()
            .map(|(tokens, sampling)| {
                let (job, events) = job(tokens.clone(), sampling.clone(), 8);
                handle.submit(job).expect("it is taken");
                events
            })
            .collect();
        for (events, expected) in together.iter().zip(&expected) {
            assert_eq!(&hear(events).answers[0], expected, "{n_slabs} slabs");
        }
        let mut n_cached = 0;
        for ((tokens, sampling), expected) in cases.iter().zip(&expected) {
            let heard = run(&handle, job(tokens.clone(), sampling.clone(), 8));
            assert_eq!(
                &heard.answers[0], expected,
                "{n_slabs} slabs, from the cache"
            );
            n_cached += heard.timings.cached_tokens;
        }
        assert!(n_cached > 0, "a test of nothing");
        end(service, &handle);
    }
}
