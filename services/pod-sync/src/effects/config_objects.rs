//! The ConfigMaps and Secrets that the environment of a container refers to, fetched before the container is planned.

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_kube_model::{Container, Pod};
use keelson_pod_sync_core::config::{ObjectLookup, referenced_objects};
use keelson_proto::keelson::pod_config::v1::GetObjectRequest;
use tonic::Code;

use crate::effects::Effects;
use crate::effects::clients::bounded;

/// Text values by key.
type Data = BTreeMap<String, String>;

/// The objects of one container; `None` is one that does not exist.
#[derive(Debug, Default)]
pub struct Objects {
    config_maps: BTreeMap<String, Option<Data>>,
    secrets: BTreeMap<String, Option<Data>>,
}

impl ObjectLookup for Objects {
    fn config_map(&self, name: &str) -> Result<Option<Data>, String> {
        Ok(self.config_maps.get(name).cloned().flatten())
    }

    fn secret(&self, name: &str) -> Result<Option<Data>, String> {
        Ok(self.secrets.get(name).cloned().flatten())
    }
}

/// Fetches what the environment of a container refers to.
///
/// # Errors
/// pod-config does not answer, or an object does not decode.
pub async fn fetch(effects: &Effects, pod: &Pod, container: &Container) -> Result<Objects, String> {
    let (maps, secrets) = referenced_objects(container);
    let mut objects = Objects::default();
    for name in maps {
        let data = get(effects, "ConfigMap", pod, &name).await?;
        objects.config_maps.insert(name, data.map(|o| texts(&o["data"])));
    }
    for name in secrets {
        let data = get(effects, "Secret", pod, &name).await?;
        let decoded = data.map(|object| secret_data(&object, &name)).transpose()?;
        objects.secrets.insert(name, decoded);
    }
    Ok(objects)
}

async fn get(
    effects: &Effects,
    kind: &str,
    pod: &Pod,
    name: &str,
) -> Result<Option<serde_json::Value>, String> {
    let request = GetObjectRequest {
        kind: kind.to_owned(),
        namespace: pod.metadata.namespace.clone(),
        name: name.to_owned(),
    };
    match effects.clients.pods().get_object(bounded(request, Duration::from_secs(10))).await {
        Ok(response) => serde_json::from_slice(&response.into_inner().object_json)
            .map(Some)
            .map_err(|e| format!("{kind} {name:?} does not decode: {e}")),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(format!("cannot read {kind} {name:?}: {}", status.message())),
    }
}

fn texts(value: &serde_json::Value) -> Data {
    let pairs = value.as_object().into_iter().flatten();
    pairs.filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned()))).collect()
}

/// `data` is base64, `stringData` (which a manifest may carry) is plain and wins.
fn secret_data(object: &serde_json::Value, name: &str) -> Result<Data, String> {
    let mut data = Data::new();
    for (key, value) in texts(&object["data"]) {
        let bytes = keelson_kube_model::base64::decode(&value)
            .ok_or_else(|| format!("key {key:?} of Secret {name:?} is not base64"))?;
        data.insert(key, String::from_utf8_lossy(&bytes).into_owned());
    }
    data.extend(texts(&object["stringData"]));
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_data_is_decoded_and_string_data_wins() {
        let object = serde_json::json!({"data": {"a": "e\nA==\n", "b": "eQ=="}, "stringData": {"b": "z"}});
        let data = secret_data(&object, "s").unwrap();
        assert_eq!(data, BTreeMap::from([("a".into(), "x".into()), ("b".into(), "z".into())]));
    }

    #[test]
    fn secret_data_that_is_not_base64_is_named() {
        let object = serde_json::json!({"data": {"a": "%"}});
        assert!(secret_data(&object, "s").unwrap_err().contains("\"a\""));
    }
}
