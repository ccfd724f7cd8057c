//! The fuzz target `quantity`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    keelson_fuzz_properties::quantity::check(bytes);
});
