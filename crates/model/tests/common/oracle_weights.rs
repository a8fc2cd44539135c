//! The oracle's files without Python: the same weights, names, keys and order,
//! so that the files are byte for byte the ones its golden values belong to.
//!
//! Each element is a hash of (seed, tensor name, index), made in f32 steps. The
//! names that are hashed are Hugging Face's; the file has GGUF's, with q and k
//! rows reordered to neighbouring pairs and 1 added to the layers' norms.

use gguf::{Array, Gguf, Metadata, TensorInfo, TensorType, Value, Writer, quant};
use sha2::{Digest, Sha256};
use std::path::Path;
use testing::{open, read_to_string, testdata, text};

/// A text model of the oracle.
#[derive(Clone, Copy)]
pub struct TextShape {
    pub name: &'static str,
    seed: u64,
    n_layer: usize,
    n_embd: usize,
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    n_ff: usize,
    window: u32,
    rope_base: f32,
    /// Is the layer pattern stored as one truth value per layer?
    pattern_is_array: bool,
}

pub const NANO: TextShape = TextShape {
    name: "nano",
    seed: 11,
    n_layer: 8,
    n_embd: 64,
    n_head: 4,
    n_head_kv: 2,
    head_dim: 32,
    n_ff: 128,
    window: 24,
    rope_base: 10_000.0,
    pattern_is_array: true,
};

pub const KQ: TextShape = TextShape {
    name: "kq",
    seed: 12,
    n_layer: 4,
    n_embd: 256,
    n_head: 4,
    n_head_kv: 2,
    head_dim: 64,
    n_ff: 256,
    window: 32,
    rope_base: 500_000.0,
    pattern_is_array: false,
};

pub const A: TextShape = TextShape {
    name: "a",
    seed: 13,
    n_layer: 8,
    n_embd: 256,
    n_head: 4,
    n_head_kv: 2,
    head_dim: 128,
    n_ff: 512,
    window: 32,
    rope_base: 10_000.0,
    pattern_is_array: true,
};

pub const B: TextShape = TextShape {
    name: "b",
    seed: 14,
    n_layer: 4,
    n_embd: 512,
    n_head: 32,
    n_head_kv: 2,
    head_dim: 128,
    n_ff: 1024,
    window: 64,
    rope_base: 500_000.0,
    pattern_is_array: false,
};

/// A drafter of the oracle.
#[derive(Clone, Copy)]
pub struct DraftShape {
    pub name: &'static str,
    seed: u64,
    n_layer: usize,
    n_embd: usize,
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    n_ff: usize,
    window: u32,
    rope_base: f32,
    block_size: u32,
    /// As the file stores them: one more than the layers whose outputs feed it.
    target_layers: [i32; 3],
}

pub const DRAFT_NANO: DraftShape = DraftShape {
    name: "nano",
    seed: 21,
    n_layer: 2,
    n_embd: 64,
    n_head: 4,
    n_head_kv: 2,
    head_dim: 32,
    n_ff: 128,
    window: 24,
    rope_base: 10_000.0,
    block_size: 8,
    target_layers: [1, 3, 6],
};

pub const DRAFT_A: DraftShape = DraftShape {
    name: "a",
    seed: 22,
    n_layer: 3,
    n_embd: 256,
    n_head: 4,
    n_head_kv: 2,
    head_dim: 128,
    n_ff: 512,
    window: 32,
    rope_base: 500_000.0,
    block_size: 16,
    target_layers: [2, 4, 6],
};

const N_VOCAB: usize = 512;
const MASK_TOKEN: u32 = 500;
const Q_SCALE: f32 = 3.87;

/// A tensor before encoding; `rows` is 0 for a vector.
pub struct Weights {
    name: String,
    cols: usize,
    rows: usize,
    values: Vec<f32>,
}

/// The tensors and metadata of a file, whatever its encoding will be.
pub struct Plan {
    /// `text-a`, `dflash-a` ...
    stem: String,
    metadata: Metadata,
    tensors: Vec<Weights>,
}

fn fnv1a64(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// Noise of mean `mean` and standard deviation `std`.
fn noise(seed: u64, name: &str, n: usize, std: f64, mean: f64) -> Vec<f32> {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let key = fnv1a64(name) ^ seed.wrapping_mul(GOLDEN);
    let (std, mean, root3) = (std as f32, mean as f32, 3f64.sqrt() as f32);
    let element = |i: u64| {
        let z = key.wrapping_add((i + 1).wrapping_mul(GOLDEN));
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let z = z ^ (z >> 31);
        let u = (z >> 40) as f32 / (1 << 24) as f32;
        (u * 2.0 - 1.0) * root3 * std + mean
    };
    (0..n as u64).map(element).collect()
}

/// Rows of each head from (first half, second half) to neighbouring pairs.
fn halves_to_pairs(values: &[f32], head_dim: usize, cols: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks(head_dim * cols) {
        for row in 0..head_dim {
            let from = row / 2 + row % 2 * (head_dim / 2);
            out.extend_from_slice(&head[from * cols..][..cols]);
        }
    }
    out
}

/// Tensors of one seed, named in both worlds.
struct Maker {
    seed: u64,
    tensors: Vec<Weights>,
}

impl Maker {
    fn matrix(&mut self, hf: &str, gguf: &str, (rows, cols): (usize, usize), std: f64) {
        let values = noise(self.seed, hf, rows * cols, std, 0.0);
        self.push(gguf, cols, rows, values);
    }

    /// A q or k matrix of the target.
    fn turning(
        &mut self,
        hf: &str,
        gguf: &str,
        (rows, cols): (usize, usize),
        std: f64,
        head_dim: usize,
    ) {
        let values = noise(self.seed, hf, rows * cols, std, 0.0);
        self.push(gguf, cols, rows, halves_to_pairs(&values, head_dim, cols));
    }

    fn vector(&mut self, hf: &str, gguf: &str, n: usize, std: f64, mean: f64) {
        let values = noise(self.seed, hf, n, std, mean);
        self.push(gguf, n, 0, values);
    }

    /// A norm that Hugging Face stores without its 1.
    fn centred(&mut self, hf: &str, gguf: &str, n: usize, mean: f64) {
        let values = noise(self.seed, hf, n, 0.2, mean);
        self.push(gguf, n, 0, values.into_iter().map(|v| v + 1.0).collect());
    }

    fn push(&mut self, gguf: &str, cols: usize, rows: usize, values: Vec<f32>) {
        let name = format!("{gguf}.weight");
        self.tensors.push(Weights {
            name,
            cols,
            rows,
            values,
        });
    }
}

/// Standard deviation `gain / sqrt(n)`.
fn over_root(gain: f64, n: usize) -> f64 {
    gain / (n as f64).sqrt()
}

fn text_layer(make: &mut Maker, s: &TextShape, il: usize) {
    let (d, ff) = (s.n_embd, s.n_ff);
    let (n_q, n_kv) = (s.n_head * s.head_dim, s.n_head_kv * s.head_dim);
    let hf = |part: &str| format!("layers.{il}.{part}.weight");
    let gguf = |part: &str| format!("blk.{il}.{part}");
    // Tiny q and k, tiny outputs in some layers: the epsilons become visible.
    let qk = if il % 3 == 1 { 0.05 } else { 1.0 };
    let out = if il % 2 == 1 { 0.002 } else { 1.0 };
    let down = if il % 4 == 2 { 0.002 } else { 1.0 };
    let norms = [
        ("input_layernorm", "attn_norm", 0.0),
        ("post_attention_layernorm", "post_attention_norm", -0.4),
        ("pre_feedforward_layernorm", "ffn_norm", 0.1),
        ("post_feedforward_layernorm", "post_ffw_norm", -0.3),
    ];
    for (from, to, mean) in norms {
        make.centred(&hf(from), &gguf(to), d, mean);
    }
    let (q, k) = (hf("self_attn.q_proj"), hf("self_attn.k_proj"));
    make.turning(&q, &gguf("attn_q"), (n_q, d), over_root(qk, d), s.head_dim);
    make.turning(&k, &gguf("attn_k"), (n_kv, d), over_root(qk, d), s.head_dim);
    let matrices = [
        ("self_attn.v_proj", "attn_v", (n_kv, d), over_root(1.0, d)),
        (
            "self_attn.gate_proj",
            "attn_gate",
            (n_q, d),
            over_root(2.0, d),
        ),
        (
            "self_attn.o_proj",
            "attn_output",
            (d, n_q),
            over_root(out, n_q),
        ),
        ("mlp.gate_proj", "ffn_gate", (ff, d), over_root(1.5, d)),
        ("mlp.up_proj", "ffn_up", (ff, d), over_root(1.0, d)),
        ("mlp.down_proj", "ffn_down", (d, ff), over_root(down, ff)),
    ];
    for (from, to, shape, std) in matrices {
        make.matrix(&hf(from), &gguf(to), shape, std);
    }
    make.push(
        &gguf("attn_q_norm"),
        s.head_dim,
        0,
        vec![Q_SCALE; s.head_dim],
    );
    make.push(&gguf("attn_k_norm"), s.head_dim, 0, vec![1.0; s.head_dim]);
}

/// A text model.
pub fn text_plan(s: &TextShape) -> Plan {
    let d = s.n_embd;
    let mut make = Maker {
        seed: s.seed,
        tensors: Vec::new(),
    };
    make.matrix("embed_tokens.weight", "token_embd", (N_VOCAB, d), 0.02);
    (0..s.n_layer).for_each(|il| text_layer(&mut make, s, il));
    make.vector("norm.weight", "output_norm", d, 0.3, 1.0);
    make.matrix("lm_head.weight", "output", (N_VOCAB, d), over_root(60.0, d));

    let pattern = if s.pattern_is_array {
        let slides = |il: usize| !(s.n_layer - 1 - il).is_multiple_of(4);
        Value::Array(Array::Bool((0..s.n_layer).map(slides).collect()))
    } else {
        Value::U32(4)
    };
    let sizes = [s.n_layer, d, s.n_ff, s.n_head, s.n_head_kv, s.head_dim];
    let title = format!("muse-glimmer oracle {}", s.name);
    let mut metadata = shape_keys("muse-glimmer", &title, sizes, s.rope_base);
    let mut key = |name: &str, value| metadata.insert(format!("muse-glimmer.{name}"), value);
    key("final_logit_softcapping", Value::F32(20.0));
    key("logit_scale", Value::F32(0.19611613513818404f64 as f32));
    key("attention.sliding_window", Value::U32(s.window));
    key("attention.sliding_window_pattern", pattern);
    tokenizer_keys(&mut metadata);
    Plan {
        stem: format!("text-{}", s.name),
        metadata,
        tensors: make.tensors,
    }
}

fn draft_layer(make: &mut Maker, s: &DraftShape, il: usize) {
    let (d, ff) = (s.n_embd, s.n_ff);
    let (n_q, n_kv) = (s.n_head * s.head_dim, s.n_head_kv * s.head_dim);
    let hf = |part: &str| format!("layers.{il}.{part}.weight");
    let gguf = |part: &str| format!("blk.{il}.{part}");
    make.vector(&hf("input_layernorm"), &gguf("attn_norm"), d, 0.3, 1.0);
    make.vector(
        &hf("post_attention_layernorm"),
        &gguf("ffn_norm"),
        d,
        0.3,
        1.0,
    );
    let attention = [
        ("self_attn.q_proj", "attn_q", (n_q, d), over_root(1.0, d)),
        ("self_attn.k_proj", "attn_k", (n_kv, d), over_root(1.0, d)),
        ("self_attn.v_proj", "attn_v", (n_kv, d), over_root(1.0, d)),
        (
            "self_attn.o_proj",
            "attn_output",
            (d, n_q),
            over_root(0.05, n_q),
        ),
    ];
    for (from, to, shape, std) in attention {
        make.matrix(&hf(from), &gguf(to), shape, std);
    }
    make.vector(
        &hf("self_attn.q_norm"),
        &gguf("attn_q_norm"),
        s.head_dim,
        0.3,
        1.8,
    );
    make.vector(
        &hf("self_attn.k_norm"),
        &gguf("attn_k_norm"),
        s.head_dim,
        0.3,
        1.2,
    );
    let feed_forward = [
        ("mlp.gate_proj", "ffn_gate", (ff, d), over_root(1.5, d)),
        ("mlp.up_proj", "ffn_up", (ff, d), over_root(1.0, d)),
        ("mlp.down_proj", "ffn_down", (d, ff), over_root(0.05, ff)),
    ];
    for (from, to, shape, std) in feed_forward {
        make.matrix(&hf(from), &gguf(to), shape, std);
    }
}

/// A drafter.
pub fn draft_plan(s: &DraftShape) -> Plan {
    let d = s.n_embd;
    let n_features = s.target_layers.len() * d;
    let mut make = Maker {
        seed: s.seed,
        tensors: Vec::new(),
    };
    make.matrix(
        "encoder.fc.weight",
        "fc",
        (d, n_features),
        over_root(1.0, n_features),
    );
    let enc = "encoder.output_norm_enc.weight";
    make.vector(enc, "enc.output_norm", d, 0.3, 1.0);
    (0..s.n_layer).for_each(|il| draft_layer(&mut make, s, il));
    make.vector("norm.weight", "output_norm", d, 0.3, 1.0);

    let sizes = [s.n_layer, d, s.n_ff, s.n_head, s.n_head_kv, s.head_dim];
    let title = format!("muse-glimmer assistant oracle {}", s.name);
    let mut metadata = shape_keys("dflash", &title, sizes, s.rope_base);
    let mut key = |name: &str, value| metadata.insert(format!("dflash.{name}"), value);
    key("block_size", Value::U32(s.block_size));
    key(
        "target_layers",
        Value::Array(Array::I32(s.target_layers.to_vec())),
    );
    key("attention.sliding_window", Value::U32(s.window));
    let pattern = vec![true; s.n_layer];
    key(
        "attention.sliding_window_pattern",
        Value::Array(Array::Bool(pattern)),
    );
    tokenizer_keys(&mut metadata);
    metadata.insert("tokenizer.ggml.mask_token_id", Value::U32(MASK_TOKEN));
    Plan {
        stem: format!("dflash-{}", s.name),
        metadata,
        tensors: make.tensors,
    }
}

/// The keys that both kinds of file begin with, up to the file type.
fn shape_keys(architecture: &str, title: &str, sizes: [usize; 6], rope_base: f32) -> Metadata {
    let [n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim] = sizes.map(|n| n as u32);
    let mut metadata = Metadata::default();
    metadata.insert("general.architecture", text(architecture));
    metadata.insert("general.type", text("model"));
    metadata.insert("general.name", text(title));
    let mut key = |name: &str, value| metadata.insert(format!("{architecture}.{name}"), value);
    key("block_count", Value::U32(n_layer));
    key("context_length", Value::U32(4096));
    key("embedding_length", Value::U32(n_embd));
    key("feed_forward_length", Value::U32(n_ff));
    key("attention.head_count", Value::U32(n_head));
    key("attention.head_count_kv", Value::U32(n_head_kv));
    key("rope.freq_base", Value::F32(rope_base));
    key("attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    key("attention.key_length", Value::U32(head_dim));
    key("attention.value_length", Value::U32(head_dim));
    metadata.insert("general.file_type", Value::U32(0));
    metadata
}

/// The tokenizer of the stored files, which all of the oracle's files share.
fn tokenizer_keys(metadata: &mut Metadata) {
    metadata.insert("general.quantization_version", Value::U32(2));
    let stored = open(&testdata("oracle/text-nano-f32.gguf"));
    let keys = stored.metadata().iter();
    for (key, value) in keys.filter(|(key, _)| key.starts_with("tokenizer.")) {
        metadata.insert(key, value.clone());
    }
}

impl Plan {
    /// Writes the file with matrices of type `ty`, checks that it is the
    /// oracle's, and opens it.
    pub fn write(&self, ty: TensorType) -> Gguf {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file_name = format!("{}-{}.gguf", self.stem, ty.name().to_ascii_lowercase());
        let path = folder.path().join(&file_name);
        let mut metadata = self.metadata.clone();
        let file_type = match ty {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::Q8_0 => 7,
            other => panic!("the oracle has no {other} file made by this generator"),
        };
        metadata.insert("general.file_type", Value::U32(file_type));
        let infos: Vec<TensorInfo> = self.tensors.iter().map(|t| t.info(ty)).collect();
        let mut writer = Writer::create(&path, &metadata, &infos).expect("a valid file");
        for (tensor, info) in self.tensors.iter().zip(&infos) {
            writer
                .append(&info.name, &tensor.encode(info.ty))
                .expect("matching data");
        }
        writer.finish().expect("space for the file");
        let found = sha256(&path);
        assert_eq!(found, manifest_digest(&file_name), "SHA-256 of {file_name}");
        // The mapping stays valid when the name is gone.
        open(&path)
    }
}

impl Weights {
    fn info(&self, ty: TensorType) -> TensorInfo {
        let (cols, rows) = (self.cols as u64, self.rows as u64);
        let (ty, shape) = match rows {
            0 => (TensorType::F32, vec![cols]),
            _ => (ty, vec![cols, rows]),
        };
        let name = self.name.clone();
        TensorInfo { name, ty, shape }
    }

    fn encode(&self, ty: TensorType) -> Vec<u8> {
        let mut out = Vec::new();
        for row in self.values.chunks(self.cols) {
            quant::encode_row(ty, row, &mut out).expect("finite weights");
        }
        out
    }
}

/// SHA-256 of a file, in hexadecimal.
pub fn sha256(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let digest = Sha256::digest(&bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the manifest says of a file.
pub fn manifest_digest(file_name: &str) -> String {
    let manifest = read_to_string(&testdata("oracle/manifest.json"));
    let manifest: serde_json::Value = serde_json::from_str(&manifest).expect("JSON");
    let digest = manifest["gguf_sha256"][file_name].as_str();
    digest
        .unwrap_or_else(|| panic!("{file_name} in the manifest"))
        .to_string()
}
