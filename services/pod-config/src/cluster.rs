//! What only a Kubernetes API provides for pods: service variables and service account tokens.
//!
//! Services are followed in all namespaces, because their variables are computed when a container starts. They are stored in the
//! checkpoint, so that containers can restart while the server is down. Tokens are never stored.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_kube_api::{Change, Follower, KubeApi, KubeError, Object, Range, Resource, WatchEvent};
use keelson_pod_config_core::service_env::{Services, checkpoint_object, service, variables};
use keelson_pod_config_core::token::{IssuedToken, TokenRequest, parse_response, request_object};
use keelson_service_kit::status::chain;
use keelson_service_kit::{CancellationToken, Progress};
use serde_json::Value;

use crate::checkpoint::{API_KEY_PREFIX, Checkpoint};

/// The condition for the connection to services.
const CONDITION: &str = "control-plane-services";

/// Delays between requests on behalf of a pod while the server has not seen it: the server's own watch of pods lags behind the watch of
/// this node.
pub const POD_UNSEEN_DELAYS_MS: [u64; 5] = [50, 100, 200, 400, 800];

/// Whether a refusal of a token may mean that the server has not seen the pod, or its binding to this node, yet. These refusals
/// have no structured reason of their own, so their text is matched (docs/node-requests.md).
fn has_not_seen_the_pod(error: &KubeError, pod: &str) -> bool {
    let KubeError::Refused { code, message, .. } = error else { return false };
    match code {
        403 => error.is_unrelated() || message.contains("bound to a pod scheduled on a different node"),
        404 => error.is_not_found() && message.contains(&format!("pods \"{pod}\" not found")),
        // A pod of the same name was deleted a moment ago.
        409 => message.contains("does not match the UID in record"),
        _ => false,
    }
}

/// Why no token was issued.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The API server is unreachable or refuses.
    #[error(transparent)]
    Server(#[from] KubeError),
    /// Its response has no token.
    #[error("the API server's answer to the request for a token of {namespace}/{account} has no token")]
    NoToken {
        /// Namespace of the account.
        namespace: String,
        /// Name of the account.
        account: String,
    },
}

/// The services and tokens of a cluster. Cheap to clone.
#[derive(Clone)]
pub struct Cluster(Arc<Inner>);

struct Inner {
    api: KubeApi,
    checkpoint: Checkpoint,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    services: Services,
    /// The services have been read, in this run or before the restart.
    read: bool,
}

fn prefix() -> String {
    format!("{API_KEY_PREFIX}services/")
}

fn key_of(namespace: &str, name: &str) -> String {
    format!("{}{namespace}/{name}", prefix())
}

impl Cluster {
    /// Takes the services of the checkpoint out of `restored`.
    pub fn new(api: KubeApi, checkpoint: Checkpoint, restored: &mut BTreeMap<String, Vec<u8>>) -> Self {
        let prefix = prefix();
        let keys: Vec<String> = restored.keys().filter(|key| key.starts_with(&prefix)).cloned().collect();
        let parsed = keys.into_iter().filter_map(|key| {
            let object: Value = serde_json::from_slice(&restored.remove(&key)?).ok()?;
            let (namespace, name) = key.strip_prefix(&prefix)?.split_once('/')?;
            Some(((namespace.to_owned(), name.to_owned()), service(&object)?))
        });
        let services: Services = parsed.collect();
        // Every cluster has at least the service of its API server.
        let state = State { read: !services.is_empty(), services };
        Self(Arc::new(Inner { api, checkpoint, state: Mutex::new(state) }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client of its API server.
    pub fn api(&self) -> &KubeApi {
        &self.0.api
    }

    /// The variables of a container in `namespace`; `None` until the services have been read, unless `as_known` is set.
    pub fn variables(
        &self,
        namespace: &str,
        links: bool,
        as_known: bool,
    ) -> Option<BTreeMap<String, String>> {
        let state = self.state();
        (state.read || as_known).then(|| variables(&state.services, namespace, links))
    }

    /// Requests a token from the server. Retries for a moment while the server does not know the pod yet.
    ///
    /// # Errors
    /// The server is unreachable or refuses.
    pub async fn create_token(&self, wanted: &TokenRequest) -> Result<IssuedToken, TokenError> {
        let (namespace, account) = (&wanted.namespace, &wanted.service_account);
        let name = (account.as_str(), "token");
        let body = request_object(wanted);
        let mut delays = POD_UNSEEN_DELAYS_MS.into_iter();
        let response = loop {
            match self.0.api.create_below(Resource::SERVICE_ACCOUNT, Some(namespace), name, &body).await {
                Ok(response) => break response,
                Err(error) => match delays.next() {
                    Some(delay) if has_not_seen_the_pod(&error, &wanted.pod_name) => {
                        tokio::time::sleep(Duration::from_millis(delay)).await;
                    }
                    _ => return Err(error.into()),
                },
            }
        };
        parse_response(&response.0, wanted.expiration_seconds)
            .ok_or_else(|| TokenError::NoToken { namespace: namespace.clone(), account: account.clone() })
    }

    /// Follows the services until `shutdown`.
    pub async fn follow(self, progress: Progress, shutdown: CancellationToken) {
        let mut follower = Follower::new(self.0.api.clone(), Range::all(Resource::SERVICE));
        loop {
            // Cancel-safe: a follower reads again what it did not return.
            let event = tokio::select! {
                () = shutdown.cancelled() => return,
                event = follower.next() => event,
            };
            match event {
                WatchEvent::Listed(objects) => self.apply_list(&objects),
                WatchEvent::Changed(Change::Put(object)) => self.apply(&object),
                WatchEvent::Changed(Change::Deleted(object)) => {
                    self.forget(object.namespace(), object.name())
                }
                WatchEvent::Contact => {}
                WatchEvent::Lost(error) => {
                    let text = format!("{}; the last known services stay in effect", chain(&error));
                    progress.condition(CONDITION, Err(text));
                    continue;
                }
            }
            progress.condition(CONDITION, Ok(()));
        }
    }

    fn apply_list(&self, objects: &[Object]) {
        let listed: std::collections::BTreeSet<(String, String)> =
            objects.iter().map(|o| (o.namespace().to_owned(), o.name().to_owned())).collect();
        let known: Vec<(String, String)> = self.state().services.keys().cloned().collect();
        for (namespace, name) in known.iter().filter(|key| !listed.contains(*key)) {
            self.forget(namespace, name);
        }
        objects.iter().for_each(|object| self.apply(object));
        self.state().read = true;
    }

    fn apply(&self, object: &Object) {
        let (namespace, name) = (object.namespace(), object.name());
        let Some(service) = service(&object.0) else { return self.forget(namespace, name) };
        self.0.checkpoint.put(&key_of(namespace, name), checkpoint_object(&service).to_string().into_bytes());
        self.state().services.insert((namespace.to_owned(), name.to_owned()), service);
    }

    fn forget(&self, namespace: &str, name: &str) {
        self.0.checkpoint.remove(&key_of(namespace, name));
        self.state().services.remove(&(namespace.to_owned(), name.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(namespace: &str, name: &str, address: &str) -> Object {
        Object(json!({"metadata": {"namespace": namespace, "name": name},
            "spec": {"clusterIP": address, "ports": [{"port": 80}]}}))
    }

    fn cluster(restored: &mut BTreeMap<String, Vec<u8>>) -> Cluster {
        Cluster::new(KubeApi::new("/none".into(), "test"), Checkpoint::default(), restored)
    }

    #[test]
    fn service_variables_need_a_first_read_unless_as_known_is_set() {
        let cluster = cluster(&mut BTreeMap::new());
        assert_eq!(cluster.variables("a", true, false), None);
        assert_eq!(cluster.variables("a", true, true), Some(BTreeMap::new()));
        cluster.apply_list(&[object("a", "db", "10.0.0.3"), object("a", "head", "None")]);
        let host = |name: &str| cluster.variables("a", true, false).unwrap().get(name).cloned();
        assert_eq!(host("DB_SERVICE_HOST").as_deref(), Some("10.0.0.3"));
        assert_eq!(host("HEAD_SERVICE_HOST"), None);
        cluster.apply(&object("a", "head", "10.0.0.4"));
        assert_eq!(host("HEAD_SERVICE_HOST").as_deref(), Some("10.0.0.4"));
        // A service without an address has no variables.
        cluster.apply(&object("a", "db", ""));
        cluster.forget("a", "head");
        assert_eq!(cluster.variables("a", true, false), Some(BTreeMap::new()));
    }

    #[test]
    fn services_are_restored_after_a_restart_without_the_server() {
        let before = cluster(&mut BTreeMap::new());
        before.apply_list(&[object("default", "kubernetes", "10.0.0.1"), object("a", "db", "10.0.0.3")]);
        let checkpoint_rows = |services: &Services| -> BTreeMap<String, Vec<u8>> {
            let one = |((namespace, name), service): (&(String, String), _)| {
                (key_of(namespace, name), checkpoint_object(service).to_string().into_bytes())
            };
            services.iter().map(one).collect()
        };
        let mut restored = checkpoint_rows(&before.state().services);
        assert_eq!(restored.keys().cloned().collect::<Vec<_>>(), before.0.checkpoint.paths());
        restored.insert("api:pods/a/b".to_owned(), Vec::new());
        let after = cluster(&mut restored);
        assert_eq!(restored.len(), 1, "rows of others stay");
        assert_eq!(after.variables("a", true, false), before.variables("a", true, false));
        assert!(after.variables("a", true, false).is_some_and(|found| found.len() > 2));
        // Services that the server no longer has are removed.
        after.apply_list(&[object("default", "kubernetes", "10.0.0.1")]);
        assert_eq!(after.state().services.len(), 1);
    }
}
