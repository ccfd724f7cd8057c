//! The fuzz target `mountinfo`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    keelson_fuzz_properties::mountinfo::check(bytes);
});
