use proptest::prelude::*;

use super::*;

fn held() -> HeldCertificate {
    HeldCertificate { subject: client_subject("n1"), not_before: 1_000, not_after: 2_000, is_managed: true }
}

#[test]
fn a_certificate_is_requested_at_once_if_unusable_and_else_late_in_its_lifetime() {
    let other = HeldCertificate { subject: client_subject("n2"), ..held() };
    let from_kubeconfig = HeldCertificate { is_managed: false, ..held() };
    let mut more = held();
    more.subject.dns_names.insert("n1".to_owned());
    for (held, part, now, expected) in [
        (None, 0.5, 1_000, Due::Now(RequestReason::Missing)),
        (Some(held()), 0.0, 1_000, Due::At(1_700)),
        (Some(held()), 0.5, 1_000, Due::At(1_800)),
        (Some(held()), 1.0, 1_000, Due::At(1_900)),
        (Some(held()), 7.0, 1_000, Due::At(1_900)),
        (Some(held()), 0.0, 1_699, Due::At(1_700)),
        (Some(held()), 0.0, 1_700, Due::Now(RequestReason::Rotation)),
        (Some(held()), 0.0, 2_000, Due::Now(RequestReason::Rotation)),
        (Some(held()), 0.0, 2_001, Due::Now(RequestReason::Expired)),
        // It is not valid yet: clocks differ.
        (Some(held()), 0.0, 10, Due::At(1_700)),
        (Some(other), 0.0, 1_000, Due::Now(RequestReason::WrongSubject)),
        (Some(from_kubeconfig), 0.0, 1_000, Due::Now(RequestReason::FromKubeconfig)),
        (Some(more), 0.0, 1_000, Due::At(1_700)),
    ] {
        assert_eq!(due(held.as_ref(), &client_subject("n1"), part, now), expected, "{held:?} {now}");
    }
}

#[test]
fn a_serving_certificate_has_all_addresses_and_names_of_the_node() {
    let addresses = json!([
        {"type": "InternalIP", "address": "10.0.0.7"}, {"type": "InternalIP", "address": "fd00::7"},
        {"type": "ExternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": "edge-1"},
        {"type": "InternalDNS", "address": "edge-1.internal"}, {"type": "ExternalDNS", "address": ""},
        {"type": "Other", "address": "10.9.9.9"},
    ]);
    let wanted = serving_subject("n1", &addresses, false).unwrap();
    let text: Vec<String> = wanted.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(text, ["10.0.0.7", "192.0.2.1", "fd00::7"]);
    assert_eq!(wanted.dns_names.iter().collect::<Vec<_>>(), ["edge-1", "edge-1.internal"]);
    assert_eq!(wanted.common_name, "system:node:n1");
    let by_address =
        serving_subject("n1", &json!([{"type": "Hostname", "address": "10.0.0.7"}]), false).unwrap();
    assert!(by_address.dns_names.is_empty() && by_address.addresses.len() == 1, "a name that is an address");
    for none in [json!(null), json!([]), json!([{"type": "Hostname", "address": "edge-1"}])] {
        assert_eq!(serving_subject("n1", &none, false), None, "without an address none is asked for");
    }
    let certificate = |subject: &Subject| HeldCertificate { subject: subject.clone(), ..held() };
    assert_eq!(due(Some(&certificate(&wanted)), &wanted, 0.5, 1_000), Due::At(1_800));
    let mut lacks: Vec<Subject> = vec![wanted.clone(); 4];
    lacks[0].addresses.pop_first();
    lacks[1].dns_names.pop_first();
    lacks[2].organizations.clear();
    lacks[3].common_name = "system:node:n2".to_owned();
    for subject in lacks {
        assert_eq!(
            due(Some(&certificate(&subject)), &wanted, 0.5, 1_000),
            Due::Now(RequestReason::WrongSubject),
            "{subject:?}"
        );
    }
}

#[test]
fn a_serving_certificate_is_requested_for_names_alone_only_with_the_gate() {
    let named =
        json!([{"type": "Hostname", "address": "edge-1"}, {"type": "InternalDNS", "address": "edge-1.lan"}]);
    assert_eq!(serving_subject("n1", &named, false), None);
    let subject = serving_subject("n1", &named, true).unwrap();
    assert_eq!(subject.dns_names.iter().collect::<Vec<_>>(), ["edge-1", "edge-1.lan"]);
    assert!(subject.addresses.is_empty());
    for none in [json!(null), json!([]), json!([{"type": "Hostname", "address": ""}])] {
        assert_eq!(serving_subject("n1", &none, true), None, "{none}");
    }
    let both =
        json!([{"type": "Hostname", "address": "edge-1"}, {"type": "InternalIP", "address": "10.0.0.7"}]);
    assert_eq!(serving_subject("n1", &both, true), serving_subject("n1", &both, false));
}

#[test]
fn certificate_request_back_off_doubles_from_two_to_32_seconds() {
    let seconds = |failures, jitter| backoff(failures, jitter).as_secs_f64();
    let all: Vec<f64> = (1..=8).map(|failures| seconds(failures, 0.0)).collect();
    assert_eq!(all, [2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0, 32.0]);
    assert!((seconds(3, 1.0) - 8.8).abs() < 1e-6 && seconds(6, 1.0) == 32.0);
    assert_eq!(seconds(u32::MAX, 0.5), 32.0);
}

#[test]
fn a_certificate_signing_request_has_signer_and_usages() {
    for (kind, signer, usage) in [
        (CertificateKind::Client, "kubernetes.io/kube-apiserver-client-kubelet", "client auth"),
        (CertificateKind::Serving, "kubernetes.io/kubelet-serving", "server auth"),
    ] {
        let spec = json!({"request": "cGVt", "signerName": signer, "usages": ["digital signature", usage]});
        let request = signing_request(kind, "csr-a", "cGVt");
        assert_eq!((&request["spec"], &request["metadata"]), (&spec, &json!({"name": "csr-a"})));
        assert_eq!(request["apiVersion"], "certificates.k8s.io/v1");
    }
}

#[test]
fn a_certificate_signing_request_is_pending_issued_or_refused() {
    let of = |conditions: Value, certificate: Value| {
        request_state(&json!({"status": {"conditions": conditions, "certificate": certificate}}))
    };
    let approved = json!([{"type": "Approved", "status": "True"}]);
    for (conditions, certificate, expected) in [
        (json!(null), json!(null), RequestState::Pending { approved: false }),
        (approved.clone(), json!(null), RequestState::Pending { approved: true }),
        (approved.clone(), json!(""), RequestState::Pending { approved: true }),
        (json!(null), json!("Yw=="), RequestState::Pending { approved: false }),
        (approved, json!("Yw=="), RequestState::Issued("Yw==".to_owned())),
        (
            json!([{"type": "Denied", "status": "True", "reason": "Wrong", "message": "not yours"}]),
            json!("Yw=="),
            RequestState::Refused("Denied: Wrong: not yours".to_owned()),
        ),
        (
            json!([{"type": "Approved", "status": "True"}, {"type": "Failed", "status": "True", "message": "no key"}]),
            json!(null),
            RequestState::Refused("Failed: no key".to_owned()),
        ),
    ] {
        assert_eq!(of(conditions.clone(), certificate), expected, "{conditions}");
    }
}

proptest! {
    /// Any certificate is rotated before it expires, and not before seven tenths of its lifetime.
    #[test]
    fn a_rotation_is_in_the_last_third_of_the_lifetime(from in 0_i64..1 << 40, length in 10_i64..1 << 32, part in 0.0..=1.0_f64) {
        let held = HeldCertificate { not_before: from, not_after: from + length, ..held() };
        let at = rotation(&held, part);
        prop_assert!(at < held.not_after && (at - from) as f64 >= 0.7 * length as f64 - 1.0, "{at}");
    }
}
