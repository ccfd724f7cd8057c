//! `/runningpods/`: the pods that run in the container runtime, desired or not (node-and-api.md §8.9).

use std::time::Duration;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use serde_json::{Value, json};
use tonic::Status;

use crate::App;
use crate::api_error::ApiError;

/// How long the whole list may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// `GET /runningpods/`: a PodList with uid, name and namespace, and the names and images of the running containers.
pub(crate) async fn list(State(app): State<App>) -> Result<Response, ApiError> {
    let items = tokio::time::timeout(DEADLINE, items(&app)).await.unwrap_or_else(|_| {
        let text = format!("runtime-shim did not list the running pods within {} s", DEADLINE.as_secs());
        Err(Status::deadline_exceeded(text))
    });
    let items = items.map_err(|status| ApiError::from_peer("runtime-shim", &status))?;
    let items = if items.is_empty() { Value::Null } else { items.into() };
    let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items});
    Ok(([(header::CONTENT_TYPE, "application/json")], list.to_string()).into_response())
}

/// Reads the replay of runtime-shim, which contains all pods, up to its end.
async fn items(app: &App) -> Result<Vec<Value>, Status> {
    use rt::watch_pods_response::Item;
    let mut client = RuntimeClient::new(app.peer(ServiceName::RuntimeShim).channel());
    let mut replay = client.watch_pods(rt::WatchPodsRequest::default()).await?.into_inner();
    let mut items = Vec::new();
    while let Some(message) = replay.message().await? {
        match message.item {
            Some(Item::Pod(pod)) => items.extend(running(&pod)),
            Some(Item::Synced(_)) => return Ok(items),
            Some(Item::GoneUid(_) | Item::State(_)) | None => {}
        }
    }
    Err(Status::unavailable("runtime-shim ended its list of running pods early"))
}

/// The item of a pod; `None` if neither its sandbox nor a container runs.
fn running(pod: &rt::RuntimePod) -> Option<Value> {
    let running = pod.containers.iter().filter(|c| c.state() == rt::ContainerState::Running);
    let containers: Vec<Value> =
        running.map(|c| json!({"name": c.name, "image": c.image, "resources": {}})).collect();
    if containers.is_empty() && !pod.sandboxes.iter().any(|sandbox| sandbox.ready) {
        return None;
    }
    let containers = if containers.is_empty() { Value::Null } else { containers.into() };
    Some(json!({
        "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
        "spec": {"containers": containers},
        "status": {},
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_pods_omit_exited_containers_and_pods() {
        let container = |name: &str, state: rt::ContainerState| rt::Container {
            name: name.into(),
            image: "img".into(),
            state: state.into(),
            ..Default::default()
        };
        let mut pod = rt::RuntimePod {
            uid: "u".into(),
            namespace: "ns".into(),
            name: "web".into(),
            sandboxes: vec![rt::Sandbox { ready: false, ..Default::default() }],
            containers: vec![container("old", rt::ContainerState::Exited)],
            ..Default::default()
        };
        assert_eq!(running(&pod), None);
        pod.sandboxes[0].ready = true;
        assert_eq!(running(&pod).unwrap()["spec"]["containers"], Value::Null);
        pod.sandboxes.clear();
        pod.containers.push(container("c", rt::ContainerState::Running));
        let expected = json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [{"name": "c", "image": "img", "resources": {}}]},
            "status": {},
        });
        assert_eq!(running(&pod), Some(expected));
    }
}
