//! What the backend says on a machine that lacks something.

use cuda::{Cuda, CudaOptions, Error};

/// Device 4096 is nowhere: with a driver the error counts the devices, without one it names the library.
#[test]
fn a_device_that_is_missing() {
    let options = CudaOptions {
        ordinal: 4096,
        ..CudaOptions::default()
    };
    let error = Cuda::new(&options).err().expect("no such device");
    let text = error.to_string();
    match error {
        Error::DeviceMissing { ordinal, count } => {
            assert_eq!(ordinal, 4096);
            assert!(text.contains(&format!("shows {count}")), "{text}");
        }
        Error::LibraryMissing { .. } => assert!(text.contains("libcuda.so.1"), "{text}"),
        Error::DriverTooOld { .. } => assert!(text.contains("12.0"), "{text}"),
        other => panic!("{other}"),
    }
}
