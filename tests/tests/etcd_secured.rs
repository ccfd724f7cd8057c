//! Nodes with an etcd that authenticates its clients: users with passwords, and mutual TLS.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use etcd_client::{Client, Permission};
use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, EtcdCluster, EtcdTls, Scratch, eventually};
use keelson_tests::{LIMIT, running, sleeper};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use serde_json::json;

/// Whether `keelson` succeeded, and both outputs.
async fn run_keelson(agent: &Agent, args: &[&str]) -> (bool, String) {
    let output = agent.keelson(args).await.unwrap();
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

#[tokio::test]
async fn services_reach_their_etcd_keys_with_a_password_only_root_can_read() {
    let scratch = Scratch::new().unwrap();
    let cluster = EtcdCluster::start(&scratch.path().join("e"), 1).unwrap();
    let node = scratch.path().file_name().unwrap().to_str().unwrap().to_owned();
    let mut admin = Client::connect(cluster.endpoints(), None).await.unwrap();
    for (name, role) in [("root", "root"), (&*node, &*node)] {
        if role != "root" {
            admin.role_add(role).await.unwrap();
            let keys = Permission::read_write(format!("/keelson/v1/nodes/{node}/")).with_prefix();
            admin.role_grant_permission(role, keys).await.unwrap();
        }
        admin.user_add(name, "hunter2", None).await.unwrap();
        admin.user_grant_role(name, role).await.unwrap();
    }
    admin.auth_enable().await.unwrap();
    let password = scratch.path().join("password");
    std::fs::write(&password, "hunter2\n").unwrap();
    std::fs::set_permissions(&password, std::fs::Permissions::from_mode(0o600)).unwrap();
    let settings = json!({"endpoints": cluster.endpoints(), "user": node, "passwordFile": password});
    let agent =
        Agent::builder(&scratch.path().join("n")).node_name(&node).etcd(settings).start().await.unwrap();

    let manifest = scratch.path().join("web.yaml");
    std::fs::write(&manifest, sleeper("web")).unwrap();
    let endpoints = cluster.endpoints().join(",");
    let password = password.to_str().unwrap();
    let who = ["--etcd", &endpoints, "--etcd-user", &node, "--node", &node, "--etcd-password-file", password];
    let (succeeded, output) =
        run_keelson(&agent, &[&["apply", "-f", manifest.to_str().unwrap()], &who[..]].concat()).await;
    assert!(succeeded, "{output}");
    eventually(LIMIT, "etcd has the pod as Running", async || {
        run_keelson(&agent, &[&["get", "pods"], &who[..]].concat()).await.1.contains("Running")
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let (succeeded, output) = run_keelson(&agent, &["get", "pods", "--etcd", &endpoints]).await;
    assert!(!succeeded && output.contains("etcd refuses") && output.contains("--etcd-user"), "{output}");
    agent.end().unwrap();
}

/// A CA and its certificates, as files.
struct Authority {
    folder: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new(folder: &Path) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "of the fleet");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("ca.crt"), issuer.pem()).unwrap();
        Self { folder: folder.to_owned(), issuer }
    }

    fn ca(&self) -> PathBuf {
        self.folder.join("ca.crt")
    }

    /// Certificate and key of `name` for 127.0.0.1; only the owner may read the key.
    fn sign(&self, name: &str) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let (cert, key_file) =
            (self.folder.join(format!("{name}.crt")), self.folder.join(format!("{name}.key")));
        std::fs::write(&cert, params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
        (cert, key_file)
    }
}

#[tokio::test]
async fn an_etcd_pod_runs_is_reported_and_is_deleted_over_mutual_tls() {
    let scratch = Scratch::new().unwrap();
    let authority = Authority::new(&scratch.path().join("pki"));
    let (cert, key) = authority.sign("member");
    let tls = EtcdTls { ca: authority.ca(), cert, key };
    let cluster = EtcdCluster::start_with_tls(&scratch.path().join("e"), 1, tls).unwrap();
    let node = scratch.path().file_name().unwrap().to_str().unwrap().to_owned();
    let (cert, key) = authority.sign("node");
    let settings = json!({
        "endpoints": cluster.endpoints(), "caFile": authority.ca(), "certFile": cert, "keyFile": key,
    });
    let agent =
        Agent::builder(&scratch.path().join("n")).node_name(&node).etcd(settings).start().await.unwrap();
    let endpoints = cluster.endpoints().join(",");
    let (ca, (cert, key)) = (authority.ca(), authority.sign("operator"));
    let [ca, cert, key] = [&ca, &cert, &key].map(|path| path.to_str().unwrap());
    let anybody = ["--etcd", &endpoints, "--node", &node, "--etcd-ca", ca];
    let operator = [&anybody[..], &["--etcd-cert", cert, "--etcd-key", key]].concat();

    let manifest = scratch.path().join("web.yaml");
    std::fs::write(&manifest, sleeper("web")).unwrap();
    let (succeeded, output) =
        run_keelson(&agent, &[&["apply", "-f", manifest.to_str().unwrap()], &operator[..]].concat()).await;
    assert!(succeeded, "{output}");
    let until_running = async || {
        eventually(LIMIT, "etcd has the pod as Running", async || {
            run_keelson(&agent, &[&["get", "pods"], &operator[..]].concat()).await.1.contains("Running")
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    };
    until_running().await;
    let before = running(&agent).await.unwrap();
    assert_eq!(before.len(), 1);
    let (succeeded, output) = run_keelson(&agent, &[&["get", "pods"], &anybody[..]].concat()).await;
    assert!(!succeeded && output.contains(&cluster.endpoints()[0]), "without a certificate: {output}");

    // A new key pair; the services have to reconnect with it.
    authority.sign("node");
    for service in [ServiceName::PodConfig, ServiceName::NodeStatus] {
        let process = agent.service(service).unwrap();
        assert!(process.signal(Signal::KILL));
        let back = async || agent.service(service).is_some_and(|now| now != process);
        eventually(LIMIT, format!("{service} is back"), back).await.unwrap();
    }
    until_running().await;
    assert_eq!(running(&agent).await.unwrap(), before);
    let (succeeded, output) = run_keelson(&agent, &[&["delete", "pod", "web"], &operator[..]].concat()).await;
    assert!(succeeded, "{output}");
    eventually(LIMIT, "the pod is gone", async || running(&agent).await.unwrap().is_empty())
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}
