//! Which pods are admitted, and in which order.

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;
use keelson_service_kit::status::reason;
use tonic::Code;

use crate::shared::{LONG, SHORT, admitted, machine, requesting, synced};
use crate::support::{Sync, World, admit, desire, prepare, release, within};

#[tokio::test]
async fn admission_rejects_a_pod_that_does_not_fit_in_the_kubelets_words() {
    let mut world = World::new();
    world.config.resources.max_pods = 3;
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let whole = machine(&service).await.allocatable["cpu"];
    sync.pod(requesting("u1", whole - 100)).await;
    assert_eq!(admit(&mut client, "u1", LONG).await, admitted());
    assert_eq!(
        admit(&mut client, "u1", LONG).await,
        admitted(),
        "the answer to a second request is the same"
    );
    sync.pod(requesting("u2", 101)).await;
    let Verdict::Rejected(rejected) = admit(&mut client, "u2", LONG).await else { panic!("it fits") };
    assert_eq!(rejected.reason, "OutOfcpu");
    assert_eq!(
        rejected.message,
        format!(
            "Node didn't have enough resource: cpu, requested: 101, used: {}, capacity: {whole}",
            whole - 100
        )
    );
    let status = prepare(&mut client, "u2", 1, LONG).await.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("NOT_ADMITTED"));
    assert!(world.existing("kubepods/burstable/podu2").is_empty());

    let mut adopted = requesting("u3", whole);
    adopted.adopted = true;
    sync.pod(adopted).await;
    assert_eq!(admit(&mut client, "u3", LONG).await, admitted());
    for uid in ["u4", "u5"] {
        sync.pod(desire(uid, 1, Want::Run, "BestEffort")).await;
    }
    assert_eq!(admit(&mut client, "u4", LONG).await, admitted());
    let Verdict::Rejected(rejected) = admit(&mut client, "u5", LONG).await else { panic!("it fits") };
    assert_eq!(rejected.reason, "OutOfpods");
}

#[tokio::test]
async fn a_deferred_pod_yields_its_resources_and_its_turn() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let whole = machine(&service).await.allocatable["cpu"];
    let created = |uid: &str, at: i64| pb::PodDesire { created_unix_nanos: at, ..requesting(uid, whole) };
    let defer = async |uid: &str, deadline| {
        let request = within(pb::DeferPodRequest { uid: uid.into(), revision: 1 }, deadline);
        service.client().defer_pod(request).await
    };
    for (uid, at) in [("first", 1), ("second", 2)] {
        sync.pod(created(uid, at)).await;
    }
    let Verdict::NotYet(not_yet) = admit(&mut client, "second", SHORT).await else {
        panic!("the older pod comes first")
    };
    assert_eq!(not_yet.reason, "OlderPodsFirst");
    // Deferred before a decision: a pod that waits for its turn is decided on.
    let mut other = service.client();
    let waiting = tokio::spawn(async move { admit(&mut other, "second", LONG).await });
    defer("first", LONG).await.unwrap();
    assert_eq!(waiting.await.unwrap(), admitted());
    assert!(
        matches!(admit(&mut client, "first", LONG).await, Verdict::Rejected(rejected) if rejected.passing)
    );

    // Deferred after its admission.
    defer("second", LONG).await.unwrap();
    assert_eq!(admit(&mut client, "first", LONG).await, admitted());
    assert!(
        matches!(admit(&mut client, "second", LONG).await, Verdict::Rejected(rejected) if rejected.passing)
    );

    // A running pod keeps its resources.
    let running = pb::PodDesire { adopted: true, ..created("running", 3) };
    sync.pod(running).await;
    assert_eq!(admit(&mut client, "running", LONG).await, admitted());
    defer("running", LONG).await.unwrap();
    defer("first", LONG).await.unwrap();
    assert!(matches!(admit(&mut client, "second", LONG).await, Verdict::Rejected(_)));
    assert_eq!(defer("nobody", SHORT).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(defer("../x", SHORT).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn admission_waits_for_the_complete_set_except_for_adopted_pods() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, "BestEffort")).await;
    let Verdict::NotYet(not_yet) = admit(&mut client, "u1", SHORT).await else { panic!("decided too early") };
    assert_eq!(not_yet.reason, "SetNotComplete");
    let mut adopted = desire("u2", 1, Want::Run, "BestEffort");
    adopted.adopted = true;
    sync.pod(adopted).await;
    prepare(&mut client, "u2", 1, LONG).await.unwrap();
    let mut other = service.client();
    let waiting = tokio::spawn(async move { admit(&mut other, "u1", LONG).await });
    sync.complete(1, false).await;
    assert_eq!(waiting.await.unwrap(), admitted());
}

#[tokio::test]
async fn preparing_an_unknown_pod_is_not_found_and_a_stopping_pod_is_refused() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let status = prepare(&mut client, "nobody", 1, SHORT).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_deref()), (Code::NotFound, Some("POD_NOT_NAMED")));
    release(&mut client, "nobody", LONG).await.unwrap();
    sync.pod(desire("u1", 1, Want::Stop, "BestEffort")).await;
    let status = prepare(&mut client, "u1", 1, LONG).await.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("NOT_WANTED"));
    let request = within(pb::AdmitPodRequest { uid: "../x".into(), revision: 1 }, LONG);
    assert_eq!(client.admit_pod(request).await.unwrap_err().code(), Code::InvalidArgument);
}
