//! Byte counts for people.

/// A byte count in binary units, with one decimal digit: `1.5 KiB`.
pub fn format_size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    let mut tenths = u128::from(bytes) * 10;
    while tenths >= 10_240 && unit + 1 < units.len() {
        tenths /= 1_024;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal_digit() {
        for (bytes, text) in [
            (0, "0.0 B"),
            (1_023, "1023.0 B"),
            (1_024, "1.0 KiB"),
            (1_536, "1.5 KiB"),
            (107_374_182_400, "100.0 GiB"),
            (u64::MAX, "16383.9 PiB"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }
}
