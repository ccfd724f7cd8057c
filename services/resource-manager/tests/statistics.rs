//! Statistics over the socket, of real cgroups and of this machine.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "the other tests of the service use the rest")]
mod support;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use keelson_config::SystemCgroups;
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_testkit::fakes::FakeRuntimeShim;
use support::{Client, Process, Service, Sync, World, desire, prepare, until_some};
use tonic::Code;

const LONG: Duration = Duration::from_secs(20);
const POD: &str = "kubepods/besteffort/podu1";

/// A service with a pod `u1` that has its cgroup.
async fn with_pod(world: &World) -> (Service, Sync) {
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    sync.pod(desire("u1", 1, Want::Run, "BestEffort")).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    (service, sync)
}

/// The pod as runtime-shim shows it: `main` is what [`Process`] puts into its cgroup.
fn running() -> rt::RuntimePod {
    let container = |id: &str, name: &str, state: rt::ContainerState| rt::Container {
        id: id.into(),
        name: name.into(),
        state: state.into(),
        started_unix_nanos: 8,
        ..Default::default()
    };
    let sandbox =
        rt::Sandbox { id: "sandbox".into(), ready: true, created_unix_nanos: 7, ..Default::default() };
    rt::RuntimePod {
        uid: "u1".into(),
        namespace: "default".into(),
        name: "web".into(),
        sandboxes: vec![sandbox],
        containers: vec![
            container("container", "main", rt::ContainerState::Running),
            container("gone", "ended", rt::ContainerState::Exited),
            container("nowhere", "just-made", rt::ContainerState::Running),
        ],
        ..Default::default()
    }
}

async fn stats(client: &mut Client, brief: bool) -> Vec<pb::PodStatsResponse> {
    let request = pb::PodStatsRequest { cpu_and_memory_only: brief };
    let mut stream = client.pod_stats(request).await.unwrap().into_inner();
    let mut all = Vec::new();
    while let Some(pod) = stream.message().await.unwrap() {
        all.push(pod);
    }
    all
}

fn publish_pod(runtime: &FakeRuntimeShim, change: impl FnOnce(&mut rt::RuntimePod)) {
    let mut pod = running();
    change(&mut pod);
    runtime.set_pod(pod);
}

#[tokio::test]
async fn pod_statistics_measure_cpu_and_memory_of_each_container() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    let (service, _sync) = with_pod(&world).await;
    let mut client = service.client();
    assert_eq!(stats(&mut client, false).await, []);
    let _process = Process::burn_cpu(&world.existing(POD));
    runtime.set_pod(running());

    let first = stats(&mut client, false).await;
    assert_eq!(first.len(), 1);
    let named = first[0].pod.clone().unwrap();
    assert_eq!((named.uid.as_str(), named.namespace.as_str(), named.name.as_str()), ("u1", "default", "web"));
    assert!(first[0].started_unix_nanos == 7 && first[0].processes >= Some(1), "{first:?}");
    // Ended containers and containers without a cgroup are left out.
    let names: Vec<&str> = first[0].containers.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["main"]);
    let main = first[0].containers[0].usage.unwrap();
    assert_eq!((main.cpu_nano_cores, first[0].containers[0].started_unix_nanos), (None, 8));

    let found = until_some("a CPU rate and the memory of the process", || {
        let mut client = service.client();
        async move {
            let pods = stats(&mut client, true).await;
            let pod = pods.into_iter().next()?;
            let main = pod.containers[0].usage?;
            (main.cpu_nano_cores.is_some() && main.memory?.rss > 4 << 20).then_some(pod)
        }
    })
    .await;
    let (pod, later) = (found.usage.unwrap(), found.containers[0].usage.unwrap());
    assert!(later.cpu_nanos > main.cpu_nanos, "{main:?} {later:?}");
    assert!(later.taken_unix_nanos > main.taken_unix_nanos);
    for usage in [pod, later] {
        // It has a core for itself or shares it with other tests; it cannot use more than all cores.
        let cores = usage.cpu_nano_cores.unwrap();
        let most = 1_500_000_000 * std::thread::available_parallelism().unwrap().get() as u64;
        assert!(cores > 20_000_000 && cores < most, "{usage:?}");
        let memory = usage.memory.unwrap();
        assert!(memory.rss > 4 << 20 && memory.rss < 64 << 20, "{memory:?}");
        assert!(memory.working_set >= 8 << 20 && memory.working_set <= memory.usage, "{memory:?}");
        assert!(memory.page_faults > 0, "{memory:?}");
    }
    assert!(pod.cpu_nanos >= later.cpu_nanos.map(|nanos| nanos / 2), "{pod:?} {later:?}");
    // Only CPU and memory were requested.
    assert_eq!((found.processes, found.network), (None, None));
}

#[tokio::test]
async fn pod_network_statistics_come_from_the_sandbox() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    let (service, _sync) = with_pod(&world).await;
    let mut client = service.client();
    let _process = Process::start(&world.existing(POD));
    publish_pod(&runtime, |pod| pod.sandboxes[0].id = "container".into());
    let pods = stats(&mut client, false).await;
    // The process is in this machine's network namespace; what matters is that its interfaces were read.
    assert_eq!(pods[0].processes, Some(2), "once for the container and once for the sandbox");
    let listed = pods[0].network.as_ref().unwrap();
    assert!(listed.taken_unix_nanos > 0 && listed.interfaces.iter().all(|i| i.name != "lo"), "{listed:?}");
    publish_pod(&runtime, |pod| {
        pod.sandboxes[0].id = "container".into();
        pod.sandboxes[0].host_network = true;
    });
    assert_eq!(stats(&mut client, false).await[0].network, None);
}

#[tokio::test]
async fn cgroup_stats_list_node_qos_pod_and_container_cgroups() {
    let mut world = World::new();
    // This process may be in its own cgroup, which would be listed.
    world.config.resources.system_cgroups.kubelet = "/absent".into();
    let runtime = world.start_runtime().await;
    let (service, _sync) = with_pod(&world).await;
    let mut client = service.client();
    let _process = Process::start(&world.existing(POD));
    publish_pod(&runtime, |pod| {
        pod.sandboxes[0].id = "container".into();
        pod.containers[0].image = "i:1".into();
    });
    let mut stream = client.cgroup_stats(pb::CgroupStatsRequest {}).await.unwrap().into_inner();
    let mut found = Vec::new();
    while let Some(cgroup) = stream.message().await.unwrap() {
        found.push(cgroup);
    }
    let root = &world.config.runtime.cgroup_root;
    let below = |path: &str| format!("{root}/kubepods{path}");
    let pod = "/besteffort/podu1";
    let inner = below(&format!("{pod}/container"));
    let expected = [
        "/".to_owned(),
        below(""),
        below("/burstable"),
        below("/besteffort"),
        below(pod),
        inner.clone(),
        inner,
    ];
    assert_eq!(found.iter().map(|cgroup| cgroup.path.clone()).collect::<Vec<_>>(), expected);
    let named = |cgroup: &pb::CgroupStatsResponse| {
        let pod = cgroup.pod.clone().map(|pod| pod.name).unwrap_or_default();
        [pod, cgroup.id.clone(), cgroup.container.clone(), cgroup.image.clone()].join(" ")
    };
    let names: Vec<String> = found.iter().map(named).collect();
    assert_eq!(names[3..], ["   ", "web   ", "web container  ", "web container main i:1"]);
    let main = found.last().unwrap();
    let (detail, usage) = (main.detail.clone().unwrap(), main.usage.unwrap());
    assert_eq!((detail.threads, detail.memory_limit, main.started_unix_nanos), (Some(1), None, 8));
    assert!(detail.cpu_shares > Some(1) && usage.cpu_nanos.is_some() && usage.memory.is_some(), "{main:?}");
    assert!(found[0].network.is_some() && found[5].network.is_some() && main.network.is_none());
}

/// Creates a system cgroup in every hierarchy.
fn system_cgroup(world: &World, name: &str) -> Vec<PathBuf> {
    let make = |root: PathBuf| {
        let dir = root.join(name);
        fs::create_dir(&dir).unwrap();
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(value) = fs::read(root.join(file)) {
                fs::write(dir.join(file), value).unwrap();
            }
        }
        dir
    };
    world.existing("").into_iter().map(make).collect()
}

#[tokio::test]
async fn configured_system_cgroups_are_measured() {
    let mut world = World::new();
    let _runtime = world.start_runtime().await;
    let root = world.config.runtime.cgroup_root.clone();
    let [kubelet, runtime, misc] = ["agent", "absent", "misc"].map(|name| format!("{root}/{name}"));
    world.config.resources.system_cgroups = SystemCgroups { kubelet, runtime, misc };
    let service = world.start().await;
    let _process = Process::burn_cpu(&system_cgroup(&world, "agent"));
    system_cgroup(&world, "misc");
    let found = until_some("a CPU rate of the process", || {
        let mut client = service.client();
        async move {
            let request = pb::NodeStatsRequest { cpu_and_memory_only: true };
            let node = client.node_stats(request).await.unwrap().into_inner();
            let kubelet = node.system.first()?.usage?;
            (kubelet.cpu_nano_cores > Some(20_000_000) && kubelet.memory?.rss > 4 << 20).then_some(node)
        }
    })
    .await;
    let names: Vec<&str> = found.system.iter().map(|cgroup| cgroup.name.as_str()).collect();
    assert_eq!(names, ["kubelet", "misc"], "missing cgroups are left out");
    let now = keelson_service_kit::now_unix_nanos();
    let moments = found.system.iter().map(|cgroup| cgroup.started_unix_nanos);
    for moment in moments.chain([found.pods_started_unix_nanos]) {
        // File timestamps lag by a clock tick.
        assert!(moment > now - 600_000_000_000 && moment <= now, "{moment} of {now}");
    }
    let mut stream = service.client().cgroup_stats(pb::CgroupStatsRequest {}).await.unwrap().into_inner();
    let mut cgroups = Vec::new();
    while let Some(cgroup) = stream.message().await.unwrap() {
        cgroups.push((cgroup.path, cgroup.started_unix_nanos > 0, cgroup.usage.is_some()));
    }
    let expected =
        ["", "/burstable", "/besteffort"].map(|class| format!("{root}/kubepods{class}")).into_iter();
    let expected = expected.chain(["agent", "misc"].map(|name| format!("{root}/{name}")));
    assert_eq!(cgroups[1..], expected.map(|path| (path, true, true)).collect::<Vec<_>>());
}

#[tokio::test]
async fn pods_without_running_containers_or_cgroup_have_no_statistics() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    let (service, _sync) = with_pod(&world).await;
    publish_pod(&runtime, |pod| {
        pod.sandboxes[0].ready = false;
        pod.containers.retain(|c| c.name == "ended");
    });
    for uid in ["u2", "../u1"] {
        runtime.set_pod(rt::RuntimePod { uid: uid.into(), ..running() });
    }
    assert_eq!(stats(&mut service.client(), false).await, []);
}

#[tokio::test]
async fn node_statistics_include_all_pods() {
    let world = World::new();
    let (service, _sync) = with_pod(&world).await;
    let mut client = service.client();
    let request = pb::NodeStatsRequest { cpu_and_memory_only: false };
    let node = client.node_stats(request).await.unwrap().into_inner();
    let usage = node.usage.unwrap();
    let memory = usage.memory.unwrap();
    assert!(usage.cpu_nanos.unwrap() > 1_000_000_000, "{usage:?}");
    assert!(memory.working_set > 1 << 20 && memory.available.unwrap() > 1 << 20, "{memory:?}");
    assert!(memory.swap_usage.is_some(), "{memory:?}");
    assert!(node.boot_unix_nanos > 0 && node.pods.unwrap().cpu_nanos.is_some(), "{node:?}");
    let root = node.root.unwrap();
    assert!(root.capacity > root.used && root.inodes_used <= root.inodes, "{root:?}");
    assert!(node.processes.unwrap().current > 0 && node.network.is_some());
    // The fake runtime does not report where images are.
    assert_eq!(node.images, None);

    let request = pb::NodeStatsRequest { cpu_and_memory_only: true };
    let brief = client.node_stats(request).await.unwrap().into_inner();
    assert!(brief.usage.unwrap().cpu_nanos >= usage.cpu_nanos);
    assert_eq!((brief.network, brief.root, brief.images, brief.processes), (None, None, None, None));
}

#[tokio::test]
async fn a_pod_outside_its_cgroup_is_a_condition_until_it_is_back() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    runtime.set_pod(running());
    let (service, _sync) = with_pod(&world).await;
    let text = service.condition("pods-in-cgroups", false).await;
    assert!(text.contains("default/web") && text.contains("another cgroup driver than cgroupfs"), "{text}");
    let request = tonic::Request::new(ListEventsRequest::default());
    let events = service.ctx.events.list_events(request).await.unwrap().into_inner().events;
    assert_eq!(events.iter().filter(|event| event.reason == "PodsOutsideCgroups").count(), 1);

    let world = World::new();
    let runtime = world.start_runtime().await;
    let (service, _sync) = with_pod(&world).await;
    let _process = Process::start(&world.existing(POD));
    runtime.set_pod(running());
    let text = service.condition("pods-in-cgroups", true).await;
    assert_eq!(text, "");
}

#[tokio::test]
async fn statistics_without_runtime_shim_or_cgroups_fail_with_the_reason() {
    let world = World::new();
    let service = world.start().await;
    let request = pb::PodStatsRequest::default();
    let status = service.client().pod_stats(request).await.map(drop).unwrap_err();
    assert!(status.message().contains("runtime-shim is not reachable"), "{status:?}");

    let mut world = World::new();
    world.config.runtime.cgroup_driver = "slices".into();
    let service = world.start().await;
    let request = pb::NodeStatsRequest::default();
    let status = service.client().node_stats(request).await.map(drop).unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("no statistics") && status.message().contains("slices"), "{status:?}");
}
