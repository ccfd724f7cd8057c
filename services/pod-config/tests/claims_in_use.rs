//! Deleted claims of manifests that volume-manager reports as in use.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use std::fs;

use common::fleet::{object, wait_for_phase, wait_until, wait_until_deletion_is_stored};
use common::{Node, Service};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::status::reason;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tonic::{Code, Status, Streaming};

const VOLUME: &str = "PersistentVolume";
const CLAIM: &str = "PersistentVolumeClaim";
const MANIFESTS: &str = "\
apiVersion: v1
kind: PersistentVolume
metadata: {name: disk}
spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], hostPath: {path: /srv/disk}}
";
const CLAIM_MANIFEST: &str = "\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
";
const NOT_REPORTED: &str = "volume-manager, which has not reported yet what it has mounted";

/// A stream of reports.
struct Reports {
    requests: UnboundedSender<pb::ReportClaimsInUseRequest>,
    confirmations: Streaming<pb::ReportClaimsInUseResponse>,
}

impl Reports {
    async fn open(service: &Service) -> Self {
        let (requests, mut receiver) = unbounded_channel();
        let stream = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
        let confirmations = service.client().report_claims_in_use(stream).await.unwrap().into_inner();
        Self { requests, confirmations }
    }

    fn send(&self, revision: u64, claims: &[pb::ClaimInUse], complete: bool) {
        let claims = claims.to_vec();
        self.requests.send(pb::ReportClaimsInUseRequest { revision, claims, complete }).unwrap();
    }

    /// Sends a complete set and waits until it is confirmed.
    async fn report(&mut self, revision: u64, claims: &[pb::ClaimInUse]) {
        self.send(revision, claims, true);
        assert_eq!(self.confirmations.message().await.unwrap().unwrap().revision, revision);
    }

    async fn error(&mut self) -> Status {
        self.confirmations.message().await.unwrap_err()
    }
}

fn data(user: &str) -> pb::ClaimInUse {
    pb::ClaimInUse {
        namespace: "default".into(),
        name: "data".into(),
        user: user.into(),
        ..Default::default()
    }
}

/// Waits until the claim is shown as deleted and held by this.
async fn wait_for_holder(service: &mut Service, holder: &str) {
    let is_held = |found: Option<&Value>| {
        found.is_some_and(|claim| {
            claim["metadata"]["deletionTimestamp"].is_string()
                && claim["metadata"]["annotations"]["keelson.dev/held-by"] == holder
                && claim["status"]["phase"] == "Bound"
        })
    };
    wait_until(service, CLAIM, "data", is_held).await;
    assert_eq!(object(service, VOLUME, "disk").await.unwrap()["status"]["phase"], "Bound");
}

/// A node whose claim `data` is bound to `disk`.
async fn bound() -> (Node, Service) {
    let node = Node::new();
    node.write_backdated("disk.yaml", MANIFESTS);
    node.write_backdated("claim.yaml", CLAIM_MANIFEST);
    let mut service = node.start();
    wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    (node, service)
}

#[tokio::test]
async fn a_deleted_claim_stays_over_kills_until_the_report_does_not_name_it() {
    let (node, mut service) = bound().await;
    let mut reports = Reports::open(&service).await;
    reports.report(1, &[data("the pod default/db")]).await;
    fs::remove_file(node.manifest("claim.yaml")).unwrap();
    wait_for_holder(&mut service, "the pod default/db").await;
    // volume-manager ends: its last report stays in effect.
    drop(reports);
    wait_for_holder(&mut service, "the pod default/db").await;
    wait_until_deletion_is_stored(&node, &mut service);
    service.kill();

    let mut service = node.start();
    service.watch().await.replay().await;
    wait_for_holder(&mut service, NOT_REPORTED).await;
    let mut reports = Reports::open(&service).await;
    // The set is spread over two messages.
    reports.send(2, &[data("the pod default/db")], false);
    reports.report(2, &[]).await;
    wait_for_holder(&mut service, "the pod default/db").await;
    // Only the name of the PersistentVolume is known.
    let found = pb::ClaimInUse {
        persistent_volume: "disk".into(),
        user: "the volumes of the unknown pod u1".into(),
        ..Default::default()
    };
    reports.report(3, &[found]).await;
    wait_for_holder(&mut service, "the volumes of the unknown pod u1").await;
    // A set that was not completed does not count.
    reports.send(4, &[data("the pod default/db")], false);
    reports.report(5, &[]).await;
    assert_eq!(object(&service, CLAIM, "data").await, None);
    assert_eq!(object(&service, VOLUME, "disk").await.unwrap()["status"]["phase"], "Released");
}

#[tokio::test]
async fn before_the_first_report_of_a_stream_nothing_is_released() {
    let (node, mut service) = bound().await;
    let mut reports = Reports::open(&service).await;
    reports.report(1, &[]).await;
    let mut newer = Reports::open(&service).await;
    fs::remove_file(node.manifest("claim.yaml")).unwrap();
    wait_for_holder(&mut service, NOT_REPORTED).await;
    // The set of the volume-manager that ran before does not count any more.
    reports.send(2, &[], true);
    let refused = reports.error().await;
    assert_eq!((refused.code(), reason(&refused).as_deref()), (Code::Aborted, Some("NEWER_STREAM")));
    wait_for_holder(&mut service, NOT_REPORTED).await;
    newer.report(1, &[]).await;
    assert_eq!(object(&service, CLAIM, "data").await, None);
    assert_eq!(object(&service, VOLUME, "disk").await.unwrap()["status"]["phase"], "Released");
}

#[tokio::test]
async fn a_claim_that_no_report_names_is_released_at_once() {
    let (node, mut service) = bound().await;
    let mut reports = Reports::open(&service).await;
    let other = pb::ClaimInUse { name: "other".into(), ..data("the pod default/db") };
    reports.report(1, &[other]).await;
    fs::remove_file(node.manifest("claim.yaml")).unwrap();
    wait_for_phase(&mut service, VOLUME, "disk", "Released").await;
    assert_eq!(object(&service, CLAIM, "data").await, None);
}

#[tokio::test]
async fn an_entry_without_a_name_is_refused_and_changes_nothing() {
    let (node, mut service) = bound().await;
    let half = pb::ClaimInUse { name: String::new(), persistent_volume: "disk".into(), ..data("x") };
    for entry in [pb::ClaimInUse::default(), half] {
        let mut reports = Reports::open(&service).await;
        reports.send(1, &[entry], true);
        let refused = reports.error().await;
        assert_eq!(
            (refused.code(), reason(&refused).as_deref()),
            (Code::InvalidArgument, Some("NAME_MISSING"))
        );
    }
    fs::remove_file(node.manifest("claim.yaml")).unwrap();
    wait_for_holder(&mut service, NOT_REPORTED).await;
}
