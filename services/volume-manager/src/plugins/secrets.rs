//! Secrets that volumes refer to.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::Peer;
use keelson_volume_manager_core::objects::Strings;
use keelson_volume_manager_core::sources::SecretReference;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::FailureClass;
use serde::Deserialize;
use tonic::{Code, Request};

use super::{Answer, PluginError};

/// The timeout of a read: a little longer than pod-config waits for the API server.
const TIMEOUT: Duration = Duration::from_secs(35);

/// A Secret. Its `Debug` form does not show its data.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Secret {
    /// Its type.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Its values in base64.
    #[serde(deserialize_with = "null_as_empty")]
    pub(crate) data: Strings,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&String> = self.data.keys().collect();
        f.debug_struct("Secret").field("kind", &self.kind).field("keys", &keys).finish()
    }
}

fn null_as_empty<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Strings, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

impl Secret {
    /// The values as text. The error names the key and does not show the value.
    pub(crate) fn texts(&self) -> Result<BTreeMap<String, String>, String> {
        let texts = self.data.iter().map(|(key, value)| {
            let bytes = STANDARD.decode(value).map_err(|_| format!("the value of {key} is not base64"))?;
            let text = String::from_utf8(bytes).map_err(|_| format!("the value of {key} is not UTF-8"))?;
            Ok((key.clone(), text))
        });
        texts.collect()
    }
}

/// Reads Secrets.
pub(crate) trait Secrets: fmt::Debug + Send + Sync {
    /// The Secret as it is now. A missing one is an error.
    fn read<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Secret>;
}

/// Reads the Secret of a volume, whose pod has this namespace.
pub(super) async fn read(
    secrets: &dyn Secrets,
    reference: &SecretReference,
    pod_namespace: &str,
) -> Result<(String, Secret), PluginError> {
    let namespace = if reference.namespace.is_empty() { pod_namespace } else { reference.namespace.as_str() };
    let secret = secrets.read(namespace, &reference.name).await?;
    Ok((format!("{namespace}/{}", reference.name), secret))
}

/// Secrets from pod-config.
#[derive(Debug, Clone)]
pub(crate) struct PodConfigSecrets(Peer);

impl PodConfigSecrets {
    pub(crate) fn new(pod_config: Peer) -> Self {
        Self(pod_config)
    }
}

impl Secrets for PodConfigSecrets {
    fn read<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Secret> {
        Box::pin(async move {
            let message = pb::GetObjectRequest {
                kind: "Secret".to_owned(),
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            };
            let mut request = Request::new(message);
            request.set_timeout(TIMEOUT);
            let error = |owner: WaitOwner, why: &str| PluginError {
                owner,
                ..PluginError::new(format!("cannot read the Secret {namespace}/{name}: {why}"))
                    .of_class(FailureClass::Transient)
            };
            let mut client = PodConfigClient::new(self.0.channel());
            let response = client.get_object(request).await.map_err(|status| match status.code() {
                Code::NotFound => error(WaitOwner::You, "it does not exist; create it"),
                _ => error(WaitOwner::ApiServer, status.message()),
            })?;
            // The text of the error could show a part of the Secret.
            serde_json::from_slice(&response.into_inner().object_json)
                .map_err(|_| error(WaitOwner::You, "it is not a Secret"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(json: &str) -> Secret {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn values_of_a_secret_are_read_and_never_shown() {
        let read = secret(r#"{"type": "t", "data": {"user": "dTE=", "password": "aHVudGVyMg=="}}"#);
        assert_eq!(read.texts().unwrap()["password"], "hunter2");
        let shown = format!("{read:?}");
        assert!(shown.contains("password") && !shown.contains("aHVudGVyMg"), "{shown}");
        assert_eq!(secret(r#"{"data": null}"#), Secret::default());
    }

    #[test]
    fn a_value_that_is_not_text_is_refused_by_its_key() {
        for (value, why) in [("!", "base64"), ("/w==", "UTF-8")] {
            let read = Secret { kind: String::new(), data: [("key".into(), value.into())].into() };
            let error = read.texts().unwrap_err();
            assert!(error.contains("key") && error.contains(why) && !error.contains(value), "{error}");
        }
    }
}
