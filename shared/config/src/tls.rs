//! The cipher suites and key exchange groups that the kubelet API supports, with their names and numbers in a
//! KubeletConfiguration.

use serde::{Deserialize, Serialize};

/// A cipher suite of TLS 1.2 or 1.3 (`tlsCipherSuites`; node-and-api.md §2.5). The other suites that a kubelet knows lack
/// forward secrecy or use CBC, RC4 or 3DES, and are not supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CipherSuite {
    /// TLS 1.3.
    #[serde(rename = "TLS_AES_128_GCM_SHA256")]
    Aes128Gcm,
    /// TLS 1.3.
    #[serde(rename = "TLS_AES_256_GCM_SHA384")]
    Aes256Gcm,
    /// TLS 1.3.
    #[serde(rename = "TLS_CHACHA20_POLY1305_SHA256")]
    Chacha20,
    /// TLS 1.2, with a certificate of an elliptic curve.
    #[serde(rename = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256")]
    EcdsaAes128Gcm,
    /// TLS 1.2, with a certificate of an elliptic curve.
    #[serde(rename = "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384")]
    EcdsaAes256Gcm,
    /// TLS 1.2, with a certificate of an elliptic curve.
    #[serde(rename = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256")]
    EcdsaChacha20,
    /// TLS 1.2, with an RSA certificate.
    #[serde(rename = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256")]
    RsaAes128Gcm,
    /// TLS 1.2, with an RSA certificate.
    #[serde(rename = "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384")]
    RsaAes256Gcm,
    /// TLS 1.2, with an RSA certificate.
    #[serde(rename = "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256")]
    RsaChacha20,
}

impl CipherSuite {
    /// All of them, those of TLS 1.3 first.
    pub const ALL: [Self; 9] = [
        Self::Aes128Gcm,
        Self::Aes256Gcm,
        Self::Chacha20,
        Self::EcdsaAes128Gcm,
        Self::EcdsaAes256Gcm,
        Self::EcdsaChacha20,
        Self::RsaAes128Gcm,
        Self::RsaAes256Gcm,
        Self::RsaChacha20,
    ];

    /// Its name, as Go has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aes128Gcm => "TLS_AES_128_GCM_SHA256",
            Self::Aes256Gcm => "TLS_AES_256_GCM_SHA384",
            Self::Chacha20 => "TLS_CHACHA20_POLY1305_SHA256",
            Self::EcdsaAes128Gcm => "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
            Self::EcdsaAes256Gcm => "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
            Self::EcdsaChacha20 => "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
            Self::RsaAes128Gcm => "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
            Self::RsaAes256Gcm => "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
            Self::RsaChacha20 => "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        }
    }

    /// The suite with this name; `None` if it is not supported. Two suites have a legacy name without the hash.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305" => Some(Self::EcdsaChacha20),
            "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305" => Some(Self::RsaChacha20),
            name => Self::ALL.into_iter().find(|suite| suite.name() == name),
        }
    }

    /// Whether it is a TLS 1.3 suite. Those are always enabled, regardless of the setting, as in Go.
    pub fn is_tls13(self) -> bool {
        matches!(self, Self::Aes128Gcm | Self::Aes256Gcm | Self::Chacha20)
    }

    /// Whether it is a TLS 1.2 suite for ECDSA certificates.
    pub fn is_ecdsa(self) -> bool {
        matches!(self, Self::EcdsaAes128Gcm | Self::EcdsaAes256Gcm | Self::EcdsaChacha20)
    }
}

/// A key exchange group (`tlsCurvePreferences`) of the IANA TLS registry. P-521 and X25519MLKEM768, which a kubelet also
/// knows, are not supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeyExchange {
    /// P-256.
    #[serde(rename = "P-256")]
    P256,
    /// P-384.
    #[serde(rename = "P-384")]
    P384,
    /// X25519.
    X25519,
}

impl KeyExchange {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::P256, Self::P384, Self::X25519];

    /// Its number in the IANA TLS registry, as in Go.
    pub fn number(self) -> i64 {
        match self {
            Self::P256 => 23,
            Self::P384 => 24,
            Self::X25519 => 29,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::P256 => "P-256",
            Self::P384 => "P-384",
            Self::X25519 => "X25519",
        }
    }

    /// The group with this number; `None` if it is not supported.
    pub fn numbered(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.number() == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cipher_suite_names_match_go_with_two_legacy_names() {
        for suite in CipherSuite::ALL {
            assert_eq!(CipherSuite::named(suite.name()), Some(suite));
            let written = serde_json::to_value(suite).unwrap();
            assert_eq!(written, suite.name(), "the configuration has the same name");
            assert_eq!(serde_json::from_value::<CipherSuite>(written).unwrap(), suite);
            assert_eq!(suite.is_tls13(), !suite.name().contains("_WITH_"), "{}", suite.name());
            assert_eq!(suite.is_ecdsa(), suite.name().contains("_ECDSA_"), "{}", suite.name());
        }
        for (name, suite) in [
            ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", Some(CipherSuite::EcdsaChacha20)),
            ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", Some(CipherSuite::RsaChacha20)),
            // Known to a kubelet, not supported here.
            ("TLS_RSA_WITH_AES_128_GCM_SHA256", None),
            ("TLS_RSA_WITH_AES_256_GCM_SHA384", None),
            ("TLS_RSA_WITH_RC4_128_SHA", None),
            ("TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA", None),
            ("TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256", None),
            ("TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA", None),
            // Unknown everywhere.
            ("tls_aes_128_gcm_sha256", None),
            ("ECDHE-RSA-AES128-GCM-SHA256", None),
            ("", None),
        ] {
            assert_eq!(CipherSuite::named(name), suite, "{name}");
        }
    }

    #[test]
    fn key_exchange_groups_have_their_iana_numbers() {
        for (number, name) in [(23, "P-256"), (24, "P-384"), (29, "X25519")] {
            let known = KeyExchange::numbered(number).unwrap();
            assert_eq!((known.number(), known.name()), (number, name));
            assert_eq!(serde_json::to_value(known).unwrap(), name, "the configuration has the same name");
        }
        for number in [25, 4588, 0, -23, 22] {
            assert_eq!(KeyExchange::numbered(number), None, "{number}");
        }
    }
}
