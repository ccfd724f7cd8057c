//! Base64 as the API has it in `[]byte` fields: `data` of Secrets, `binaryData` of ConfigMaps, `…-data` of kubeconfigs.
//!
//! The project's only decoder for these, so that all readers accept the same values.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::general_purpose::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// Go's `encoding/base64.StdEncoding`: padding is required, bits after the last byte are ignored.
const GO: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireCanonical),
);

/// Decodes a text; line breaks as in the output of `base64 FILE` are skipped. `None`: it is not base64.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    if text.contains(['\n', '\r']) {
        let joined: String = text.chars().filter(|c| !matches!(c, '\n' | '\r')).collect();
        return GO.decode(joined).ok();
    }
    GO.decode(text).ok()
}

/// As [`decode`], but the padding may be absent, as in the `auth` of a Docker configuration. Padding that is present must
/// be correct.
pub fn decode_unpadded(text: &str) -> Option<Vec<u8>> {
    if text.trim_end().ends_with('=') {
        return decode(text);
    }
    let joined: String = text.chars().filter(|c| !matches!(c, '\n' | '\r')).collect();
    let missing = (4 - joined.len() % 4) % 4;
    decode(&format!("{joined}{}", "=".repeat(missing)))
}

/// Encodes bytes with padding, in one line.
pub fn encode(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_go_reads_them() {
        for (text, expected) in [
            ("", Some("")),
            ("Zg==", Some("f")),
            ("Zm8=", Some("fo")),
            ("Zm9v", Some("foo")),
            ("Zm9v\nYmFy\n", Some("foobar")),
            ("Zm9v\r\nYmFy\r\n", Some("foobar")),
            ("Zg\n==\n", Some("f")),
            // The bits behind the last byte are not zero.
            ("Zh==", Some("f")),
            ("Zg", None),
            ("Zg=", None),
            ("Z===", None),
            ("Zm9v Ymfy", None),
            ("Zm9v\tYmFy", None),
            (" Zm9v", None),
            ("Zm9v!mFy", None),
            ("=Zm9", None),
            ("Zm-_", None),
        ] {
            assert_eq!(decode(text).as_deref(), expected.map(str::as_bytes), "{text:?}");
        }
        for (text, expected) in [
            ("Zg", Some("f")),
            ("Zm8=\n", Some("fo")),
            ("Zm9v", Some("foo")),
            ("Z", None),
            ("Zg=", None),
            ("Zm9v=", None),
        ] {
            assert_eq!(decode_unpadded(text).as_deref(), expected.map(str::as_bytes), "{text:?}");
        }
        assert_eq!((encode(b"f"), encode(b"foobar")), ("Zg==".into(), "Zm9vYmFy".into()));
    }
}
