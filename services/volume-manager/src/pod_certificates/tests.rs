use std::sync::atomic::{AtomicI64, Ordering};

use keelson_service_kit::Context;
use keelson_volume_manager_core::desire::{DesireHeader, PodRef, Source, VolumeUse};
use keelson_volume_manager_core::payload::{Files, FilesKind, ObjectKind, ObjectLookup, ObjectName};
use keelson_volume_manager_core::pod_certificate::{CertificateFiles, Credentials, KeyType, Notice, Refusal};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Code;

use super::*;

/// When a test begins, in seconds since 1970.
const START: i64 = 1_000_000;

/// Creates requests `req-1`, `req-2` and so on, on a clock that goes with tokio's.
#[derive(Debug)]
struct FakeRequests {
    started: Instant,
    number: AtomicI64,
    /// The creations, answered by the test.
    created: mpsc::UnboundedSender<pb::RequestPodCertificateRequest>,
    refusal: Mutex<Option<Status>>,
}

impl Requests for FakeRequests {
    fn create(&self, message: pb::RequestPodCertificateRequest) -> BoxFuture<'_, Result<String, Status>> {
        self.created.send(message).unwrap();
        let refusal = self.refusal.lock().unwrap().clone();
        let number = self.number.fetch_add(1, Ordering::Relaxed) + 1;
        Box::pin(std::future::ready(refusal.map_or_else(|| Ok(format!("req-{number}")), Err)))
    }

    fn now(&self) -> i64 {
        START + i64::try_from(self.started.elapsed().as_secs()).unwrap()
    }
}

/// The certificate of a pod.
struct Scene {
    ctx: Context,
    requests: Arc<FakeRequests>,
    created: mpsc::UnboundedReceiver<pb::RequestPodCertificateRequest>,
    objects: ObjectCache,
    pod: PodCertificates,
}

fn name() -> CertificateName {
    CertificateName { volume: "tls".to_owned(), source: 0 }
}

fn desire(want: Want) -> PodDesire {
    let request = CertificateRequest {
        signer: "example.com/ca".to_owned(),
        key_type: KeyType::Ed25519,
        max_expiration_seconds: Some(3600),
        user_annotations: BTreeMap::new(),
    };
    let files = CertificateFiles {
        name: name(),
        request,
        bundle_path: "tls.pem".to_owned(),
        key_path: String::new(),
        chain_path: String::new(),
        mode: None,
        owner: None,
    };
    let files = Files {
        kind: FilesKind::Projected,
        sources: vec![FileSource::Certificate(files)],
        default_mode: Some(0o644),
        nested: Vec::new(),
    };
    let pod = PodRef { uid: "u1".to_owned(), namespace: "ns".to_owned(), name: "web".to_owned() };
    let used = VolumeUse { mounts: true, devices: false };
    let volume = Volume { name: "tls".to_owned(), source: Source::Files(files), used };
    let header = DesireHeader { pod, revision: 1, want };
    PodDesire { volumes: vec![volume], service_account: "app".to_owned(), ..PodDesire::from(header) }
}

impl Scene {
    fn start(refusal: Option<Status>) -> Self {
        let ctx =
            Context::detached(keelson_config::ServiceName::VolumeManager, keelson_config::Config::default());
        let (sender, created) = mpsc::unbounded_channel();
        let requests = Arc::new(FakeRequests {
            started: Instant::now(),
            number: AtomicI64::new(0),
            created: sender,
            refusal: Mutex::new(refusal),
        });
        let objects = ObjectCache::default();
        let client = CertificateClient::with_requests(
            Arc::<FakeRequests>::clone(&requests),
            objects.clone(),
            ctx.events.clone(),
            &ctx.metrics,
        );
        let mut pod = PodCertificates::new(client);
        pod.set(&desire(Want::Run));
        Self { ctx, requests, created, objects, pod }
    }

    fn show(&self, number: i64, status: Option<Value>) {
        let name = format!("req-{number}");
        let object = ObjectName {
            kind: ObjectKind::PodCertificateRequest,
            namespace: "ns".to_owned(),
            name: name.clone(),
        };
        let json = |status: Value| {
            let json = json!({"metadata": {"name": name}, "status": status}).to_string();
            ObjectLookup::Present(Arc::new([(name.clone(), json.into_bytes().into())].into()))
        };
        self.objects.store(&object, status.map_or(ObjectLookup::Missing, json));
    }

    /// Shows a certificate for request `number`, with times in seconds from now.
    fn issue(&self, number: i64, begin_refresh: i64, not_after: i64) {
        let time =
            |seconds: i64| keelson_kube_model::time::format_seconds(self.requests.now() + seconds).unwrap();
        let der = keelson_kube_model::base64::encode(format!("certificate {number}").as_bytes());
        self.show(number, Some(json!({
            "conditions": [{"type": "Issued", "status": "True"}],
            "certificateChain": format!("-----BEGIN CERTIFICATE-----\n{der}\n-----END CERTIFICATE-----\n"),
            "beginRefreshAt": time(begin_refresh),
            "notAfter": time(not_after),
        })));
    }

    /// Waits until the certificate is as `is_expected` says.
    async fn until(&mut self, is_expected: impl Fn(&CertificateLookup) -> bool) -> CertificateLookup {
        loop {
            self.pod.has_changed();
            let found = self.pod.lookup()(&name());
            if is_expected(&found) {
                return found;
            }
            self.pod.changed().await;
        }
    }

    async fn until_pending(&mut self, text: &str) -> WaitOwner {
        let has_text = |found: &CertificateLookup| match found {
            CertificateLookup::Pending { what, .. } => what.contains(text),
            _ => false,
        };
        match self.until(has_text).await {
            CertificateLookup::Pending { owner, .. } => owner,
            other => panic!("{other:?}"),
        }
    }

    async fn until_chain(&mut self, number: i64) -> Arc<Credentials> {
        let der = keelson_kube_model::base64::encode(format!("certificate {number}").as_bytes());
        let has_chain = |found: &CertificateLookup| match found {
            CertificateLookup::Present(credentials) => credentials.chain.contains(&der),
            _ => false,
        };
        match self.until(has_chain).await {
            CertificateLookup::Present(credentials) => credentials,
            other => panic!("{other:?}"),
        }
    }

    fn metric(&self) -> String {
        let text = self.ctx.metrics.text();
        let counted = text.lines().filter(|line| line.starts_with("kubelet_podcertificate_states{"));
        let counted = counted.filter(|line| line.ends_with(" 1"));
        counted.map(|line| line.split("state=\"").nth(1).unwrap().split('"').next().unwrap()).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_requested_with_its_key_waited_for_and_refreshed_in_time() {
    let mut scene = Scene::start(None);
    let asked = scene.created.recv().await.unwrap();
    assert_eq!(
        (asked.namespace.as_str(), asked.pod_name.as_str(), asked.pod_uid.as_str()),
        ("ns", "web", "u1")
    );
    assert_eq!((asked.service_account.as_str(), asked.signer_name.as_str()), ("app", "example.com/ca"));
    assert!(asked.max_expiration_seconds == Some(3600) && !asked.stub_pkcs10_request.is_empty());
    assert_eq!(
        scene.until_pending("pod-config to send the PodCertificateRequest ns/req-1").await,
        WaitOwner::PodConfig
    );
    scene.show(1, None);
    assert_eq!(scene.until_pending("API server to show").await, WaitOwner::ApiServer);
    scene.show(1, Some(json!({})));
    let owner =
        scene.until_pending("signer example.com/ca to issue the PodCertificateRequest ns/req-1").await;
    assert_eq!(
        (owner, scene.metric().as_str()),
        (WaitOwner::Signer("example.com/ca".to_owned()), "not_yet_issued")
    );
    scene.issue(1, 1800, 3600);
    let first = scene.until_chain(1).await;
    let issued = scene.requests.now();
    let refreshed = scene.created.recv().await.unwrap();
    let waited = scene.requests.now() - issued;
    assert!((1800..=2105).contains(&waited), "{waited}");
    assert_ne!(refreshed.stub_pkcs10_request, asked.stub_pkcs10_request, "a refresh has a new key");
    assert_eq!((scene.until_chain(1).await, scene.metric().as_str()), (Arc::clone(&first), "fresh"));
    scene.issue(2, 1800, 3600);
    let second = scene.until_chain(2).await;
    assert_ne!(second.key, first.key);
}

#[tokio::test(start_paused = true)]
async fn a_late_refresh_is_counted_and_the_old_certificate_stays() {
    let mut scene = Scene::start(None);
    scene.created.recv().await.unwrap();
    scene.until_pending("req-1").await;
    scene.issue(1, 600, 3600);
    scene.until_chain(1).await;
    scene.created.recv().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1300)).await;
    assert_eq!(scene.metric(), "overdue_for_refresh");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(scene.metric(), "expired");
    scene.until_chain(1).await;
}

#[tokio::test(start_paused = true)]
async fn a_deleted_request_is_created_anew_after_a_pause_that_grows() {
    let mut scene = Scene::start(None);
    let mut pauses = Vec::new();
    for number in 1..5 {
        let before = Instant::now();
        scene.created.recv().await.unwrap();
        pauses.push(before.elapsed());
        scene.until_pending(&format!("req-{number}")).await;
        scene.show(number, Some(json!({})));
        scene.until_pending("signer example.com/ca").await;
        scene.show(number, None);
    }
    assert!(pauses[0] < Duration::from_millis(100) && pauses[3] > pauses[1], "{pauses:?}");
}

#[tokio::test(start_paused = true)]
async fn denied_and_failed_certificates_are_refused_with_the_signers_reason() {
    for kind in ["Denied", "Failed"] {
        let mut scene = Scene::start(None);
        scene.created.recv().await.unwrap();
        scene.until_pending("req-1").await;
        let condition =
            json!({"type": kind, "status": "True", "reason": "NotOurs", "message": "ask another"});
        scene.show(1, Some(json!({"conditions": [condition]})));
        let refused = scene.until(|found| matches!(found, CertificateLookup::Refused(_))).await;
        let CertificateLookup::Refused(why) = refused else { unreachable!() };
        assert!(why.contains("reason=\"NotOurs\" message=\"ask another\""), "{why}");
        assert_eq!(scene.metric(), kind.to_lowercase());
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_request_is_tried_again_and_names_who_has_to_act() {
    let refusal = keelson_service_kit::status::error(Code::Unavailable, "CONTROL_PLANE_AWAY", "it is away");
    let mut scene = Scene::start(Some(refusal));
    assert_eq!(scene.until_pending("example.com/ca: it is away").await, WaitOwner::ApiServer);
    *scene.requests.refusal.lock().unwrap() = None;
    scene.until_pending("PodCertificateRequest ns/req-").await;
}

#[tokio::test(start_paused = true)]
async fn the_certificates_of_a_pod_are_forgotten_at_its_teardown() {
    let mut scene = Scene::start(None);
    scene.created.recv().await.unwrap();
    scene.until_pending("req-1").await;
    scene.issue(1, 600, 3600);
    scene.until_chain(1).await;
    scene.pod.set(&desire(Want::Stop));
    scene.until_chain(1).await;
    scene.pod.set(&desire(Want::Unmount));
    assert!(matches!(scene.pod.lookup()(&name()), CertificateLookup::Pending { .. }));
    while scene.pod.tasks.join_next().await.is_some() {}
    assert_eq!(scene.metric(), "", "the ended renewal does not count any more");
}

#[test]
fn notices_are_the_events_of_a_kubelet() {
    let refusal = || Refusal { reason: "NotOurs".to_owned(), message: "ask another".to_owned() };
    let denied = r#"PodCertificateRequest ns/r was denied, reason="NotOurs", message="ask another""#;
    let failed = r#"PodCertificateRequest ns/r failed, reason="NotOurs", message="ask another""#;
    for (notice, expected) in [
        (Notice::Overdue, Some(("CertificateOverdueForRefresh", "PodCertificate refresh overdue"))),
        (Notice::Expired, Some(("CertificateExpired", "PodCertificate expired"))),
        (Notice::Denied("r".to_owned(), refusal()), Some(("Denied", denied))),
        (Notice::Failed("r".to_owned(), refusal()), Some(("Failed", failed))),
        (Notice::Deleted("r".to_owned()), None),
    ] {
        let event = renewal::event_of(&notice, "ns");
        assert_eq!(event.as_ref().map(|(reason, message)| (*reason, message.as_str())), expected);
    }
}
