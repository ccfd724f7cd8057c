//! The TLS versions, cipher suites and key exchange groups of the kubelet API (node-and-api.md §2.5), as configured by
//! `tlsMinVersion`, `tlsCipherSuites` and `tlsCurvePreferences`.
//!
//! All cipher suites of TLS 1.3 are always enabled, as in Go: a list restricts only those of older versions. A list without a
//! suite of TLS 1.2 disables TLS 1.2. The order of both lists has no effect, as in a kubelet: the client's order decides for
//! suites, and the order of rustls for key exchange groups.

use keelson_config::{CipherSuite, KeyExchange};
use rustls::NamedGroup;
use rustls::crypto::{CryptoProvider, ring};
use rustls::{SupportedCipherSuite, SupportedProtocolVersion};

static ONLY_TLS13: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// The crypto provider, restricted to these cipher suites and key exchange groups; an empty list is no restriction.
pub(crate) fn provider(suites: &[CipherSuite], exchanges: &[KeyExchange]) -> CryptoProvider {
    let mut provider = ring::default_provider();
    if !suites.is_empty() {
        provider.cipher_suites.retain(|suite| {
            is_tls13(suite) || suites.iter().any(|configured| suite_id(*configured) == suite.suite())
        });
    }
    if !exchanges.is_empty() {
        provider
            .kx_groups
            .retain(|group| exchanges.iter().any(|configured| group_id(*configured) == group.name()));
    }
    provider
}

/// The TLS versions that the cipher suites of `provider` allow.
pub(crate) fn versions(
    provider: &CryptoProvider,
    only_tls13: bool,
) -> &'static [&'static SupportedProtocolVersion] {
    if only_tls13 || provider.cipher_suites.iter().all(is_tls13) {
        ONLY_TLS13
    } else {
        rustls::DEFAULT_VERSIONS
    }
}

fn is_tls13(suite: &SupportedCipherSuite) -> bool {
    matches!(suite, SupportedCipherSuite::Tls13(_))
}

/// The identifier of a suite in rustls.
fn suite_id(suite: CipherSuite) -> rustls::CipherSuite {
    use rustls::CipherSuite as Id;
    match suite {
        CipherSuite::Aes128Gcm => Id::TLS13_AES_128_GCM_SHA256,
        CipherSuite::Aes256Gcm => Id::TLS13_AES_256_GCM_SHA384,
        CipherSuite::Chacha20 => Id::TLS13_CHACHA20_POLY1305_SHA256,
        CipherSuite::EcdsaAes128Gcm => Id::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        CipherSuite::EcdsaAes256Gcm => Id::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
        CipherSuite::EcdsaChacha20 => Id::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
        CipherSuite::RsaAes128Gcm => Id::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        CipherSuite::RsaAes256Gcm => Id::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
        CipherSuite::RsaChacha20 => Id::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    }
}

/// The identifier of a key exchange group in rustls.
fn group_id(exchange: KeyExchange) -> NamedGroup {
    match exchange {
        KeyExchange::P256 => NamedGroup::secp256r1,
        KeyExchange::P384 => NamedGroup::secp384r1,
        KeyExchange::X25519 => NamedGroup::X25519,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn provider_ids(provider: &CryptoProvider) -> BTreeSet<u16> {
        provider.cipher_suites.iter().map(|suite| suite.suite().into()).collect()
    }

    fn configured_ids(suites: &[CipherSuite]) -> BTreeSet<u16> {
        suites.iter().map(|suite| suite_id(*suite).into()).collect()
    }

    #[test]
    fn configurable_cipher_suites_are_all_that_rustls_supports() {
        assert_eq!(provider_ids(&ring::default_provider()), configured_ids(&CipherSuite::ALL));
        for suite in ring::default_provider().cipher_suites {
            let known = CipherSuite::ALL.into_iter().find(|known| suite_id(*known) == suite.suite()).unwrap();
            assert_eq!(known.is_tls13(), is_tls13(&suite), "{}", known.name());
        }
        // RFC 8446 §B.4, RFC 5289 §3.2.
        let by_number =
            [("TLS_AES_128_GCM_SHA256", 0x1301), ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", 0xc030)];
        for (name, number) in by_number {
            assert_eq!(u16::from(suite_id(CipherSuite::named(name).unwrap())), number, "{name}");
        }
    }

    #[test]
    fn cipher_suite_list_restricts_tls_1_2_and_without_any_disables_it() {
        use CipherSuite::{Aes128Gcm, Aes256Gcm, Chacha20, EcdsaAes128Gcm, RsaChacha20};
        let tls13 = [Aes128Gcm, Aes256Gcm, Chacha20];
        let with = |more: &[CipherSuite]| [&tls13[..], more].concat();
        for (configured, only_tls13, suites, number_of_versions) in [
            (&[][..], false, CipherSuite::ALL.to_vec(), 2),
            (&[], true, CipherSuite::ALL.to_vec(), 1),
            (&[EcdsaAes128Gcm], false, with(&[EcdsaAes128Gcm]), 2),
            (&[EcdsaAes128Gcm], true, with(&[EcdsaAes128Gcm]), 1),
            (&[RsaChacha20, Aes128Gcm], false, with(&[RsaChacha20]), 2),
            (&[Aes128Gcm], false, with(&[]), 1),
        ] {
            let provider = provider(configured, &[]);
            assert_eq!(provider_ids(&provider), configured_ids(&suites), "{configured:?}");
            let versions = versions(&provider, only_tls13);
            assert_eq!(versions.len(), number_of_versions, "{configured:?}, {only_tls13}");
            assert!(versions.contains(&&rustls::version::TLS13), "{configured:?}, {only_tls13}");
        }
    }

    #[test]
    fn curve_preferences_restrict_key_exchange_groups() {
        let group_numbers = |provider: &CryptoProvider| {
            provider.kx_groups.iter().map(|group| i64::from(u16::from(group.name()))).collect::<BTreeSet<_>>()
        };
        let numbers = |exchanges: &[KeyExchange]| exchanges.iter().map(|known| known.number()).collect();
        assert_eq!(group_numbers(&ring::default_provider()), numbers(&KeyExchange::ALL));
        for configured in [&[][..], &[KeyExchange::P384], &[KeyExchange::X25519, KeyExchange::P256]] {
            let expected =
                if configured.is_empty() { numbers(&KeyExchange::ALL) } else { numbers(configured) };
            assert_eq!(group_numbers(&provider(&[], configured)), expected, "{configured:?}");
        }
    }
}
