//! GGUF files made in a test: new ones, and existing ones with a change.

use gguf::{Array, Gguf, Metadata, TensorInfo, TensorType, Value, Writer, quant};

/// A tensor to write.
#[derive(Clone)]
pub struct Tensor {
    /// Name, encoding and shape.
    pub info: TensorInfo,
    /// Encoded elements.
    pub data: Vec<u8>,
}

impl Tensor {
    /// An F32 tensor; `shape` in ggml's order.
    pub fn floats(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
        let info = TensorInfo {
            name: name.to_string(),
            ty: TensorType::F32,
            shape: shape.iter().map(|&n| n as u64).collect(),
        };
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor { info, data }
    }

    /// The decoded elements.
    pub fn values(&self) -> Vec<f32> {
        let n: u64 = self.info.shape.iter().product();
        let mut values = vec![0.0; n as usize];
        quant::decode_row(self.info.ty, &self.data, &mut values).expect("whole blocks");
        values
    }

    /// The same tensor as F32, each element changed.
    pub fn map(&self, change: impl Fn(f32) -> f32) -> Tensor {
        let shape: Vec<usize> = self.info.shape.iter().map(|&n| n as usize).collect();
        let values: Vec<f32> = self.values().into_iter().map(change).collect();
        Tensor::floats(&self.info.name, &shape, &values)
    }
}

/// The content of a file, to be changed and written.
#[derive(Clone)]
pub struct Parts {
    /// Keys and values.
    pub metadata: Metadata,
    /// In the order of the file.
    pub tensors: Vec<Tensor>,
}

impl Parts {
    /// Everything in `file`.
    pub fn of(file: &Gguf) -> Parts {
        let copy = |t: &gguf::TensorView| Tensor {
            info: t.info(),
            data: t.data.to_vec(),
        };
        Parts {
            metadata: file.metadata().clone(),
            tensors: file.tensors().iter().map(copy).collect(),
        }
    }

    /// The tensor `name`.
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        let found = self.tensors.iter_mut().find(|t| t.info.name == name);
        found.unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Takes the tensor `name` out.
    pub fn remove(&mut self, name: &str) {
        let before = self.tensors.len();
        self.tensors.retain(|t| t.info.name != name);
        assert_eq!(self.tensors.len(), before - 1, "no tensor {name}");
    }

    /// Changes the elements of every tensor whose name ends with `suffix`.
    pub fn map_all(&mut self, suffix: &str, change: impl Fn(f32) -> f32) {
        let mut count = 0;
        for tensor in &mut self.tensors {
            if tensor.info.name.ends_with(suffix) {
                *tensor = tensor.map(&change);
                count += 1;
            }
        }
        assert!(count > 0, "no tensor ends with {suffix}");
    }

    /// Writes the file and opens it.
    pub fn write(&self) -> Gguf {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("made.gguf");
        let infos: Vec<TensorInfo> = self.tensors.iter().map(|t| t.info.clone()).collect();
        let mut writer = Writer::create(&path, &self.metadata, &infos).expect("a valid file");
        for tensor in &self.tensors {
            let name = &tensor.info.name;
            writer
                .append(name, &tensor.data)
                .expect("data as long as the shape says");
        }
        writer.finish().expect("space for a small file");
        // The mapping stays valid when the name is gone.
        Gguf::open(&path).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// `file` with a change.
pub fn changed(file: &Gguf, change: impl FnOnce(&mut Parts)) -> Gguf {
    let mut parts = Parts::of(file);
    change(&mut parts);
    parts.write()
}

/// A string as a metadata value.
pub fn text(value: &str) -> Value {
    Value::String(value.to_string())
}

/// A vocabulary of `n` made-up tokens.
pub fn tokens(n: usize) -> Value {
    Value::Array(Array::String((0..n).map(|i| format!("t{i}")).collect()))
}
