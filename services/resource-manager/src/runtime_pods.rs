//! The pods that runtime-shim has.

use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_service_kit::Peer;
use tonic::Status;

/// Timeout of the list of running pods.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// The pods that runtime-shim has now: its replay up to `synced`, after which the stream is closed.
pub(crate) async fn list(runtime: &Peer) -> Result<Vec<rt::RuntimePod>, Status> {
    use rt::watch_pods_response::Item;
    let list = async {
        let mut client = RuntimeClient::new(runtime.channel());
        let mut replay = client.watch_pods(rt::WatchPodsRequest::default()).await?.into_inner();
        let mut pods = Vec::new();
        while let Some(message) = replay.message().await? {
            match message.item {
                Some(Item::Pod(pod)) => pods.push(pod),
                Some(Item::Synced(_)) => return Ok(pods),
                Some(Item::GoneUid(_) | Item::State(_)) | None => {}
            }
        }
        Err(Status::unavailable("runtime-shim has closed the stream before its list of pods was complete"))
    };
    let late = |_| {
        let text = format!("runtime-shim has not listed its pods within {} s", LIST_TIMEOUT.as_secs());
        Err(Status::deadline_exceeded(text))
    };
    tokio::time::timeout(LIST_TIMEOUT, list).await.unwrap_or_else(late)
}

/// The newest running container of each name; `containers` has the newest first.
pub(crate) fn newest_running(containers: &[rt::Container]) -> Vec<&rt::Container> {
    let mut found: Vec<&rt::Container> = Vec::new();
    for container in containers.iter().filter(|c| c.state() == rt::ContainerState::Running) {
        if found.iter().all(|known| known.name != container.name) {
            found.push(container);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_running_container_of_each_name_is_measured() {
        let container = |id: &str, name: &str, state: rt::ContainerState| rt::Container {
            id: id.into(),
            name: name.into(),
            state: state.into(),
            ..Default::default()
        };
        let containers = [
            container("a3", "a", rt::ContainerState::Exited),
            container("a2", "a", rt::ContainerState::Running),
            container("a1", "a", rt::ContainerState::Running),
            container("b1", "b", rt::ContainerState::Created),
            container("c1", "c", rt::ContainerState::Running),
        ];
        let ids: Vec<&str> = newest_running(&containers).iter().map(|c| c.id.as_str()).collect();
        assert_eq!(ids, ["a2", "c1"]);
    }
}
