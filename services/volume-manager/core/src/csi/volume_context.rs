//! What a CSI driver learns about the pod when a volume is published, and which tokens it gets (volumes.md §11.6).

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::{CsiDriver, LifecycleMode};
use crate::objects::Strings;
use crate::token::TokenName;

/// The lifetime of a token in seconds for which the CSIDriver asks for none (the API server's default).
const DEFAULT_EXPIRATION_SECONDS: i64 = 3600;
/// The entry of the tokens, in the volume context or in the secrets.
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// The pod that a volume is published to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInfo {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `spec.serviceAccountName`.
    pub service_account: String,
}

/// A token of the pod's service account.
#[derive(Clone, PartialEq, Eq)]
pub struct IssuedToken {
    /// The token.
    pub token: String,
    /// When it expires, in RFC 3339 as in the API.
    pub expiration_timestamp: String,
}

// Never shows the token.
impl fmt::Debug for IssuedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IssuedToken")
            .field("expiration_timestamp", &self.expiration_timestamp)
            .finish_non_exhaustive()
    }
}

/// `volume_context` and `secrets` of `NodePublishVolume`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PublishMaps {
    /// What the driver needs to know about the volume.
    pub volume_context: Strings,
    /// What must never be logged.
    pub secrets: Strings,
}

// Shows neither secrets nor tokens.
impl fmt::Debug for PublishMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let context: BTreeMap<&str, &str> = self
            .volume_context
            .iter()
            .map(|(key, value)| (key.as_str(), if key == TOKENS { "<masked>" } else { value }))
            .collect();
        f.debug_struct("PublishMaps")
            .field("volume_context", &context)
            .field("secrets", &self.secrets.keys().collect::<Vec<_>>())
            .finish()
    }
}

/// A token that the driver wants was not passed to [`publish_maps`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the driver {driver} wants a {token}, and there is none yet; the volume is published once it was issued"
)]
pub struct TokenMissing {
    /// The driver.
    pub driver: String,
    /// The token.
    pub token: TokenName,
}

/// The tokens that the driver wants for a pod, in the order of the CSIDriver and each audience once: of two requests
/// for one audience the later one counts. All are bound to the pod.
pub fn wanted_tokens(driver: Option<&CsiDriver>, service_account: &str) -> Vec<TokenName> {
    let mut wanted: Vec<TokenName> = Vec::new();
    for request in driver.and_then(|driver| driver.spec.token_requests.as_ref()).into_iter().flatten() {
        let name = TokenName {
            service_account: service_account.to_owned(),
            audience: request.audience.clone().unwrap_or_default(),
            expiration_seconds: request.expiration_seconds.unwrap_or(DEFAULT_EXPIRATION_SECONDS),
        };
        match wanted.iter_mut().find(|other| other.audience == name.audience) {
            Some(other) => *other = name,
            None => wanted.push(name),
        }
    }
    wanted
}

/// What the driver is called with: `own`, that is the volume's attributes and its secrets, and what the CSIDriver asks
/// for. An entry of the agent's replaces one of the volume's with the same key. Without a CSIDriver nothing is added.
///
/// `token` gives each of [`wanted_tokens`].
pub fn publish_maps(
    own: PublishMaps,
    driver: Option<&CsiDriver>,
    pod: &PodInfo,
    lifecycle: LifecycleMode,
    token: impl Fn(&TokenName) -> Option<IssuedToken>,
) -> Result<PublishMaps, TokenMissing> {
    let mut maps = own;
    let Some(driver) = driver else { return Ok(maps) };
    if driver.spec.pod_info_on_mount == Some(true) {
        maps.volume_context.extend(pod_entries(pod, lifecycle));
    }
    let wanted = wanted_tokens(Some(driver), &pod.service_account);
    if !wanted.is_empty() {
        let tokens = tokens_json(driver, &wanted, token)?;
        let target = if driver.spec.service_account_token_in_secrets == Some(true) {
            &mut maps.secrets
        } else {
            &mut maps.volume_context
        };
        target.insert(TOKENS.to_owned(), tokens);
    }
    Ok(maps)
}

fn pod_entries(pod: &PodInfo, lifecycle: LifecycleMode) -> [(String, String); 5] {
    let ephemeral = match lifecycle {
        LifecycleMode::Ephemeral => "true",
        LifecycleMode::Persistent => "false",
    };
    [
        ("pod.name", pod.name.as_str()),
        ("pod.namespace", pod.namespace.as_str()),
        ("pod.uid", pod.uid.as_str()),
        ("serviceAccount.name", pod.service_account.as_str()),
        ("ephemeral", ephemeral),
    ]
    .map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value.to_owned()))
}

/// A JSON object: audience → `{token, expirationTimestamp}`, sorted by audience.
fn tokens_json(
    driver: &CsiDriver,
    wanted: &[TokenName],
    token: impl Fn(&TokenName) -> Option<IssuedToken>,
) -> Result<String, TokenMissing> {
    let mut by_audience = BTreeMap::new();
    for name in wanted {
        let Some(issued) = token(name) else {
            return Err(TokenMissing { driver: driver.metadata.name.clone(), token: name.clone() });
        };
        let fields = [("token", issued.token), ("expirationTimestamp", issued.expiration_timestamp)];
        let fields: Map<String, Value> =
            fields.into_iter().map(|(key, value)| (key.to_owned(), Value::from(value))).collect();
        by_audience.insert(name.audience.clone(), Value::Object(fields));
    }
    Ok(Value::Object(by_audience.into_iter().collect()).to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NO_TOKENS: fn(&TokenName) -> Option<IssuedToken> = |_| None;

    fn driver(spec: Value) -> CsiDriver {
        serde_json::from_value(json!({"metadata": {"name": "d.io"}, "spec": spec})).unwrap()
    }

    fn pod() -> PodInfo {
        PodInfo {
            name: "web".into(),
            namespace: "shop".into(),
            uid: "u-1".into(),
            service_account: "sa".into(),
        }
    }

    fn own() -> PublishMaps {
        PublishMaps {
            volume_context: [("size".to_owned(), "1".to_owned())].into(),
            secrets: [("password".to_owned(), "hunter2".to_owned())].into(),
        }
    }

    fn issue(name: &TokenName) -> Option<IssuedToken> {
        Some(IssuedToken {
            token: format!("{}/{}/{}", name.service_account, name.audience, name.expiration_seconds),
            expiration_timestamp: "2026-01-01T00:00:00Z".into(),
        })
    }

    #[test]
    fn nothing_is_added_unless_the_csi_driver_asks_for_it() {
        let plain = driver(json!({}));
        let refusing = driver(json!({
            "podInfoOnMount": false, "tokenRequests": [], "serviceAccountTokenInSecrets": true,
        }));
        for object in [None, Some(&plain), Some(&refusing)] {
            let maps = publish_maps(own(), object, &pod(), LifecycleMode::Ephemeral, NO_TOKENS);
            assert_eq!(maps, Ok(own()), "{object:?}");
        }
    }

    #[test]
    fn pod_info_has_five_entries_and_says_whether_the_volume_is_inline() {
        let object = driver(json!({"podInfoOnMount": true}));
        for (lifecycle, ephemeral) in
            [(LifecycleMode::Ephemeral, "true"), (LifecycleMode::Persistent, "false")]
        {
            let maps = publish_maps(own(), Some(&object), &pod(), lifecycle, NO_TOKENS).unwrap();
            let expected = [
                ("csi.storage.k8s.io/ephemeral", ephemeral),
                ("csi.storage.k8s.io/pod.name", "web"),
                ("csi.storage.k8s.io/pod.namespace", "shop"),
                ("csi.storage.k8s.io/pod.uid", "u-1"),
                ("csi.storage.k8s.io/serviceAccount.name", "sa"),
                ("size", "1"),
            ];
            let found: Vec<_> = maps.volume_context.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            assert_eq!(found, expected);
            assert_eq!(maps.secrets, own().secrets);
        }
    }

    #[test]
    fn tokens_are_one_json_object_by_audience() {
        let requests = json!([{"audience": "vault", "expirationSeconds": 600}, {"audience": ""}]);
        let object = driver(json!({"tokenRequests": requests}));
        let maps = publish_maps(own(), Some(&object), &pod(), LifecycleMode::Persistent, issue).unwrap();
        let expected = "{\"\":{\"token\":\"sa//3600\",\"expirationTimestamp\":\"2026-01-01T00:00:00Z\"},\
                        \"vault\":{\"token\":\"sa/vault/600\",\"expirationTimestamp\":\"2026-01-01T00:00:00Z\"}}";
        assert_eq!(maps.volume_context["csi.storage.k8s.io/serviceAccount.tokens"], expected);
        assert_eq!(maps.secrets, own().secrets);
    }

    #[test]
    fn tokens_go_into_the_secrets_only_when_the_csi_driver_says_so() {
        for (flag, in_secrets) in [(json!(null), false), (json!(false), false), (json!(true), true)] {
            let spec = json!({"tokenRequests": [{"audience": "a"}], "serviceAccountTokenInSecrets": flag});
            let maps =
                publish_maps(own(), Some(&driver(spec)), &pod(), LifecycleMode::Persistent, issue).unwrap();
            assert_eq!(maps.secrets.contains_key(TOKENS), in_secrets, "{flag}");
            assert_eq!(maps.volume_context.contains_key(TOKENS), !in_secrets, "{flag}");
            assert_eq!(maps.secrets["password"], "hunter2");
        }
    }

    #[test]
    fn entries_of_the_agent_replace_those_that_the_volume_claims() {
        let forged = PublishMaps {
            volume_context: [
                ("csi.storage.k8s.io/pod.name".to_owned(), "other".to_owned()),
                (TOKENS.to_owned(), "{}".to_owned()),
            ]
            .into(),
            secrets: Strings::new(),
        };
        let object = driver(json!({"podInfoOnMount": true, "tokenRequests": [{"audience": "a"}]}));
        let maps = publish_maps(forged, Some(&object), &pod(), LifecycleMode::Ephemeral, issue).unwrap();
        assert_eq!(maps.volume_context["csi.storage.k8s.io/pod.name"], "web");
        assert!(maps.volume_context[TOKENS].contains("sa/a/3600"));
    }

    #[test]
    fn a_missing_token_is_an_error_that_names_driver_and_audience() {
        let object = driver(json!({"tokenRequests": [{"audience": "a"}, {"audience": "b"}]}));
        let only_a = |name: &TokenName| (name.audience == "a").then(|| issue(name)).flatten();
        let error =
            publish_maps(own(), Some(&object), &pod(), LifecycleMode::Persistent, only_a).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("d.io") && text.contains("for \"b\"") && text.contains("\"sa\""), "{text}");
    }

    #[test]
    fn each_audience_is_wanted_once_and_the_later_request_counts() {
        let requests = json!([{"audience": "a", "expirationSeconds": 1}, {}, {"audience": "a"}]);
        let wanted = wanted_tokens(Some(&driver(json!({"tokenRequests": requests}))), "sa");
        let found: Vec<_> =
            wanted.iter().map(|name| (name.audience.as_str(), name.expiration_seconds)).collect();
        assert_eq!(found, [("a", 3600), ("", 3600)]);
        assert!(wanted.iter().all(|name| name.service_account == "sa"));
        assert_eq!(wanted_tokens(None, "sa"), []);
    }

    #[test]
    fn debug_output_shows_neither_secrets_nor_tokens() {
        for flag in [false, true] {
            let spec = json!({"tokenRequests": [{"audience": "aud"}], "serviceAccountTokenInSecrets": flag});
            let maps =
                publish_maps(own(), Some(&driver(spec)), &pod(), LifecycleMode::Persistent, issue).unwrap();
            let text = format!("{maps:?}");
            assert!(!text.contains("hunter2") && !text.contains("sa/aud"), "{text}");
            assert!(text.contains("password") && text.contains("size"), "{text}");
        }
        let token = issue(&wanted_tokens(Some(&driver(json!({"tokenRequests": [{}]}))), "sa")[0]).unwrap();
        assert!(!format!("{token:?}").contains("sa//"), "{token:?}");
    }
}
