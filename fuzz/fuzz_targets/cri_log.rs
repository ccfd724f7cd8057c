//! The fuzz target `cri_log`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    keelson_fuzz_properties::cri_log::check(bytes);
});
