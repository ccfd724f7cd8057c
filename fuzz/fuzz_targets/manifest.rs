//! The fuzz target `manifest`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    keelson_fuzz_properties::manifest::check(bytes);
});
