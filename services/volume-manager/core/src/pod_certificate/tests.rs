use serde_json::{Value, json};

use super::*;
use crate::payload::{
    Content, File, FileSource, Files, FilesKind, ObjectLookup, ObjectName, PayloadError, SourceCache, collect,
};
use crate::token::{TokenLookup, TokenName};

const CHAIN: &str = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n";
/// The jitter of every step.
const JITTER: i64 = 60;

fn issued(begin_refresh: i64, not_after: i64) -> Observed {
    Observed::Issued(Issued { chain: CHAIN.to_owned(), begin_refresh, not_after })
}

fn refusal() -> Refusal {
    Refusal { reason: "NotOurs".to_owned(), message: "no such \"pod\"".to_owned() }
}

fn waiting(state: &mut State, now: i64, observed: &Observed) -> Option<i64> {
    let step = state.step(now, observed, JITTER);
    assert_eq!(step.notices, []);
    match step.action {
        Action::Wait { until } => until,
        other => panic!("{other:?}"),
    }
}

fn action(state: &mut State, now: i64, observed: &Observed) -> (Action, Vec<Notice>) {
    let Step { action, notices } = state.step(now, observed, JITTER);
    (action, notices)
}

/// A certificate that was issued at 0, is refreshed from 1000 on and expires at 2000.
fn fresh() -> State {
    let mut state = State::default();
    assert_eq!(action(&mut state, 0, &Observed::Unknown), (Action::Request, vec![]));
    state.requested("req-a".to_owned(), 0, JITTER);
    let used = action(&mut state, 0, &issued(1000 - JITTER, 2000));
    assert_eq!(used, (Action::Use { chain: CHAIN.to_owned() }, vec![]));
    state
}

#[test]
fn a_certificate_is_requested_issued_and_refreshed_after_its_time_and_the_jitter() {
    let mut state = State::default();
    assert_eq!((state.request(), state.metric(0)), (None, "not_yet_issued"));
    assert_eq!(action(&mut state, 0, &Observed::Unknown), (Action::Request, vec![]));
    state.requested("req-a".to_owned(), 0, JITTER);
    assert_eq!((state.request(), state.metric(0)), (Some("req-a"), "not_yet_issued"));
    assert_eq!(waiting(&mut state, 1, &Observed::Missing), Some(600 + JITTER));
    assert_eq!(waiting(&mut state, 2, &Observed::Pending), None);
    assert_eq!(waiting(&mut state, 3, &Observed::Invalid("no chain".to_owned())), None);
    let used = action(&mut state, 4, &issued(1000, 2000));
    assert_eq!(used, (Action::Use { chain: CHAIN.to_owned() }, vec![]));
    assert_eq!((state.request(), state.metric(4)), (None, "fresh"));
    assert_eq!(waiting(&mut state, 5, &Observed::Unknown), Some(1000 + JITTER));
    assert_eq!(action(&mut state, 1000 + JITTER, &Observed::Unknown), (Action::Request, vec![]));
    state.requested("req-b".to_owned(), 1060, JITTER);
    assert_eq!((state.request(), state.metric(1060)), (Some("req-b"), "fresh"));
    assert_eq!(action(&mut state, 1070, &issued(3000, 4000)).0, Action::Use { chain: CHAIN.to_owned() });
    assert_eq!(waiting(&mut state, 1071, &Observed::Unknown), Some(3000 + JITTER));
}

#[test]
fn a_request_that_the_server_never_shows_is_given_up_after_ten_minutes_and_jitter() {
    let mut state = State::default();
    state.requested("req-a".to_owned(), 100, JITTER);
    assert_eq!(waiting(&mut state, 100 + 659, &Observed::Missing), Some(760));
    let deleted = vec![Notice::Deleted("req-a".to_owned())];
    assert_eq!(action(&mut state, 760, &Observed::Missing), (Action::Request, deleted));
    assert_eq!((&state, state.request()), (&State::Initial, None));
}

#[test]
fn a_request_that_was_shown_and_is_gone_is_created_anew_at_once() {
    let mut state = State::default();
    state.requested("req-a".to_owned(), 0, JITTER);
    assert_eq!(waiting(&mut state, 1, &Observed::Pending), None);
    let deleted = || vec![Notice::Deleted("req-a".to_owned())];
    assert_eq!(action(&mut state, 2, &Observed::Missing), (Action::Request, deleted()));
    let mut state = fresh();
    state.requested("req-a".to_owned(), 1000, JITTER);
    waiting(&mut state, 1001, &Observed::Pending);
    assert_eq!(action(&mut state, 1002, &Observed::Missing), (Action::Request, deleted()));
    assert_eq!(state.metric(1002), "fresh", "the certificate in use stays");
}

#[test]
fn a_request_is_not_given_up_while_the_server_does_not_answer() {
    let mut state = State::default();
    state.requested("req-a".to_owned(), 0, 0);
    assert_eq!(waiting(&mut state, 10_000, &Observed::Unknown), None);
    assert_eq!(state.request(), Some("req-a"));
}

#[test]
fn denied_and_failed_requests_are_final_and_reported_once() {
    for (observed, metric, notice) in [
        (Observed::Denied(refusal()), "denied", Notice::Denied("req-a".to_owned(), refusal())),
        (Observed::Failed(refusal()), "failed", Notice::Failed("req-a".to_owned(), refusal())),
    ] {
        for mut state in [State::default(), fresh()] {
            state.requested("req-a".to_owned(), 1000, JITTER);
            let step = action(&mut state, 1001, &observed);
            assert_eq!(step, (Action::Wait { until: None }, vec![notice.clone()]));
            assert_eq!(waiting(&mut state, 90_000, &issued(1, 2)), None);
            state.requested("req-b".to_owned(), 90_000, 0);
            assert_eq!((state.request(), state.metric(90_000)), (None, metric));
            let text = state.refusal("example.com/ca").unwrap();
            let kubelets = format!(
                "PodCertificateRequest was permanently {metric}: reason=\"NotOurs\" message=\"no such \\\"pod\\\"\""
            );
            assert!(text.starts_with(&kubelets) && text.contains("example.com/ca"), "{text}");
        }
    }
    assert_eq!(fresh().refusal("example.com/ca"), None);
}

#[test]
fn an_overdue_and_an_expired_certificate_are_reported_once_each_and_stay_in_use() {
    let late = |state: &mut State, observed: &Observed| {
        assert_eq!(state.metric(1599), "fresh");
        assert_eq!(action(state, 1599, observed).1, []);
        assert_eq!(state.metric(1600), "overdue_for_refresh");
        assert_eq!(action(state, 1600, observed).1, [Notice::Overdue]);
        assert_eq!(action(state, 1601, observed).1, []);
        assert_eq!(state.metric(2000), "expired");
        assert_eq!(action(state, 2000, observed).1, [Notice::Expired]);
        assert_eq!(action(state, 3000, observed).1, []);
    };
    // While no request can be created, and while the signer does not decide.
    late(&mut fresh(), &Observed::Unknown);
    let mut refreshing = fresh();
    refreshing.requested("req-b".to_owned(), 1000, JITTER);
    assert_eq!(waiting(&mut refreshing, 1001, &Observed::Pending), Some(1600));
    late(&mut refreshing, &Observed::Pending);
    assert_eq!(waiting(&mut refreshing, 3001, &Observed::Pending), None);
    assert!(matches!(action(&mut refreshing, 3002, &issued(4000, 5000)).0, Action::Use { .. }));
    assert_eq!(refreshing.metric(3002), "fresh");
}

#[test]
fn a_certificate_that_expires_before_its_refresh_is_reported_in_time() {
    let mut state = State::default();
    state.requested("req-a".to_owned(), 0, 0);
    action(&mut state, 0, &issued(1000, 500));
    assert_eq!(waiting(&mut state, 1, &Observed::Unknown), Some(500));
    assert_eq!(action(&mut state, 500, &Observed::Unknown).1, [Notice::Expired]);
}

#[test]
fn the_first_condition_that_ends_a_request_counts() {
    let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": "NotOurs", "message": "no such \"pod\""});
    let object = |status: Value| Observed::parse(json!({"status": status}).to_string().as_bytes());
    for (status, expected) in [
        (json!(null), Observed::Pending),
        (json!({"conditions": []}), Observed::Pending),
        (json!({"conditions": [condition("Seen")]}), Observed::Pending),
        (json!({"conditions": [condition("Seen"), condition("Denied")]}), Observed::Denied(refusal())),
        (json!({"conditions": [condition("Failed"), condition("Denied")]}), Observed::Failed(refusal())),
    ] {
        assert_eq!(object(status.clone()), expected, "{status}");
    }
}

#[test]
fn an_issued_certificate_has_a_clean_chain_and_times_or_the_field_is_named() {
    let pem = |label: &str| format!("text\n-----BEGIN {label}-----\nA: b\n\nYQ==\n-----END {label}-----\n");
    let status = json!({
        "conditions": [{"type": "Issued"}],
        "certificateChain": pem("CERTIFICATE") + &pem("X509 CRL"),
        "beginRefreshAt": "1970-01-01T00:16:40Z",
        "notAfter": "1970-01-01T01:00:00Z",
    });
    let parse = |status: &Value| Observed::parse(json!({"status": status}).to_string().as_bytes());
    let both = Issued { chain: CHAIN.repeat(2), begin_refresh: 1000, not_after: 3600 };
    assert_eq!(parse(&status), Observed::Issued(both), "a block of any type counts, as for a kubelet");
    for field in ["certificateChain", "beginRefreshAt", "notAfter"] {
        let mut broken = status.clone();
        broken[field] = json!("soon");
        let Observed::Invalid(why) = parse(&broken) else { panic!("{field}") };
        assert!(why.contains(field), "{why}");
    }
    assert!(matches!(Observed::parse(b"[1"), Observed::Invalid(_)));
}

/// One lookup for every certificate.
struct Lookup(CertificateLookup);

impl SourceCache for Lookup {
    fn object(&self, name: &ObjectName) -> ObjectLookup {
        unreachable!("{name:?}")
    }

    fn token(&self, name: &TokenName) -> TokenLookup {
        unreachable!("{name:?}")
    }

    fn certificate(&self, name: &CertificateName) -> CertificateLookup {
        assert_eq!((name.volume.as_str(), name.source), ("tls", 1));
        self.0.clone()
    }
}

/// A volume with a certificate in the files for key and chain, key, and chain; an empty path is no file.
fn volume([bundle, key, chain]: [&str; 3]) -> Files {
    Files {
        kind: FilesKind::Projected,
        sources: vec![FileSource::Certificate(CertificateFiles {
            name: CertificateName { volume: "tls".to_owned(), source: 1 },
            request: CertificateRequest {
                signer: "example.com/ca".to_owned(),
                key_type: KeyType::Ed25519,
                max_expiration_seconds: None,
                user_annotations: BTreeMap::new(),
            },
            bundle_path: bundle.to_owned(),
            key_path: key.to_owned(),
            chain_path: chain.to_owned(),
            mode: Some(0o600),
            owner: Some(7),
        })],
        default_mode: Some(0o644),
        nested: Vec::new(),
    }
}

#[test]
fn key_and_chain_are_written_to_each_named_path_with_mode_and_owner() {
    let present = Credentials { key: "KEY\n".to_owned().into(), chain: CHAIN.to_owned() };
    let present = Lookup(CertificateLookup::Present(Arc::new(present)));
    let bundle = format!("KEY\n{CHAIN}");
    for (paths, expected) in [
        (["both.pem", "", ""], vec![("both.pem", bundle.as_str())]),
        (["", "key.pem", "chain.pem"], vec![("chain.pem", CHAIN), ("key.pem", "KEY\n")]),
    ] {
        let payload = collect(&volume(paths), "ns", &present).unwrap();
        let text = |file: &File| String::from_utf8(file.bytes.to_vec()).unwrap();
        let written: Vec<_> = payload.files.iter().map(|(path, file)| (path.as_str(), text(file))).collect();
        let written: Vec<_> = written.iter().map(|(path, text)| (*path, text.as_str())).collect();
        assert_eq!(written, expected);
        assert!(payload.files.values().all(|file| (file.mode, file.owner) == (0o600, Some(7))));
    }
    let error = |lookup| collect(&volume(["a", "", ""]), "ns", &Lookup(lookup)).unwrap_err();
    let pending = CertificateLookup::Pending { what: "it".to_owned(), owner: WaitOwner::ApiServer };
    assert_eq!(error(pending), PayloadError::Pending(vec!["it".to_owned()]));
    let refused = error(CertificateLookup::Refused("no".to_owned()));
    assert_eq!(refused.to_string(), "no");
    assert!(matches!(refused, PayloadError::Invalid(errors) if !errors[0].is_caused_by_spec()));
}

#[test]
fn files_with_a_private_key_are_overwritten_in_memory_and_others_are_not() {
    let credentials = Credentials { key: "KEY\n".to_owned().into(), chain: CHAIN.to_owned() };
    let present = Lookup(CertificateLookup::Present(Arc::new(credentials)));
    let payload = collect(&volume(["all.pem", "key.pem", "chain.pem"]), "ns", &present).unwrap();
    for (path, is_key) in [("all.pem", true), ("key.pem", true), ("chain.pem", false)] {
        assert_eq!(matches!(payload.files[path].bytes, Content::Key(_)), is_key, "{path}");
    }
}

#[test]
fn keys_have_the_types_of_the_api() {
    for name in ["RSA3072", "RSA4096", "ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519"] {
        assert!(KeyType::parse(name).is_some(), "{name}");
    }
    assert_eq!(KeyType::parse("RSA2048"), None);
}

#[test]
fn debug_output_does_not_contain_the_key() {
    let credentials = Credentials { key: "hunter2".to_owned().into(), chain: CHAIN.to_owned() };
    let lookup = CertificateLookup::Present(Arc::new(credentials));
    let text = format!("{lookup:?}");
    assert!(text.contains("BEGIN CERTIFICATE") && !text.contains("hunter2"), "{text}");
}
