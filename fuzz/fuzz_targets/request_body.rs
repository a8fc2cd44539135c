//! Any bytes are an error of bounded length or the fields of a request, and what
//! nobody knows of them is named as a header may say it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for read in [server::read_chat, server::read_completion] {
        match read(data) {
            Ok(ignored) => {
                assert_eq!(data.trim_ascii_start().first(), Some(&b'{'));
                assert!(ignored.len() < 2048);
                assert!(ignored.bytes().all(|b| b == b' ' || b.is_ascii_graphic()));
            }
            // A message never grows with the input.
            Err(message) => assert!(!message.is_empty() && message.len() < 8192),
        }
    }
});
