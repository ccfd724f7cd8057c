//! The node's lease (node-and-api.md §10): `kube-node-lease/<node>`, renewed four times within its duration.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_kube_api::{KubeApi, KubeError, Object, Resource};
use keelson_kube_model::time;
use keelson_node_status_core::name_conflict::{Renewals, conflict_message};
use keelson_service_kit::{Context, ObjectRef, now_unix_nanos};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{retry_after, with_timeout};

const NAMESPACE: Option<&str> = Some("kube-node-lease");
/// How long the first renewal waits for the node to be registered.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Tries per renewal.
const TRIES: u32 = 5;
/// The longest `Retry-After` that is respected; a lease of 40 s lasts longer.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(7);
/// The condition, and the reason of the event, that report another agent with the node's name.
const NAME_CONDITION: &str = "node name";
const NAME_TAKEN: &str = "NodeNameTaken";

/// The node's lease.
pub(super) struct Lease {
    ctx: Context,
    api: KubeApi,
    node: String,
    seconds: u32,
    /// Timeout of one try.
    within: Duration,
    /// The lease as the server has it, if known.
    last: Mutex<Option<Object>>,
    /// The UID of the Node, empty before it is registered.
    owner: watch::Sender<String>,
    /// Detects whether another agent renews the lease, too.
    renewals: Mutex<Renewals>,
    /// `status.nodeInfo` of this machine.
    node_info: Mutex<Value>,
    is_reported: AtomicBool,
}

impl Lease {
    /// Nothing is written yet.
    pub(super) fn new(ctx: &Context, api: KubeApi, seconds: u32, within: Duration) -> Self {
        Self {
            ctx: ctx.clone(),
            api,
            node: ctx.config.node_name.clone(),
            seconds,
            within,
            last: Mutex::default(),
            owner: watch::Sender::new(String::new()),
            renewals: Mutex::default(),
            node_info: Mutex::default(),
            is_reported: AtomicBool::new(false),
        }
    }

    /// Stores what the Node says of this machine (`status.nodeInfo`).
    pub(super) fn set_node_info(&self, node_info: &Value) {
        node_info.clone_into(&mut self.node_info.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn renewals(&self) -> MutexGuard<'_, Renewals> {
        self.renewals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the UID of the registered Node.
    pub(super) fn set_owner(&self, uid: &str) {
        self.owner.send_if_modified(|owner| {
            let other = owner != uid;
            uid.clone_into(owner);
            other
        });
    }

    /// Renews the lease.
    ///
    /// # Errors
    /// The server does not answer, or no Node is registered that could own the lease.
    pub(super) async fn renew(&self) -> Result<(), KubeError> {
        let mut failed = None;
        for attempt in 1..=TRIES {
            let turn = with_timeout(&self.api, "the node's lease", self.within, self.renew_once());
            match turn.await {
                Ok(()) => {
                    let is_shared = self.renewals().finish_turn();
                    self.report_name_conflict(is_shared).await;
                    return Ok(());
                }
                Err(error) => {
                    *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
                    if attempt >= 2 && error.code().is_none() {
                        // It may be the connection: the next try uses a new one.
                        self.api.give_up_connection();
                    }
                    tokio::time::sleep(retry_after(&error).min(MAX_RETRY_AFTER)).await;
                    let again = error.is_conflict();
                    failed = Some(error);
                    if !again && attempt >= 2 {
                        break;
                    }
                }
            }
        }
        Err(failed.unwrap_or_else(|| self.api.unreachable("the node's lease", "no try was made".to_owned())))
    }

    /// Reports that another agent uses the node's name, or that it does not any more.
    async fn report_name_conflict(&self, is_shared: bool) {
        if !is_shared {
            self.is_reported.store(false, Ordering::Relaxed);
            return self.ctx.progress.condition(NAME_CONDITION, Ok(()));
        }
        // Who the other agent is helps, but is not required: without an answer the message omits it.
        let ask = self.api.get(Resource::NODE, None, &self.node);
        let live = with_timeout(&self.api, "the Node", self.within, ask).await.ok().flatten();
        let live = live.map(|Object(node)| node["status"]["nodeInfo"].clone()).unwrap_or_default();
        let ours = self.node_info.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let message = conflict_message(&self.node, &ours, &live);
        if !self.is_reported.swap(true, Ordering::Relaxed) {
            self.ctx.events.warning(ObjectRef::node(&self.node), NAME_TAKEN, message.clone());
        }
        self.ctx.progress.condition(NAME_CONDITION, Err(message));
    }

    async fn renew_once(&self) -> Result<(), KubeError> {
        let known = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let known = match known {
            Some(known) => Some(known),
            None => {
                let found = self.api.get(Resource::LEASE, NAMESPACE, &self.node).await?;
                let time = found.as_ref().and_then(|found| found.0["spec"]["renewTime"].as_str());
                time.into_iter().for_each(|time| self.renewals().record_seen(time));
                found
            }
        };
        let now = match known {
            Some(before) => {
                let lease = self.with_renew_time(before.0);
                self.api.replace(Resource::LEASE, NAMESPACE, &lease).await?
            }
            None => {
                let mut owner = self.owner.subscribe();
                // The sender lives as long as the lease.
                let registered = async { owner.wait_for(|uid| !uid.is_empty()).await.is_ok() };
                if !tokio::time::timeout(REGISTRATION_TIMEOUT, registered).await.unwrap_or(false) {
                    let message = format!("the Node {} that it belongs to is not registered yet", self.node);
                    return Err(self.api.unreachable("the node's lease", message));
                }
                let name = json!({"metadata": {"name": self.node, "namespace": NAMESPACE}, "spec": {}});
                self.api.create(Resource::LEASE, NAMESPACE, &self.with_renew_time(name)).await?
            }
        };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        Ok(())
    }

    fn with_renew_time(&self, mut lease: Value) -> Value {
        lease["apiVersion"] = "coordination.k8s.io/v1".into();
        lease["kind"] = "Lease".into();
        let spec = &mut lease["spec"];
        spec["holderIdentity"] = self.node.clone().into();
        spec["leaseDurationSeconds"] = self.seconds.into();
        let now = time::format_micros(i128::from(now_unix_nanos())).unwrap_or_default();
        self.renewals().record_attempt(&now);
        spec["renewTime"] = now.into();
        let owner = self.owner.borrow().clone();
        if !owner.is_empty() {
            lease["metadata"]["ownerReferences"] =
                json!([{"apiVersion": "v1", "kind": "Node", "name": self.node, "uid": owner}]);
        }
        lease
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, ServiceName};

    use super::super::fake::Server;
    use super::*;

    fn lease(api: KubeApi) -> Lease {
        let config = Config { node_name: "n".into(), ..Config::default() };
        let ctx = Context::detached(ServiceName::NodeStatus, config);
        Lease::new(&ctx, api, 40, Duration::from_secs(10))
    }

    #[test]
    fn a_lease_renewal_changes_renew_time_and_keeps_other_fields() {
        let lease = lease(KubeApi::new("/nowhere".into(), "test"));
        let before = json!({"metadata": {"name": "n", "resourceVersion": "7", "labels": {"a": "b"}},
            "spec": {"holderIdentity": "n", "renewTime": "2020-01-01T00:00:00.000000Z", "leaseTransitions": 3}});
        let now = lease.with_renew_time(before);
        assert_eq!(
            (&now["metadata"]["resourceVersion"], &now["metadata"]["labels"]["a"]),
            (&json!("7"), &json!("b"))
        );
        assert_eq!(
            (&now["spec"]["leaseDurationSeconds"], &now["spec"]["leaseTransitions"]),
            (&json!(40), &json!(3))
        );
        assert_ne!(now["spec"]["renewTime"], "2020-01-01T00:00:00.000000Z");
        assert_eq!(now["metadata"].get("ownerReferences"), None, "there is no Node yet");
        lease.set_owner("u-1");
        let owner = &lease.with_renew_time(now)["metadata"]["ownerReferences"][0];
        assert_eq!(*owner, json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u-1"}));
    }

    #[tokio::test]
    async fn a_lease_renewal_respects_retry_after() {
        let server = Server::with_retry_after("1", |number| (number == 0).then_some(429)).await;
        let began = std::time::Instant::now();
        lease(server.api.clone()).renew().await.unwrap();
        assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
        let methods: Vec<String> = server.requests().into_iter().map(|(method, _)| method).collect();
        assert_eq!(methods, ["GET", "PUT"]);
    }
}
