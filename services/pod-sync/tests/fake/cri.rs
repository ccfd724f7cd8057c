//! A fake of CRI at runtime-shim's socket, with the calls that pod-sync makes.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::now_unix_nanos;
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use super::Shim;

#[derive(Clone)]
pub struct Cri(pub Arc<Shim>);

impl NamedService for Cri {
    const NAME: &'static str = "runtime.v1.RuntimeService";
}

impl tower::Service<Request<Body>> for Cri {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shim = Arc::clone(&self.0);
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            let body = request.into_body().collect().await.unwrap().to_bytes().slice(5..);
            shim.called(&method);
            Ok(act(&shim, &method, body).map_or_else(Status::into_http, |message| framed(&message)))
        })
    }
}

fn framed(message: &[u8]) -> Response<Body> {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap());
    framed.extend_from_slice(message);
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
    let body = Full::new(framed.freeze()).with_trailers(std::future::ready(Some(Ok(trailers))));
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

fn owner(shim: &Shim, has: impl Fn(&rt::RuntimePod) -> bool) -> Result<String, Status> {
    let found = shim.all().into_iter().find(|pod| has(pod));
    found.map(|pod| pod.uid).ok_or_else(|| Status::not_found("the runtime does not have it"))
}

fn of_container(shim: &Shim, id: &str, change: impl FnOnce(&mut rt::Container)) -> Result<(), Status> {
    let uid = owner(shim, |pod| pod.containers.iter().any(|c| c.id == id))?;
    shim.change(&uid, |pod| change(pod.containers.iter_mut().find(|c| c.id == id).unwrap()));
    Ok(())
}

fn act(shim: &Shim, method: &str, body: Bytes) -> Result<Vec<u8>, Status> {
    shim.check_available()?;
    match method {
        "RunPodSandbox" => run_pod_sandbox(shim, body),
        "UpdateRuntimeConfig" => update_runtime_config(shim, body),
        "PodSandboxStatus" => pod_sandbox_status(),
        "StopPodSandbox" => stop_pod_sandbox(shim, body),
        "CreateContainer" => create_container(shim, body),
        "StartContainer" => start_container(shim, body),
        "StopContainer" => stop_container(shim, body),
        "ContainerStatus" => container_status(shim, body),
        "RemoveContainer" => remove_container(shim, body),
        "ExecSync" => exec_sync(shim, body),
        other => Err(Status::unimplemented(other)),
    }
}

fn run_pod_sandbox(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let request = cri::RunPodSandboxRequest::decode(body).unwrap();
    let config = request.config.unwrap();
    shim.called(&format!("handler {:?}", request.runtime_handler));
    shim.called(&format!("dns {}", config.dns_config.unwrap_or_default().servers.join(" ")));
    let wanted = config.metadata.unwrap();
    let id = format!("s{}", shim.next());
    let namespaces = config.linux.unwrap_or_default().security_context.unwrap_or_default();
    let network = namespaces.namespace_options.unwrap_or_default().network();
    let host_network = network == cri::NamespaceMode::Node;
    let sandbox = rt::Sandbox {
        id: id.clone(),
        attempt: wanted.attempt,
        ready: true,
        host_network,
        ips: if host_network { Vec::new() } else { vec!["10.0.0.2".into()] },
        ..Default::default()
    };
    shim.change(&wanted.uid, |pod| {
        (pod.name, pod.namespace) = (wanted.name, wanted.namespace);
        pod.sandboxes.push(sandbox);
    });
    Ok(cri::RunPodSandboxResponse { pod_sandbox_id: id }.encode_to_vec())
}

fn update_runtime_config(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let request = cri::UpdateRuntimeConfigRequest::decode(body).unwrap();
    let network = request.runtime_config.unwrap().network_config.unwrap();
    shim.called(&format!("pod CIDR {}", network.pod_cidr));
    Ok(Vec::new())
}

fn pod_sandbox_status() -> Result<Vec<u8>, Status> {
    let network = cri::PodSandboxNetworkStatus { ip: "10.0.0.2".into(), ..Default::default() };
    let status = cri::PodSandboxStatus { network: Some(network), ..Default::default() };
    Ok(cri::PodSandboxStatusResponse { status: Some(status), ..Default::default() }.encode_to_vec())
}

fn stop_pod_sandbox(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let id = cri::StopPodSandboxRequest::decode(body).unwrap().pod_sandbox_id;
    let uid = owner(shim, |pod| pod.sandboxes.iter().any(|s| s.id == id))?;
    shim.change(&uid, |pod| pod.sandboxes.iter_mut().for_each(|s| s.ready = false));
    Ok(Vec::new())
}

fn create_container(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let request = cri::CreateContainerRequest::decode(body).unwrap();
    let config = request.config.unwrap();
    let wanted = config.metadata.unwrap();
    for mount in &config.mounts {
        shim.called(&format!("mount {} at {}", mount.host_path, mount.container_path));
        if mount.recursive_read_only {
            shim.called(&format!("all of {} read-only", mount.container_path));
        }
    }
    for env in &config.envs {
        shim.called(&format!("env {}={}", env.key, env.value));
    }
    let linux = config.linux.unwrap_or_default();
    let resources = linux.resources.unwrap_or_default();
    for limit in &resources.hugepage_limits {
        shim.called(&format!("huge pages of {}: {}", limit.page_size, limit.limit));
    }
    for (file, value) in &resources.unified {
        shim.called(&format!("{file}={value}"));
    }
    let context = linux.security_context.unwrap_or_default();
    let namespaces = context.namespace_options.unwrap_or_default();
    if namespaces.pid() == cri::NamespaceMode::Target {
        shim.called(&format!("processes of {}", namespaces.target_id));
    }
    let seccomp = context.seccomp.unwrap_or_default();
    shim.called(&format!("seccomp {}", seccomp.profile_type().as_str_name()));
    let uid = owner(shim, |pod| pod.sandboxes.iter().any(|s| s.id == request.pod_sandbox_id))?;
    let container = rt::Container {
        id: format!("c{}", shim.next()),
        name: wanted.name,
        sandbox_id: request.pod_sandbox_id,
        attempt: wanted.attempt,
        restart_count: wanted.attempt,
        state: rt::ContainerState::Created.into(),
        created_unix_nanos: now_unix_nanos(),
        ..Default::default()
    };
    let answer = cri::CreateContainerResponse { container_id: container.id.clone() };
    shim.change(&uid, |pod| pod.containers.push(container));
    Ok(answer.encode_to_vec())
}

fn start_container(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let id = cri::StartContainerRequest::decode(body).unwrap().container_id;
    let named =
        |pod: &rt::RuntimePod, name: &str| pod.containers.iter().any(|c| c.id == id && c.name == name);
    if shim.all().iter().any(|pod| named(pod, "broken")) {
        return Err(Status::unknown(format!("the runtime cannot start {id} for a reason")));
    }
    of_container(shim, &id, |container| {
        container.set_state(rt::ContainerState::Running);
        container.started_unix_nanos = now_unix_nanos();
    })?;
    Ok(Vec::new())
}

fn stop_container(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let request = cri::StopContainerRequest::decode(body).unwrap();
    if !shim.stopping(request.timeout) {
        return Err(Status::deadline_exceeded("the runtime hangs"));
    }
    let id = request.container_id;
    of_container(shim, &id, |container| {
        container.set_state(rt::ContainerState::Exited);
        container.exit_code = 143;
        container.finished_unix_nanos = now_unix_nanos();
    })?;
    Ok(Vec::new())
}

fn container_status(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let id = cri::ContainerStatusRequest::decode(body).unwrap().container_id;
    let uid = owner(shim, |pod| pod.containers.iter().any(|c| c.id == id))?;
    let pods = shim.all();
    let container =
        pods.iter().filter(|pod| pod.uid == uid).flat_map(|pod| &pod.containers).find(|c| c.id == id);
    let state = match container.unwrap().state() {
        rt::ContainerState::Created => cri::ContainerState::ContainerCreated,
        rt::ContainerState::Running => cri::ContainerState::ContainerRunning,
        rt::ContainerState::Exited => cri::ContainerState::ContainerExited,
        _ => cri::ContainerState::ContainerUnknown,
    };
    let status = cri::ContainerStatus { id, state: state.into(), ..Default::default() };
    Ok(cri::ContainerStatusResponse { status: Some(status), ..Default::default() }.encode_to_vec())
}

fn remove_container(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let id = cri::RemoveContainerRequest::decode(body).unwrap().container_id;
    let uid = owner(shim, |pod| pod.containers.iter().any(|c| c.id == id))?;
    shim.change(&uid, |pod| pod.containers.retain(|c| c.id != id));
    Ok(Vec::new())
}

fn exec_sync(shim: &Shim, body: Bytes) -> Result<Vec<u8>, Status> {
    let command = cri::ExecSyncRequest::decode(body).unwrap().cmd;
    shim.called(&command[0]);
    let (exit_code, output) = shim.outcome(&command[0]);
    Ok(cri::ExecSyncResponse { stdout: output.into_bytes(), stderr: Vec::new(), exit_code }.encode_to_vec())
}
