//! Golden values in npz files.

use crate::testdata;
use npyz::npz::NpzArchive;
use std::fs::File;
use std::io::BufReader;

/// The arrays of an npz file.
pub struct Golden {
    name: String,
    zip: NpzArchive<BufReader<File>>,
}

impl Golden {
    /// A golden file below `testdata/`.
    pub fn open(name: &str) -> Golden {
        let path = testdata(name);
        let zip = NpzArchive::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let name = name.to_string();
        Golden { name, zip }
    }

    fn read<T: npyz::Deserialize>(&mut self, key: &str) -> (Vec<u64>, Vec<T>) {
        let array = self.zip.by_name(key).expect("a readable golden file");
        let array = array.unwrap_or_else(|| panic!("{}: no array {key}", self.name));
        let shape = array.shape().to_vec();
        (shape, array.into_vec().expect("an array of the right type"))
    }

    /// Is there an array of that name?
    pub fn has(&self, key: &str) -> bool {
        self.zip.array_names().any(|name| name == key)
    }

    /// Shape and elements of an f32 array.
    pub fn floats(&mut self, key: &str) -> (Vec<u64>, Vec<f32>) {
        self.read(key)
    }

    /// The ids of an i32 array.
    pub fn tokens(&mut self, key: &str) -> Vec<u32> {
        let (_, values) = self.read::<i32>(key);
        values.into_iter().map(|v| v as u32).collect()
    }

    /// The only element of an i32 array.
    pub fn number(&mut self, key: &str) -> i32 {
        self.read::<i32>(key).1[0]
    }
}
