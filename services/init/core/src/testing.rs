//! Documents, hosts and shortcuts for tests.

use keelson_config::Config;
use serde_json::{Value, json};

use crate::document::Document;
use crate::flags::FieldFlag;
use crate::inputs::{Flags, Host, Inputs};
use crate::resolve::{Resolved, resolve};

pub(crate) fn host() -> Host {
    Host {
        hostname: "Edge-1".into(),
        exe_dir: "/opt/keelson/bin".into(),
        cwd: "/srv".into(),
        memory_bytes: 8 << 30,
        nodefs_bytes: 100 << 30,
        ..Host::default()
    }
}

pub(crate) fn document(file: &str, version: &str, kind: &str, fields: Value) -> Document {
    let mut root = fields.as_object().unwrap().clone();
    root.insert("apiVersion".into(), version.into());
    root.insert("kind".into(), kind.into());
    let lines = root.keys().zip(3..).map(|(key, line)| (key.clone(), line)).collect();
    Document { file: file.into(), folder: "/etc/k".into(), root, lines, ..Document::default() }
}

pub(crate) fn kubelet(fields: Value) -> Document {
    document("kubelet.yaml", "kubelet.config.k8s.io/v1beta1", "KubeletConfiguration", fields)
}

pub(crate) fn keelson(fields: Value) -> Document {
    document("keelson.yaml", "keelson/v1", "KeelsonConfiguration", fields)
}

pub(crate) fn run(
    flags: &Flags,
    kubelet: Option<&Document>,
    keelson: Option<&Document>,
    host: &Host,
) -> Result<Resolved, Vec<String>> {
    resolve(Inputs { flags, kubelet, drop_ins: &[], keelson, host })
        .map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

/// The flags for fields of the KubeletConfiguration on a command line.
pub(crate) fn fields(arguments: &[&str]) -> Vec<FieldFlag> {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    crate::flags::parse(&arguments, "/srv").unwrap().fields
}

pub(crate) fn with_kubelet(fields: Value) -> Config {
    run(&Flags::default(), Some(&kubelet(fields)), None, &host()).unwrap().config
}

pub(crate) fn with_keelson(fields: Value) -> Config {
    run(&Flags::default(), None, Some(&keelson(fields)), &host()).unwrap().config
}

pub(crate) fn errors_of(fields: Value) -> Vec<String> {
    run(&Flags::default(), Some(&kubelet(fields)), None, &host()).unwrap_err()
}

/// The fields of a KeelsonConfiguration that choose etcd.
pub(crate) fn etcd(fields: Value) -> Value {
    json!({"controlPlane": "etcd", "etcd": fields})
}

/// Checks that each of these fields alone causes one error; it has the part of the message with the field and value, and that
/// with the remedy.
pub(crate) fn assert_refused(cases: &[(Value, &str, &str)]) {
    for (fields, what, remedy) in cases {
        let errors = errors_of(fields.clone());
        assert_eq!(errors.len(), 1, "{fields}: {errors:#?}");
        let error = &errors[0];
        assert!(error.starts_with("invalid configuration: "), "{error}");
        assert!(error.contains(what), "{error} lacks {what}");
        assert!(error.contains(remedy), "{error} lacks {remedy}");
    }
}
