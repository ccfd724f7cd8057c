//! The lease of the node (node-and-api.md §10): `kube-node-lease/<node>`, renewed four times in its length.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_kube_api::{KubeApi, KubeError, Object, Resource};
use keelson_kube_model::time;
use keelson_node_status_core::namesake::{Renewals, in_words};
use keelson_service_kit::{Context, ObjectRef, now_unix_nanos};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{asked_for, in_time};

const NAMESPACE: Option<&str> = Some("kube-node-lease");
/// How long the first renewal waits for the node to be registered.
const REGISTRATION: Duration = Duration::from_secs(5);
/// Tries of one renewal.
const TRIES: u32 = 5;
/// The longest that the server is left alone because it has asked for it; a lease of 40 s goes on meanwhile.
const MOST_ASKED: Duration = Duration::from_secs(7);
/// The condition, and the reason of the event, that say that the name is another agent's as well.
const NAME_CONDITION: &str = "node name";
const NAME_TAKEN: &str = "NodeNameTaken";

/// The node's lease.
pub(super) struct Lease {
    ctx: Context,
    api: KubeApi,
    node: String,
    seconds: u32,
    /// How long one try may take.
    within: Duration,
    /// As the server has it, as far as it is known.
    last: Mutex<Option<Object>>,
    /// The UID of the Node, empty before there is one.
    owner: watch::Sender<String>,
    /// Whether somebody else renews it, too.
    renewals: Mutex<Renewals>,
    /// `status.nodeInfo` of this machine.
    machine: Mutex<Value>,
    is_told: AtomicBool,
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
            machine: Mutex::default(),
            is_told: AtomicBool::new(false),
        }
    }

    /// What the Node says of this machine (`status.nodeInfo`).
    pub(super) fn is_of_machine(&self, node_info: &Value) {
        node_info.clone_into(&mut self.machine.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn renewals(&self) -> MutexGuard<'_, Renewals> {
        self.renewals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Node is there, with this UID.
    pub(super) fn belongs_to(&self, uid: &str) {
        self.owner.send_if_modified(|owner| {
            let other = owner != uid;
            uid.clone_into(owner);
            other
        });
    }

    /// Says that the node lives.
    ///
    /// # Errors
    /// The server does not answer, or there is no Node yet that the lease could belong to.
    pub(super) async fn renew(&self) -> Result<(), KubeError> {
        let mut failed = None;
        for attempt in 1..=TRIES {
            let turn = in_time(&self.api, "the node's lease", self.within, self.turn());
            match turn.await {
                Ok(()) => {
                    let is_shared = self.renewals().renewed();
                    self.tell_of_others(is_shared).await;
                    return Ok(());
                }
                Err(error) => {
                    *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
                    if attempt >= 2 && error.code().is_none() {
                        // It may be the connection: the next try has another one.
                        self.api.give_up_connection();
                    }
                    tokio::time::sleep(asked_for(&error).min(MOST_ASKED)).await;
                    let again = error.is_conflict();
                    failed = Some(error);
                    if !again && attempt >= 2 {
                        break;
                    }
                }
            }
        }
        Err(failed
            .unwrap_or_else(|| self.api.unreachable("the node's lease", "nothing was tried".to_owned())))
    }

    /// Says that the node's name is another agent's as well, or that it is not any more.
    async fn tell_of_others(&self, is_shared: bool) {
        if !is_shared {
            self.is_told.store(false, Ordering::Relaxed);
            return self.ctx.progress.condition(NAME_CONDITION, Ok(()));
        }
        // Who it is is a help and no more: where the server does not tell, it is said without.
        let ask = self.api.get(Resource::NODE, None, &self.node);
        let live = in_time(&self.api, "the Node", self.within, ask).await.ok().flatten();
        let live = live.map(|Object(node)| node["status"]["nodeInfo"].clone()).unwrap_or_default();
        let ours = self.machine.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let words = in_words(&self.node, &ours, &live);
        if !self.is_told.swap(true, Ordering::Relaxed) {
            self.ctx.events.warning(ObjectRef::node(&self.node), NAME_TAKEN, words.clone());
        }
        self.ctx.progress.condition(NAME_CONDITION, Err(words));
    }

    async fn turn(&self) -> Result<(), KubeError> {
        let known = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let known = match known {
            Some(known) => Some(known),
            None => {
                let found = self.api.get(Resource::LEASE, NAMESPACE, &self.node).await?;
                let time = found.as_ref().and_then(|found| found.0["spec"]["renewTime"].as_str());
                time.into_iter().for_each(|time| self.renewals().finds(time));
                found
            }
        };
        let now = match known {
            Some(before) => {
                let lease = self.renewed(before.0);
                self.api.replace(Resource::LEASE, NAMESPACE, &lease).await?
            }
            None => {
                let mut owner = self.owner.subscribe();
                // The sender lives as long as the lease.
                let registered = async { owner.wait_for(|uid| !uid.is_empty()).await.is_ok() };
                if !tokio::time::timeout(REGISTRATION, registered).await.unwrap_or(false) {
                    let message = format!("the Node {} that it belongs to is not registered yet", self.node);
                    return Err(self.api.unreachable("the node's lease", message));
                }
                let name = json!({"metadata": {"name": self.node, "namespace": NAMESPACE}, "spec": {}});
                self.api.create(Resource::LEASE, NAMESPACE, &self.renewed(name)).await?
            }
        };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        Ok(())
    }

    fn renewed(&self, mut lease: Value) -> Value {
        lease["apiVersion"] = "coordination.k8s.io/v1".into();
        lease["kind"] = "Lease".into();
        let spec = &mut lease["spec"];
        spec["holderIdentity"] = self.node.clone().into();
        spec["leaseDurationSeconds"] = self.seconds.into();
        let now = time::format_micros(i128::from(now_unix_nanos())).unwrap_or_default();
        self.renewals().tries(&now);
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
    fn a_renewal_changes_the_time_and_keeps_what_others_have_written() {
        let lease = lease(KubeApi::new("/nowhere".into(), "test"));
        let before = json!({"metadata": {"name": "n", "resourceVersion": "7", "labels": {"a": "b"}},
            "spec": {"holderIdentity": "n", "renewTime": "2020-01-01T00:00:00.000000Z", "leaseTransitions": 3}});
        let now = lease.renewed(before);
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
        lease.belongs_to("u-1");
        let owner = &lease.renewed(now)["metadata"]["ownerReferences"][0];
        assert_eq!(*owner, json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u-1"}));
    }

    #[tokio::test]
    async fn a_server_that_asks_to_be_left_alone_is_asked_again_after_that_time() {
        let server = Server::with_retry_after("1", |number| (number == 0).then_some(429)).await;
        let began = std::time::Instant::now();
        lease(server.api.clone()).renew().await.unwrap();
        assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
        let methods: Vec<String> = server.asked().into_iter().map(|(method, _)| method).collect();
        assert_eq!(methods, ["GET", "PUT"]);
    }
}
