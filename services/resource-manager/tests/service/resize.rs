//! Other requests and limits for pods that run.

use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::resize_pod_response::Verdict;
use keelson_service_kit::status::reason;
use tonic::Code;

use crate::shared::{LONG, SHORT, admitted, machine, requesting, synced};
use crate::support::{Client, Process, World, admit, prepare, until_some, within};

const MIB: i64 = 1 << 20;

async fn resize(client: &mut Client, uid: &str, milli: i64) -> Verdict {
    resize_at(client, uid, 1, milli).await
}

async fn resize_at(client: &mut Client, uid: &str, revision: u64, milli: i64) -> Verdict {
    let requests = [("cpu".to_owned(), milli)].into();
    let request = within(pb::ResizePodRequest { uid: uid.into(), revision, requests }, LONG);
    client.resize_pod(request).await.unwrap().into_inner().verdict.unwrap()
}

#[tokio::test]
async fn a_resize_is_accepted_if_it_fits_and_its_requests_count_at_once() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let whole = machine(&service).await.allocatable["cpu"];
    for uid in ["u1", "u2"] {
        sync.pod(requesting(uid, 100)).await;
        assert_eq!(admit(&mut client, uid, LONG).await, admitted());
    }
    let accepted = Verdict::Accepted(pb::Admitted {});
    assert_eq!(resize(&mut client, "u1", whole - 100).await, accepted);
    let Verdict::Rejected(rejected) = resize(&mut client, "u2", 101).await else { panic!("it fits") };
    assert_eq!((rejected.reason.as_str(), rejected.passing), ("OutOfcpu", true));
    let Verdict::Rejected(rejected) = resize(&mut client, "u2", whole + 1).await else { panic!("it fits") };
    assert!(!rejected.passing, "above the machine: {}", rejected.message);
    assert_eq!(resize(&mut client, "u1", 100).await, accepted);
    assert_eq!(resize(&mut client, "u2", 101).await, accepted);
    // The set says what the pod has.
    let mut other = requesting("u2", 100);
    other.revision = 2;
    sync.pod(other).await;
    prepare(&mut client, "u2", 2, LONG).await.unwrap();
    assert_eq!(resize(&mut client, "u1", whole - 100).await, accepted);
}

#[tokio::test]
async fn a_resize_of_a_pod_that_does_not_run_is_not_decided_on() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    sync.pod(requesting("u1", 100)).await;
    let Verdict::NotYet(wait) = resize(&mut client, "u1", 200).await else { panic!("it is decided on") };
    assert_eq!(wait.reason, "PodNotAdmitted");
    for (uid, code) in [("nobody", Code::NotFound), ("../x", Code::InvalidArgument)] {
        let request = pb::ResizePodRequest { uid: uid.into(), revision: 1, requests: [].into() };
        assert_eq!(client.resize_pod(within(request, SHORT)).await.unwrap_err().code(), code);
    }
}

#[tokio::test]
async fn a_resize_of_an_older_version_of_a_pod_changes_no_reservation() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let whole = machine(&service).await.allocatable["cpu"];
    for uid in ["u1", "u2"] {
        sync.pod(requesting(uid, 100)).await;
        assert_eq!(admit(&mut client, uid, LONG).await, admitted());
    }
    // Its source has changed its mind while the call was on its way.
    sync.pod(pb::PodDesire { revision: 2, ..requesting("u1", 100) }).await;
    prepare(&mut client, "u1", 2, LONG).await.unwrap();
    let Verdict::NotYet(wait) = resize(&mut client, "u1", whole - 100).await else { panic!("decided on") };
    assert_eq!(wait.reason, "PodChanged");
    let accepted = Verdict::Accepted(pb::Admitted {});
    assert_eq!(resize(&mut client, "u2", whole - 100).await, accepted, "nothing more is reserved for u1");
    let Verdict::Rejected(_) = resize_at(&mut client, "u1", 2, 101).await else { panic!("it fits") };
}

#[tokio::test]
async fn a_memory_limit_below_the_usage_is_refused_and_set_when_the_usage_falls() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let limited = |mib: i64, revision| {
        let cgroup = pb::PodCgroup { cpu_shares: 102, memory_limit_bytes: mib * MIB, ..Default::default() };
        pb::PodDesire { cgroup: Some(cgroup), revision, ..requesting("u1", 100) }
    };
    let has = async |client: &mut Client, desire: pb::PodDesire| {
        let pb::PodDesire { revision, cgroup, .. } = desire;
        let request = pb::PreparePodRequest { uid: "u1".into(), revision, cgroup };
        client.prepare_pod(within(request, LONG)).await
    };
    sync.pod(limited(64, 1)).await;
    assert_eq!(admit(&mut client, "u1", LONG).await, admitted());
    has(&mut client, limited(64, 1)).await.unwrap();
    let pod = "kubepods/burstable/podu1";
    let (limit, usage) = if machine(&service).await.cgroup_version == "v1" {
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
    } else {
        ("memory.max", "memory.current")
    };
    let process = Process::use_memory(&world.existing(pod));
    until_some("the memory", || {
        let used = world.value(pod, usage).parse::<i64>().unwrap();
        std::future::ready((used >= 16 * MIB).then_some(()))
    })
    .await;
    sync.pod(limited(8, 1)).await;
    let refused = has(&mut client, limited(8, 1)).await.unwrap_err();
    assert_eq!(reason(&refused).as_deref(), Some("LIMIT_BELOW_USAGE"));
    let text = "attempting to set pod memory limit (8388608) below current usage (";
    assert!(refused.message().contains(text), "{}", refused.message());
    assert_eq!(world.value(pod, limit), (64 * MIB).to_string());
    // Others that need the cgroup are not held up.
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    drop(process);
    until_some("the lower limit", || {
        let mut client = service.client();
        async move { has(&mut client, limited(8, 1)).await.ok() }
    })
    .await;
    assert_eq!(world.value(pod, limit), (8 * MIB).to_string());
}
