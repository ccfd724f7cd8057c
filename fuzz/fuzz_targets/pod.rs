//! The fuzz target `pod`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    keelson_fuzz_properties::pod::check(bytes);
});
