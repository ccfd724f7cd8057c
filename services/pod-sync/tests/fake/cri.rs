//! CRI at runtime-shim's socket, with the calls that pod-sync makes.

use std::sync::Arc;

use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::now_unix_nanos;
use keelson_testkit::fakes::{FakeCriRuntime, Unary};
use tonic::Status;

use super::Shim;

type Answer<T> = Result<T, Status>;

/// Scripts the calls: each one changes the pods of `shim`.
pub fn answer_cri(shim: &Arc<Shim>, fake: &FakeCriRuntime) {
    answer(shim, &fake.run_pod_sandbox, "RunPodSandbox", run_pod_sandbox);
    answer(shim, &fake.update_runtime_config, "UpdateRuntimeConfig", update_runtime_config);
    answer(shim, &fake.pod_sandbox_status, "PodSandboxStatus", pod_sandbox_status);
    answer(shim, &fake.stop_pod_sandbox, "StopPodSandbox", stop_pod_sandbox);
    answer(shim, &fake.create_container, "CreateContainer", create_container);
    answer(shim, &fake.start_container, "StartContainer", start_container);
    answer(shim, &fake.stop_container, "StopContainer", stop_container);
    answer(shim, &fake.container_status, "ContainerStatus", container_status);
    answer(shim, &fake.container_stats, "ContainerStats", container_stats);
    answer(shim, &fake.remove_container, "RemoveContainer", remove_container);
    let updated = Arc::clone(shim);
    fake.update_container_resources
        .answer_async(move |request| update_container(Arc::clone(&updated), request));
    let shim = Arc::clone(shim);
    fake.exec_sync.answer_async(move |request| exec_sync(Arc::clone(&shim), request));
}

/// Records each call of the method under its CRI name, and acts unless the runtime is unavailable.
fn answer<Req, Resp>(
    shim: &Arc<Shim>,
    method: &Unary<Req, Resp>,
    name: &'static str,
    act: fn(&Shim, Req) -> Answer<Resp>,
) where
    Req: Clone + 'static,
    Resp: Clone + Send + Sync + 'static,
{
    let shim = Arc::clone(shim);
    method.answer_with(move |request| {
        shim.called(name);
        shim.check_available()?;
        act(&shim, request)
    });
}

fn not_found() -> Status {
    Status::not_found("the runtime does not have it")
}

/// The UID of the pod of a sandbox.
fn owner_of_sandbox(shim: &Shim, id: &str) -> Answer<String> {
    let has = |pod: &rt::RuntimePod| pod.sandboxes.iter().any(|sandbox| sandbox.id == id);
    shim.all().into_iter().find(has).map(|pod| pod.uid).ok_or_else(not_found)
}

/// A container, and the UID of its pod.
fn find_container(shim: &Shim, id: &str) -> Answer<(String, rt::Container)> {
    let with_uid = |pod: rt::RuntimePod| pod.containers.into_iter().map(move |c| (pod.uid.clone(), c));
    shim.all().into_iter().flat_map(with_uid).find(|(_, c)| c.id == id).ok_or_else(not_found)
}

fn change_container(shim: &Shim, id: &str, change: impl FnOnce(&mut rt::Container)) -> Answer<()> {
    let (uid, _) = find_container(shim, id)?;
    shim.change(&uid, |pod| change(pod.containers.iter_mut().find(|c| c.id == id).unwrap()));
    Ok(())
}

fn run_pod_sandbox(shim: &Shim, request: cri::RunPodSandboxRequest) -> Answer<cri::RunPodSandboxResponse> {
    let config = request.config.unwrap();
    shim.called(&format!("handler {:?}", request.runtime_handler));
    shim.called(&format!("dns {}", config.dns_config.unwrap_or_default().servers.join(" ")));
    let wanted = config.metadata.unwrap();
    let id = format!("s{}", shim.next());
    let context = config.linux.unwrap_or_default().security_context.unwrap_or_default();
    shim.called(&format!("sandbox groups {:?}", context.supplemental_groups));
    let network = context.namespace_options.unwrap_or_default().network();
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
    Ok(cri::RunPodSandboxResponse { pod_sandbox_id: id })
}

fn update_runtime_config(
    shim: &Shim,
    request: cri::UpdateRuntimeConfigRequest,
) -> Answer<cri::UpdateRuntimeConfigResponse> {
    let network = request.runtime_config.unwrap().network_config.unwrap();
    shim.called(&format!("pod CIDR {}", network.pod_cidr));
    Ok(cri::UpdateRuntimeConfigResponse::default())
}

fn pod_sandbox_status(
    shim: &Shim,
    request: cri::PodSandboxStatusRequest,
) -> Answer<cri::PodSandboxStatusResponse> {
    let network = cri::PodSandboxNetworkStatus { ip: "10.0.0.2".into(), ..Default::default() };
    let details = shim.details(&request.pod_sandbox_id);
    let info = details.info();
    let status = cri::PodSandboxStatus {
        network: Some(network),
        labels: details.labels.into_iter().collect(),
        annotations: details.annotations.into_iter().collect(),
        ..Default::default()
    };
    Ok(cri::PodSandboxStatusResponse { status: Some(status), info, ..Default::default() })
}

fn stop_pod_sandbox(shim: &Shim, request: cri::StopPodSandboxRequest) -> Answer<cri::StopPodSandboxResponse> {
    let uid = owner_of_sandbox(shim, &request.pod_sandbox_id)?;
    shim.change(&uid, |pod| pod.sandboxes.iter_mut().for_each(|s| s.ready = false));
    Ok(cri::StopPodSandboxResponse::default())
}

fn create_container(
    shim: &Shim,
    request: cri::CreateContainerRequest,
) -> Answer<cri::CreateContainerResponse> {
    let config = request.config.unwrap();
    let wanted = config.metadata.unwrap();
    for device in &config.devices {
        let cri::Device { host_path, container_path, permissions } = device;
        shim.called(&format!("device {host_path} at {container_path} {permissions}"));
    }
    if wanted.name == "unmountable" {
        return Err(Status::unknown("ImageVolumeMountFailed: no such snapshot"));
    }
    for mount in &config.mounts {
        shim.called(&format!("mount {} at {}", mount.host_path, mount.container_path));
        if let Some(cri::ImageSpec { image, user_specified_image, annotations, .. }) = &mount.image {
            let annotations = annotations.get("revision").map_or("", String::as_str);
            shim.called(&format!("mount image {image} ({user_specified_image}, {annotations})"));
        }
        if mount.readonly {
            shim.called(&format!("{} read-only", mount.container_path));
        }
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
    shim.called(&format!("groups {:?}", context.supplemental_groups));
    let namespaces = context.namespace_options.unwrap_or_default();
    if namespaces.pid() == cri::NamespaceMode::Target {
        shim.called(&format!("processes of {}", namespaces.target_id));
    }
    let seccomp = context.seccomp.unwrap_or_default();
    shim.called(&format!("seccomp {}", seccomp.profile_type().as_str_name()));
    let uid = owner_of_sandbox(shim, &request.pod_sandbox_id)?;
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
    Ok(answer)
}

fn start_container(shim: &Shim, request: cri::StartContainerRequest) -> Answer<cri::StartContainerResponse> {
    let id = request.container_id;
    if find_container(shim, &id).is_ok_and(|(_, container)| container.name == "broken") {
        return Err(Status::unknown(format!("the runtime cannot start {id} for a reason")));
    }
    change_container(shim, &id, |container| {
        container.set_state(rt::ContainerState::Running);
        container.started_unix_nanos = now_unix_nanos();
    })?;
    Ok(cri::StartContainerResponse::default())
}

fn stop_container(shim: &Shim, request: cri::StopContainerRequest) -> Answer<cri::StopContainerResponse> {
    if shim.stops_are_held() {
        return Err(Status::deadline_exceeded("the runtime hangs"));
    }
    let id = request.container_id;
    change_container(shim, &id, |container| {
        container.set_state(rt::ContainerState::Exited);
        container.exit_code = 143;
        container.finished_unix_nanos = now_unix_nanos();
    })?;
    Ok(cri::StopContainerResponse::default())
}

fn container_status(
    shim: &Shim,
    request: cri::ContainerStatusRequest,
) -> Answer<cri::ContainerStatusResponse> {
    let id = request.container_id;
    let state = match find_container(shim, &id)?.1.state() {
        rt::ContainerState::Created => cri::ContainerState::ContainerCreated,
        rt::ContainerState::Running => cri::ContainerState::ContainerRunning,
        rt::ContainerState::Exited => cri::ContainerState::ContainerExited,
        _ => cri::ContainerState::ContainerUnknown,
    };
    let details = shim.details(&id);
    let info = details.info();
    let annotations = details.annotations.into_iter().collect();
    let status = cri::ContainerStatus { id, state: state.into(), annotations, ..Default::default() };
    Ok(cri::ContainerStatusResponse { status: Some(status), info })
}

async fn update_container(
    shim: Arc<Shim>,
    request: cri::UpdateContainerResourcesRequest,
) -> Answer<cri::UpdateContainerResourcesResponse> {
    shim.called("UpdateContainerResources");
    shim.check_available()?;
    if shim.updates_hang() {
        std::future::pending::<()>().await;
    }
    if shim.updates_are_held() {
        return Err(Status::unavailable("the runtime hangs"));
    }
    find_container(&shim, &request.container_id)?;
    Ok(cri::UpdateContainerResourcesResponse::default())
}

fn container_stats(shim: &Shim, request: cri::ContainerStatsRequest) -> Answer<cri::ContainerStatsResponse> {
    find_container(shim, &request.container_id)?;
    let usage_bytes = Some(cri::UInt64Value { value: shim.memory() });
    let memory = Some(cri::MemoryUsage { usage_bytes, ..Default::default() });
    let stats = Some(cri::ContainerStats { memory, ..Default::default() });
    Ok(cri::ContainerStatsResponse { stats })
}

fn remove_container(
    shim: &Shim,
    request: cri::RemoveContainerRequest,
) -> Answer<cri::RemoveContainerResponse> {
    let id = request.container_id;
    let (uid, _) = find_container(shim, &id)?;
    shim.change(&uid, |pod| pod.containers.retain(|c| c.id != id));
    Ok(cri::RemoveContainerResponse::default())
}

async fn exec_sync(shim: Arc<Shim>, request: cri::ExecSyncRequest) -> Answer<cri::ExecSyncResponse> {
    shim.called("ExecSync");
    shim.check_available()?;
    let command = request.cmd;
    shim.called(&command[0]);
    shim.pass(&command[0]).await;
    let (exit_code, output) = shim.outcome(&command[0]);
    Ok(cri::ExecSyncResponse { stdout: output.into_bytes(), stderr: Vec::new(), exit_code })
}
