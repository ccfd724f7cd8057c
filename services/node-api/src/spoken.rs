//! Which versions, cipher suites and ways to agree on keys of TLS the kubelet API speaks (node-and-api.md §2.5): those of
//! `tlsMinVersion`, `tlsCipherSuites` and `tlsCurvePreferences`.
//!
//! The suites of TLS 1.3 are always all there, as in Go, where a list chooses among those of older versions alone. A list that
//! has none of TLS 1.2 leaves 1.3 alone. In which order they are tried the client says, and of the ways to agree on keys rustls:
//! the order in the list does not count, as for a kubelet.

use keelson_config::{CipherSuite, KeyExchange};
use rustls::NamedGroup;
use rustls::crypto::{CryptoProvider, ring};
use rustls::{SupportedCipherSuite, SupportedProtocolVersion};

static ONLY_TLS13: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// What does the arithmetic, with the suites that may be spoken and the ways in which keys may be agreed on; without any: all.
pub(crate) fn provider(suites: &[CipherSuite], exchanges: &[KeyExchange]) -> CryptoProvider {
    let mut provider = ring::default_provider();
    if !suites.is_empty() {
        provider
            .cipher_suites
            .retain(|suite| is_tls13(suite) || suites.iter().any(|chosen| id(*chosen) == suite.suite()));
    }
    if !exchanges.is_empty() {
        provider.kx_groups.retain(|group| exchanges.iter().any(|chosen| group_of(*chosen) == group.name()));
    }
    provider
}

/// The versions that may be spoken with what `provider` has.
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

/// A suite as rustls calls it.
fn id(suite: CipherSuite) -> rustls::CipherSuite {
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

/// A way to agree on keys as rustls calls it.
fn group_of(exchange: KeyExchange) -> NamedGroup {
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

    fn ids(provider: &CryptoProvider) -> BTreeSet<u16> {
        provider.cipher_suites.iter().map(|suite| suite.suite().into()).collect()
    }

    fn ids_of(suites: &[CipherSuite]) -> BTreeSet<u16> {
        suites.iter().map(|suite| id(*suite).into()).collect()
    }

    #[test]
    fn the_suites_that_can_be_chosen_are_those_that_there_are() {
        assert_eq!(ids(&ring::default_provider()), ids_of(&CipherSuite::ALL));
        for suite in ring::default_provider().cipher_suites {
            let known = CipherSuite::ALL.into_iter().find(|known| id(*known) == suite.suite()).unwrap();
            assert_eq!(known.is_tls13(), is_tls13(&suite), "{}", known.name());
        }
        // RFC 8446 §B.4, RFC 5289 §3.2.
        let by_number =
            [("TLS_AES_128_GCM_SHA256", 0x1301), ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", 0xc030)];
        for (name, number) in by_number {
            assert_eq!(u16::from(id(CipherSuite::named(name).unwrap())), number, "{name}");
        }
    }

    #[test]
    fn a_list_chooses_among_those_of_tls_1_2_and_without_any_only_1_3_is_spoken() {
        use CipherSuite::{Aes128Gcm, Aes256Gcm, Chacha20, EcdsaAes128Gcm, RsaChacha20};
        let tls13 = [Aes128Gcm, Aes256Gcm, Chacha20];
        let with = |more: &[CipherSuite]| [&tls13[..], more].concat();
        for (chosen, only_tls13, suites, number_of_versions) in [
            (&[][..], false, CipherSuite::ALL.to_vec(), 2),
            (&[], true, CipherSuite::ALL.to_vec(), 1),
            (&[EcdsaAes128Gcm], false, with(&[EcdsaAes128Gcm]), 2),
            (&[EcdsaAes128Gcm], true, with(&[EcdsaAes128Gcm]), 1),
            (&[RsaChacha20, Aes128Gcm], false, with(&[RsaChacha20]), 2),
            (&[Aes128Gcm], false, with(&[]), 1),
        ] {
            let provider = provider(chosen, &[]);
            assert_eq!(ids(&provider), ids_of(&suites), "{chosen:?}");
            let versions = versions(&provider, only_tls13);
            assert_eq!(versions.len(), number_of_versions, "{chosen:?}, {only_tls13}");
            assert!(versions.contains(&&rustls::version::TLS13), "{chosen:?}, {only_tls13}");
        }
    }

    #[test]
    fn the_ways_to_agree_on_keys_that_can_be_chosen_are_those_that_there_are() {
        let of = |provider: &CryptoProvider| {
            provider.kx_groups.iter().map(|group| i64::from(u16::from(group.name()))).collect::<BTreeSet<_>>()
        };
        let numbers = |exchanges: &[KeyExchange]| exchanges.iter().map(|known| known.number()).collect();
        assert_eq!(of(&ring::default_provider()), numbers(&KeyExchange::ALL));
        for chosen in [&[][..], &[KeyExchange::P384], &[KeyExchange::X25519, KeyExchange::P256]] {
            let expected = if chosen.is_empty() { numbers(&KeyExchange::ALL) } else { numbers(chosen) };
            assert_eq!(of(&provider(&[], chosen)), expected, "{chosen:?}");
        }
    }
}
