//! Sizes as the API writes them.

use keelson_kube_model::Quantity;

/// A quantity in bytes; `None` if it is not a positive number.
pub(crate) fn storage(quantity: &str) -> Option<u64> {
    let bytes = u64::try_from(Quantity::parse(quantity).ok()?.value()).ok()?;
    (bytes > 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_positive_number_of_bytes() {
        let cases = [
            ("1Gi", Some(1 << 30)),
            ("1500", Some(1500)),
            ("0", None),
            ("-1", None),
            ("much", None),
            ("", None),
        ];
        for (text, bytes) in cases {
            assert_eq!(storage(text), bytes, "{text:?}");
        }
    }
}
