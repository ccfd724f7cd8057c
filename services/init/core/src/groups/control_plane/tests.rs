use keelson_config::{ControlPlane, Etcd, Kubernetes, ObjectsBy, Taint};
use serde_json::{Value, json};

use crate::inputs::Flags;
use crate::testing::{assert_refused, errors_of, etcd, host, keelson, kubelet, run};

fn lease(fields: Value) -> (Etcd, bool) {
    let own = keelson(etcd(json!({"endpoints": ["http://h:1"]})));
    let config = run(&Flags::default(), Some(&kubelet(fields)), Some(&own), &host()).unwrap().config;
    let is_set = config.provenance.contains_key("controlPlane.etcd.leaseSeconds");
    match config.control_plane {
        ControlPlane::Etcd(etcd) => (etcd, is_set),
        _ => panic!("the control plane is etcd"),
    }
}

#[test]
fn node_lease_duration_is_applied_and_defaults_to_forty_seconds() {
    for (fields, seconds, is_set) in [
        (json!({}), 40, false),
        (json!({"nodeLeaseDurationSeconds": 0}), 40, false),
        (json!({"nodeLeaseDurationSeconds": 1}), 1, true),
        (json!({"nodeLeaseDurationSeconds": 10}), 10, true),
        (json!({"nodeLeaseDurationSeconds": i32::MAX}), 2_147_483_647, true),
    ] {
        let (etcd, named) = lease(fields.clone());
        assert_eq!((etcd.lease_seconds, named), (seconds, is_set), "{fields}");
    }
    for wrong in [json!(-1), json!("40s"), json!(1_u64 << 31)] {
        let errors = errors_of(json!({"nodeLeaseDurationSeconds": wrong}));
        assert!(errors.len() == 1 && errors[0].contains("nodeLeaseDurationSeconds"), "{errors:?}");
    }
}

#[test]
fn without_a_control_plane_the_lease_duration_is_ignored_silently() {
    let file = kubelet(json!({"nodeLeaseDurationSeconds": 10}));
    let resolved = run(&Flags::default(), Some(&file), None, &host()).unwrap();
    assert_eq!(resolved.config.control_plane, ControlPlane::None);
    assert!(!resolved.notes.iter().any(|note| note.text.contains("nodeLease")), "{:?}", resolved.notes);
}

fn with_flags(flags: &[(&'static str, &str)], own: Value) -> Result<keelson_config::Config, Vec<String>> {
    let mut others = Flags::default();
    others.others.extend(flags.iter().map(|(name, text)| (*name, (*text).to_owned())));
    let kubelet = kubelet(json!({
        "nodeLeaseDurationSeconds": 20, "registerNode": false, "providerID": "cloud://7",
        "configMapAndSecretChangeDetectionStrategy": "Cache",
        "registerWithTaints": [{"key": "example.com/a", "effect": "NoExecute"}],
    }));
    run(&others, Some(&kubelet), Some(&keelson(own)), &host()).map(|resolved| resolved.config)
}

#[test]
fn a_kubeconfig_makes_the_kubernetes_api_the_control_plane() {
    let bootstrap = ("bootstrap-kubeconfig", "/etc/kubernetes/bootstrap-kubelet.conf");
    for (flags, own) in [
        (vec![("kubeconfig", "/etc/kubernetes/kubelet.conf"), bootstrap], json!({})),
        (
            vec![("kubeconfig", "/etc/kubernetes/kubelet.conf"), ("cloud-provider", "external")],
            json!({"controlPlane": "kubernetes"}),
        ),
    ] {
        let config = with_flags(&flags, own).unwrap();
        let mut expected = Kubernetes::of("/etc/kubernetes/kubelet.conf".into());
        expected.lease_seconds = 20;
        expected.register_node = false;
        expected.objects_by = ObjectsBy::Cache;
        expected.provider_id = Some("cloud://7".to_owned());
        expected.certificates.bootstrap_kubeconfig =
            flags.contains(&bootstrap).then(|| "/etc/kubernetes/bootstrap-kubelet.conf".into());
        let taint = |key: &str, value: &str, effect: &str| Taint {
            key: key.to_owned(),
            value: value.to_owned(),
            effect: effect.to_owned(),
        };
        expected.taints.push(taint("example.com/a", "", "NoExecute"));
        if flags.contains(&("cloud-provider", "external")) {
            let key = "node.cloudprovider.kubernetes.io/uninitialized";
            expected.taints.push(taint(key, "true", "NoSchedule"));
        }
        assert_eq!(config.control_plane, ControlPlane::Kubernetes(expected));
        assert_eq!(config.provenance["controlPlane.kubernetes.kubeconfig"], "--kubeconfig");
    }
    let relative = with_flags(&[("kubeconfig", "k.conf")], json!({})).unwrap().control_plane;
    assert!(
        matches!(relative, ControlPlane::Kubernetes(api) if api.kubeconfig == std::path::Path::new("/srv/k.conf"))
    );
    let none = with_flags(&[("kubeconfig", "/k")], json!({"controlPlane": "none"})).unwrap();
    assert_eq!(none.control_plane, ControlPlane::None, "the KeelsonConfiguration wins");
}

#[test]
fn conflicting_or_incomplete_control_plane_settings_are_refused() {
    let two = json!({"controlPlane": "etcd", "etcd": {"endpoints": ["http://h:1"]}});
    for (flags, own, expected) in [
        (vec![("kubeconfig", "/k")], two, "--kubeconfig"),
        (
            vec![],
            json!({"controlPlane": "kubernetes"}),
            "--kubeconfig, which tells how to reach the API server, is missing",
        ),
        (vec![("bootstrap-kubeconfig", "/b")], json!({}), "this flag works only with --kubeconfig"),
    ] {
        let errors = with_flags(&flags, own).unwrap_err();
        assert!(errors.len() == 1 && errors[0].contains(expected), "{errors:?}");
    }
}

#[test]
fn bootstrap_kubeconfig_cert_dir_and_certificate_rotation_are_applied() {
    let with = |fields: Value, secured: bool| {
        let mut flags = Flags::default();
        for (name, text) in [("kubeconfig", "/k"), ("bootstrap-kubeconfig", "b.conf"), ("cert-dir", "pki")] {
            flags.others.insert(name, text.to_owned());
        }
        let mut fields = fields;
        if secured {
            fields["authentication"] = json!({"x509": {"clientCAFile": "/ca"}});
        }
        let resolved = run(&flags, Some(&kubelet(fields)), None, &host()).unwrap();
        let ControlPlane::Kubernetes(api) = resolved.config.control_plane else {
            panic!("the control plane is an API server")
        };
        (api.certificates, resolved.config.api.tls, resolved.notes)
    };
    let (own, tls, _) = with(json!({"rotateCertificates": true, "serverTLSBootstrap": true}), true);
    assert_eq!(own.bootstrap_kubeconfig.as_deref(), Some(std::path::Path::new("/srv/b.conf")));
    assert_eq!(own.dir, std::path::Path::new("/srv/pki"));
    assert!(own.rotate && own.serving && tls.unwrap().asked_for);
    let (own, tls, _) = with(json!({"rotateCertificates": false}), true);
    assert!(!own.rotate && !own.serving && !tls.unwrap().asked_for);
    let (own, tls, notes) = with(json!({"serverTLSBootstrap": true}), false);
    let tls = tls.unwrap();
    assert!(own.serving && tls.asked_for && tls.client_ca_file.is_none(), "{notes:?}");
    assert_eq!(tls.cert_dir, std::path::Path::new("/srv/pki"));
    let alone = kubelet(json!({"rotateCertificates": true}));
    let notes = run(&Flags::default(), Some(&alone), None, &host()).unwrap().notes;
    assert!(notes.iter().any(|note| note.text.contains("rotateCertificates")), "{notes:?}");
}

#[test]
fn etcd_endpoints_and_credentials_are_applied() {
    let fields = json!({
        "endpoints": ["https://10.0.0.1:2379", "https://10.0.0.2:2379"],
        "caFile": "pki/ca.crt", "certFile": "/pki/n.crt", "keyFile": "/pki/n.key",
        "user": "edge-1", "passwordFile": "/pki/password",
    });
    let file = keelson(etcd(fields));
    let config = run(&Flags::default(), None, Some(&file), &host()).unwrap().config;
    let folder = std::path::Path::new(&file.folder);
    let expected = Etcd {
        ca_file: Some(folder.join("pki/ca.crt")),
        cert_file: Some("/pki/n.crt".into()),
        key_file: Some("/pki/n.key".into()),
        user: Some("edge-1".into()),
        password_file: Some("/pki/password".into()),
        ..Etcd::plain(vec!["https://10.0.0.1:2379".into(), "https://10.0.0.2:2379".into()])
    };
    assert_eq!(config.control_plane, ControlPlane::Etcd(expected));
    assert!(config.provenance.contains_key("controlPlane.etcd.keyFile"), "{:?}", config.provenance);
    let named_alone = keelson(json!({"etcd": {"endpoints": ["http://h:1"]}}));
    let config = run(&Flags::default(), None, Some(&named_alone), &host()).unwrap().config;
    assert_eq!(config.control_plane, ControlPlane::None, "controlPlane is not etcd");
}

#[test]
fn invalid_api_server_fields_are_refused_with_a_remedy() {
    assert_refused(&[
        (
            json!({"configMapAndSecretChangeDetectionStrategy": "watch"}),
            "configMapAndSecretChangeDetectionStrategy = \"watch\"",
            "one of: Get, Cache, Watch",
        ),
        (json!({"kubeAPIBurst": -1}), "kubeAPIBurst = -1", "from 0"),
        (json!({"kubeAPIQPS": -1}), "kubeAPIQPS = -1", "from 0"),
    ]);
}
