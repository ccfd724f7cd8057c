//! A runtime-shim whose pods the test sets.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::watch_pods_response::Item;
use tonic::service::Routes;

use super::{FakeRuntime, FakeServer, StreamAnswer};

/// A runtime-shim at its socket. It answers `GetPod` and `WatchPods` with the pods and the runtime that the test has
/// set; a test may script the other methods. Killed when dropped.
#[derive(Debug)]
pub struct FakeRuntimeShim {
    /// Its API.
    pub api: FakeRuntime,
    state: Arc<Mutex<State>>,
    _server: FakeServer,
}

#[derive(Debug, Default)]
struct State {
    /// By UID.
    pods: BTreeMap<String, pb::RuntimePod>,
    /// The reported runtime; `None` before the runtime's first answer.
    runtime: Option<pb::RuntimeState>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeRuntimeShim {
    /// Serves one without pods in the run folder of `config`, whose runtime has not answered yet.
    ///
    /// # Errors
    /// Its socket cannot be bound.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        let (api, state) = (FakeRuntime::default(), Arc::<Mutex<State>>::default());
        let pods = Arc::clone(&state);
        api.get_pod.answer_with(move |request| {
            let pod = lock(&pods).pods.get(&request.uid).cloned();
            Ok(pb::GetPodResponse { pod: Some(pod.unwrap_or_default()) })
        });
        let all = Arc::clone(&state);
        api.watch_pods.answer_with(move |request| Ok(lock(&all).messages(request.state_only)));
        let server = FakeServer::start(config, ServiceName::RuntimeShim, Routes::new(api.server())).await?;
        Ok(Self { api, state, _server: server })
    }

    /// Sets the pod to one container in this state.
    pub fn set_container(&self, uid: &str, state: pb::ContainerState) {
        let container =
            pb::Container { id: "c1".into(), name: "main".into(), state: state.into(), ..Default::default() };
        self.set_pod(pb::RuntimePod { uid: uid.into(), containers: vec![container], ..Default::default() });
    }

    /// Sets the pod with the UID of `pod`.
    pub fn set_pod(&self, pod: pb::RuntimePod) {
        lock(&self.state).pods.insert(pod.uid.clone(), pod);
    }

    /// Sets the cgroup driver that the runtime reports: empty when it reports none, `None` when it has not answered.
    pub fn set_cgroup_driver(&self, driver: Option<&str>) {
        lock(&self.state).runtime = driver.map(|driver| pb::RuntimeState {
            name: "fake".into(),
            cgroup_driver: driver.into(),
            ..Default::default()
        });
    }
}

impl State {
    /// The messages of `WatchPods`; the stream ends after them.
    fn messages(&self, state_only: bool) -> StreamAnswer<pb::WatchPodsResponse> {
        let pods = self.pods.values().filter(|_| !state_only).cloned().map(Item::Pod);
        let items = pods.chain([Item::Synced(Synced {})]).chain(self.runtime.clone().map(Item::State));
        StreamAnswer::items(items.map(|item| pb::WatchPodsResponse { item: Some(item) }))
    }
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
    use keelson_service_kit::Peer;

    use super::*;
    use crate::Scratch;

    #[tokio::test]
    async fn answers_with_the_pods_and_the_runtime_that_were_set() {
        let scratch = Scratch::new().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = scratch.path().join("run");
        let shim = FakeRuntimeShim::start(&config).await.unwrap();
        let peer = Peer::service(&config.paths.run_dir, ServiceName::RuntimeShim);
        let mut client = RuntimeClient::new(peer.channel());
        shim.set_container("u1", pb::ContainerState::Running);
        let request = |uid: &str| pb::GetPodRequest { uid: uid.into() };
        let known = client.get_pod(request("u1")).await.unwrap().into_inner().pod.unwrap();
        assert_eq!(known.containers[0].state(), pb::ContainerState::Running);
        let unknown = client.get_pod(request("u2")).await.unwrap().into_inner().pod;
        assert_eq!(unknown, Some(pb::RuntimePod::default()));
        assert_eq!(shim.api.get_pod.requests().len(), 2);

        let synced = Item::Synced(Synced {});
        let watch = |state_only| pb::WatchPodsRequest { state_only };
        assert_eq!(items(&mut client, watch(false)).await, [Item::Pod(known), synced.clone()]);
        shim.set_cgroup_driver(Some("systemd"));
        let [first, Item::State(state)] = &items(&mut client, watch(true)).await[..] else {
            panic!("the state of the runtime does not follow")
        };
        assert_eq!((first, state.cgroup_driver.as_str()), (&synced, "systemd"));
    }

    async fn items(
        client: &mut RuntimeClient<keelson_service_kit::PeerChannel>,
        request: pb::WatchPodsRequest,
    ) -> Vec<Item> {
        let mut stream = client.watch_pods(request).await.unwrap().into_inner();
        let mut items = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            items.extend(message.item);
        }
        items
    }
}
