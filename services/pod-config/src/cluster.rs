//! What only a Kubernetes API has for pods: the variables of services, and tokens of service accounts.
//!
//! Services are followed in all namespaces, as their variables are those of the moment in which a container starts. What was
//! read is kept in the checkpoint, so that containers start again while the server is away. Tokens are kept nowhere here.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_kube_api::{Change, Follower, KubeApi, KubeError, News, Object, Range, Resource};
use keelson_pod_config_core::service_env::{Services, kept, service, variables};
use keelson_pod_config_core::token::{MadeToken, WantedToken, answer, request};
use keelson_service_kit::status::chain;
use keelson_service_kit::{CancellationToken, Progress};
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::kubernetes_source::KEPT;

/// The condition that says whether the services are heard of.
const CONDITION: &str = "control-plane-services";

/// The delays between requests for a token while the server has not seen the pod: its own watch of pods lags behind the one
/// that has told this node of the pod.
const POD_UNSEEN_DELAYS_MS: [u64; 5] = [50, 100, 200, 400, 800];

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

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The API server does not answer or refuses.
    #[error(transparent)]
    Server(#[from] KubeError),
    /// Its answer has no token.
    #[error("the API server's answer to the request for a token of {namespace}/{account} has no token")]
    NoToken {
        /// The account's namespace.
        namespace: String,
        /// The account.
        account: String,
    },
}

/// A cluster. Cheap to clone.
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
    /// The services have been read once, in this run or one before.
    read: bool,
}

fn prefix() -> String {
    format!("{KEPT}services/")
}

fn key_of(namespace: &str, name: &str) -> String {
    format!("{}{namespace}/{name}", prefix())
}

impl Cluster {
    /// Takes out of `earlier` what an earlier run of the service knew.
    pub fn new(api: KubeApi, checkpoint: Checkpoint, earlier: &mut BTreeMap<String, Vec<u8>>) -> Self {
        let prefix = prefix();
        let keys: Vec<String> = earlier.keys().filter(|key| key.starts_with(&prefix)).cloned().collect();
        let recalled = keys.into_iter().filter_map(|key| {
            let object: Value = serde_json::from_slice(&earlier.remove(&key)?).ok()?;
            let (namespace, name) = key.strip_prefix(&prefix)?.split_once('/')?;
            Some(((namespace.to_owned(), name.to_owned()), service(&object)?))
        });
        let services: Services = recalled.collect();
        // A cluster has at least the service of its API server.
        let state = State { read: !services.is_empty(), services };
        Self(Arc::new(Inner { api, checkpoint, state: Mutex::new(state) }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection to its API server.
    pub fn api(&self) -> &KubeApi {
        &self.0.api
    }

    /// The variables of a container in `namespace`; none while the services have not been read, unless what is known is
    /// enough (`as_known`).
    pub fn variables(
        &self,
        namespace: &str,
        links: bool,
        as_known: bool,
    ) -> Option<BTreeMap<String, String>> {
        let state = self.state();
        (state.read || as_known).then(|| variables(&state.services, namespace, links))
    }

    /// Has the server make a token. While it does not know the pod yet, it is asked again for a moment.
    ///
    /// # Errors
    /// It does not answer or refuses.
    pub async fn create_token(&self, wanted: &WantedToken) -> Result<MadeToken, TokenError> {
        let (namespace, account) = (&wanted.namespace, &wanted.service_account);
        let name = (account.as_str(), "token");
        let body = request(wanted);
        let mut delays = POD_UNSEEN_DELAYS_MS.into_iter();
        let made = loop {
            match self.0.api.create_below(Resource::SERVICE_ACCOUNT, Some(namespace), name, &body).await {
                Ok(made) => break made,
                Err(error) => match delays.next() {
                    Some(delay) if has_not_seen_the_pod(&error, &wanted.pod_name) => {
                        tokio::time::sleep(Duration::from_millis(delay)).await;
                    }
                    _ => return Err(error.into()),
                },
            }
        };
        answer(&made.0, wanted.expiration_seconds)
            .ok_or_else(|| TokenError::NoToken { namespace: namespace.clone(), account: account.clone() })
    }

    /// Follows the services until `shutdown`.
    pub async fn follow(self, progress: Progress, shutdown: CancellationToken) {
        let mut follower = Follower::new(self.0.api.clone(), Range::all(Resource::SERVICE));
        loop {
            // Cancel-safe: a follower reads again what it could not tell.
            let news = tokio::select! {
                () = shutdown.cancelled() => return,
                news = follower.next() => news,
            };
            match news {
                News::Listed(objects) => self.take_all(&objects),
                News::Changed(Change::Put(object)) => self.take(&object),
                News::Changed(Change::Deleted(object)) => self.forget(object.namespace(), object.name()),
                News::InTouch => {}
                News::Lost(error) => {
                    let text = format!("{}; what is known of services goes on", chain(&error));
                    progress.condition(CONDITION, Err(text));
                    continue;
                }
            }
            progress.condition(CONDITION, Ok(()));
        }
    }

    fn take_all(&self, objects: &[Object]) {
        let there: std::collections::BTreeSet<(String, String)> =
            objects.iter().map(|o| (o.namespace().to_owned(), o.name().to_owned())).collect();
        let known: Vec<(String, String)> = self.state().services.keys().cloned().collect();
        for (namespace, name) in known.iter().filter(|key| !there.contains(*key)) {
            self.forget(namespace, name);
        }
        objects.iter().for_each(|object| self.take(object));
        self.state().read = true;
    }

    fn take(&self, object: &Object) {
        let (namespace, name) = (object.namespace(), object.name());
        let Some(service) = service(&object.0) else { return self.forget(namespace, name) };
        self.0.checkpoint.put(&key_of(namespace, name), kept(&service).to_string().into_bytes());
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

    fn cluster(earlier: &mut BTreeMap<String, Vec<u8>>) -> Cluster {
        Cluster::new(KubeApi::new("/none".into(), "test"), Checkpoint::default(), earlier)
    }

    #[test]
    fn nothing_is_told_of_services_before_they_have_been_read_unless_what_is_known_is_enough() {
        let cluster = cluster(&mut BTreeMap::new());
        assert_eq!(cluster.variables("a", true, false), None);
        assert_eq!(cluster.variables("a", true, true), Some(BTreeMap::new()));
        cluster.take_all(&[object("a", "db", "10.0.0.3"), object("a", "head", "None")]);
        let host = |name: &str| cluster.variables("a", true, false).unwrap().get(name).cloned();
        assert_eq!(host("DB_SERVICE_HOST").as_deref(), Some("10.0.0.3"));
        assert_eq!(host("HEAD_SERVICE_HOST"), None);
        cluster.take(&object("a", "head", "10.0.0.4"));
        assert_eq!(host("HEAD_SERVICE_HOST").as_deref(), Some("10.0.0.4"));
        // One that loses its address is as good as gone.
        cluster.take(&object("a", "db", ""));
        cluster.forget("a", "head");
        assert_eq!(cluster.variables("a", true, false), Some(BTreeMap::new()));
    }

    #[test]
    fn services_are_known_over_a_restart_without_the_server() {
        let before = cluster(&mut BTreeMap::new());
        before.take_all(&[object("default", "kubernetes", "10.0.0.1"), object("a", "db", "10.0.0.3")]);
        let kept_of = |services: &Services| -> BTreeMap<String, Vec<u8>> {
            let one = |((namespace, name), service): (&(String, String), _)| {
                (key_of(namespace, name), kept(service).to_string().into_bytes())
            };
            services.iter().map(one).collect()
        };
        let mut earlier = kept_of(&before.state().services);
        assert_eq!(earlier.keys().cloned().collect::<Vec<_>>(), before.0.checkpoint.paths());
        earlier.insert("api:pods/a/b".to_owned(), Vec::new());
        let after = cluster(&mut earlier);
        assert_eq!(earlier.len(), 1, "what is somebody else's stays");
        assert_eq!(after.variables("a", true, false), before.variables("a", true, false));
        assert!(after.variables("a", true, false).is_some_and(|found| found.len() > 2));
        // What the server no longer has goes.
        after.take_all(&[object("default", "kubernetes", "10.0.0.1")]);
        assert_eq!(after.state().services.len(), 1);
    }
}
