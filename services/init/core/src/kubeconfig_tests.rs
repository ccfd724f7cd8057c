use super::*;

const PAIR: &str = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n\
                    -----BEGIN EC PRIVATE KEY-----\nYg==\n-----END EC PRIVATE KEY-----\n";
const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n";
const KEY: &str = "-----BEGIN EC PRIVATE KEY-----\nYg==\n-----END EC PRIVATE KEY-----\n";

fn files(path: &Path) -> Result<Vec<u8>, String> {
    match path.to_str() {
        Some("/etc/kubernetes/pki/ca.crt") => Ok(CERTIFICATE.into()),
        Some("/var/lib/kubelet/pki/kubelet-client-current.pem") => Ok(PAIR.into()),
        Some("/etc/kubernetes/token") => Ok(b"secret\n".to_vec()),
        _ => Err("No such file or directory (os error 2)".to_owned()),
    }
}

fn flat(file: Value) -> Result<Value, String> {
    let root = file.as_object().unwrap();
    let flat = flatten(root, Path::new("/etc/kubernetes"), &mut files).map_err(|error| error.to_string())?;
    assert_eq!(flat.exec, None);
    Ok(flat.document)
}

/// A kubeconfig as kubeadm writes it.
fn kubeadm() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "default-context", "preferences": {},
        "clusters": [
            {"name": "other", "cluster": {"server": "https://other"}},
            {"name": "default-cluster", "cluster": {"server": "https://10.0.0.1:6443", "certificate-authority": "pki/ca.crt"}},
        ],
        "contexts": [{"name": "default-context", "context": {"cluster": "default-cluster", "namespace": "default", "user": "default-auth"}}],
        "users": [
            {"name": "other", "user": {"token": "not yours"}},
            {"name": "default-auth", "user": {
                "client-certificate": "/var/lib/kubelet/pki/kubelet-client-current.pem",
                "client-key": "/var/lib/kubelet/pki/kubelet-client-current.pem",
            }},
        ],
    })
}

#[test]
fn kubeadm_kubeconfig_is_flattened_with_only_its_current_context() {
    let flat = flat(kubeadm()).unwrap();
    assert_eq!(
        flat["clusters"],
        json!([{"name": "keelson", "cluster": {
            "server": "https://10.0.0.1:6443", "certificate-authority-data": base64::encode(CERTIFICATE.as_ref())}}])
    );
    assert_eq!(
        flat["users"],
        json!([{"name": "keelson", "user": {
            "client-certificate-data": base64::encode(CERTIFICATE.as_ref()), "client-key-data": base64::encode(KEY.as_ref())}}])
    );
    assert!(!flat.to_string().contains("not yours") && !flat.to_string().contains("other"));
}

#[test]
fn inline_kubeconfig_data_overrides_files_and_token_file_overrides_token() {
    let mut file = kubeadm();
    file["clusters"][1]["cluster"]["certificate-authority-data"] = base64::encode("no PEM".as_ref()).into();
    file["users"][1]["user"] = json!({"tokenFile": "token", "token": "older"});
    let flat = flat(file).unwrap();
    assert_eq!(
        flat["clusters"][0]["cluster"]["certificate-authority-data"],
        base64::encode("no PEM".as_ref())
    );
    assert_eq!(flat["users"][0]["user"], json!({"token": "secret"}));
}

#[test]
fn a_context_without_a_user_is_anonymous() {
    let mut file = kubeadm();
    file["contexts"][0]["context"].as_object_mut().unwrap().remove("user");
    assert_eq!(flat(file).unwrap()["users"][0]["user"], json!({}));
}

#[test]
fn kubeconfig_errors_name_their_field() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 10] = [
        (|f| f["current-context"] = Value::Null, "current-context: is missing"),
        (|f| f["current-context"] = "x".into(), "contexts: there is no entry named \"x\""),
        (|f| f["contexts"][0]["context"]["cluster"] = "x".into(), "clusters: there is no entry named \"x\""),
        (|f| f["contexts"][0]["context"]["user"] = "x".into(), "users: there is no entry named \"x\""),
        (|f| f["clusters"][1]["cluster"]["server"] = "".into(), "clusters[1].cluster.server: is missing"),
        (|f| f["clusters"][1] = json!({"name": "default-cluster"}), "clusters[1].cluster: is missing"),
        (
            |f| f["clusters"][1]["cluster"]["certificate-authority"] = "gone.crt".into(),
            "clusters[1].cluster.certificate-authority: cannot read /etc/kubernetes/gone.crt: No such file",
        ),
        (
            |f| f["users"][1]["user"]["client-key-data"] = "%".into(),
            "users[1].user.client-key-data: is not base64",
        ),
        (
            |f| f["users"][1]["user"]["exec"] = json!({"command": "aws"}),
            "users[1].user.client-certificate: cannot be combined with exec; keep one of the two",
        ),
        (
            |f| f["users"][1]["user"]["auth-provider"] = json!({"name": "gcp"}),
            "users[1].user.auth-provider: is not supported; use exec, a client certificate or a token",
        ),
    ];
    for (change, expected) in cases {
        let mut file = kubeadm();
        change(&mut file);
        let error = flat(file).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn a_written_kubeconfig_has_the_server_of_the_bootstrap_kubeconfig() {
    let pem = Path::new("/var/lib/kubelet/pki/kubelet-client-current.pem");
    let written = |file: &Value| {
        let folder = Path::new("/etc/kubernetes");
        for_certificate(file.as_object().unwrap(), folder, pem).map_err(|error| error.to_string())
    };
    let expected = r#"apiVersion: v1
kind: Config
clusters:
- name: default-cluster
  cluster:
    server: "https://10.0.0.1:6443"
    certificate-authority: "/etc/kubernetes/pki/ca.crt"
contexts:
- name: default-context
  context:
    cluster: default-cluster
    namespace: default
    user: default-auth
current-context: default-context
users:
- name: default-auth
  user:
    client-certificate: "/var/lib/kubelet/pki/kubelet-client-current.pem"
    client-key: "/var/lib/kubelet/pki/kubelet-client-current.pem"
"#;
    let mut file = kubeadm();
    assert_eq!(written(&file).unwrap(), expected);
    file["clusters"][1]["cluster"] = json!({"server": "https://h", "certificate-authority-data": "YQ==",
        "insecure-skip-tls-verify": true, "tls-server-name": ""});
    let text = written(&file).unwrap();
    for line in ["    certificate-authority-data: \"YQ==\"", "    insecure-skip-tls-verify: true"] {
        assert!(text.lines().any(|found| found == line), "{text}");
    }
    assert!(!text.contains("tls-server-name"), "{text}");
    file["current-context"] = "gone".into();
    assert!(written(&file).unwrap_err().starts_with("contexts: "));
}

#[test]
fn set_client_pair_replaces_all_other_credentials() {
    let mut flat = flat(kubeadm()).unwrap();
    assert_eq!(client_certificates(&flat).unwrap(), CERTIFICATE.as_bytes());
    set_client_pair(&mut flat, b"new", b"key");
    assert_eq!(client_certificates(&flat).unwrap(), b"new");
    flat["users"][0]["user"] = json!({"token": "t"});
    assert_eq!(client_certificates(&flat), None);
    set_client_pair(&mut flat, b"new", b"key");
    assert_eq!(flat["users"][0]["user"].get("token"), None);
}
