//! Members with authentication: users with passwords, and certificates.

use std::fs;
use std::path::{Path, PathBuf};

use etcd_client::{Client, Permission};
use keelson_config::Etcd as Settings;
use keelson_testkit::{EtcdCluster, EtcdTls, Scratch};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use crate::keys::NODES;
use crate::{Etcd, EtcdError, Expect, Follower, NodeKeys, Operation, Range, WatchEvent, Written, connect};

fn put(key: &str) -> Operation {
    Operation::Put { key: key.into(), value: b"{}".to_vec(), lease: 0 }
}

async fn write(etcd: &Etcd, key: &str) -> Result<Written, EtcdError> {
    etcd.write(&[(key.into(), Expect::Absent)], &[put(key)]).await
}

/// Creates a role for the keys of one node, and a user of the same name with it.
async fn add_node(client: &mut Client, node: &str, password: Option<&str>) {
    client.role_add(node).await.unwrap();
    let keys = Permission::read_write(NodeKeys::new(node).prefix()).with_prefix();
    client.role_grant_permission(node, keys).await.unwrap();
    add_user(client, node, password).await;
    client.user_grant_role(node, node).await.unwrap();
}

async fn add_user(client: &mut Client, name: &str, password: Option<&str>) {
    let options = etcd_client::UserAddOptions::new();
    let options = if password.is_none() { options.with_no_pwd() } else { options };
    client.user_add(name, password.unwrap_or_default(), Some(options)).await.unwrap();
}

async fn enable(client: &mut Client, root_password: Option<&str>) {
    add_user(client, "root", root_password).await;
    client.user_grant_role("root", "root").await.unwrap();
    client.auth_enable().await.unwrap();
}

/// Checks that `etcd` is authenticated as the node `n1`: it can access its own keys and not those of `n2`.
async fn is_confined_to_its_own_keys(etcd: &Etcd) {
    let (own, other) = (NodeKeys::new("n1"), NodeKeys::new("n2"));
    assert!(matches!(write(etcd, &own.node()).await.unwrap(), Written::Done(_)));
    let lease = etcd.grant(60).await.unwrap();
    assert!(etcd.keep_alive(lease).await.unwrap());
    let mut follower = Follower::new(etcd.clone(), own.desired());
    assert!(matches!(follower.next().await, WatchEvent::Listed(_)));
    assert!(matches!(write(etcd, &own.pod("default", "web")).await.unwrap(), Written::Done(_)));
    let listed = async {
        loop {
            if let WatchEvent::Changed(changes) = follower.next().await {
                return changes.len();
            }
        }
    };
    assert_eq!(tokio::time::timeout(std::time::Duration::from_secs(20), listed).await.unwrap(), 1);

    let secret = other.object("Secret", "default", "db");
    let refused = |result: Result<(), EtcdError>| {
        let error = result.unwrap_err();
        assert!(matches!(error, EtcdError::Refused { .. }), "{error}");
        assert!(error.to_string().contains("permission denied"), "{error}");
    };
    refused(etcd.get(&secret).await.map(drop));
    refused(etcd.list(&other.desired()).await.map(drop));
    refused(etcd.list(&Range::prefix(NODES)).await.map(drop));
    refused(write(etcd, &other.pod("default", "web")).await.map(drop));
    let mut follower = Follower::new(etcd.clone(), other.desired());
    assert!(matches!(follower.next().await, WatchEvent::Lost(EtcdError::Refused { .. })));
}

#[tokio::test]
async fn node_user_can_only_access_its_own_keys() {
    let scratch = Scratch::new().unwrap();
    let cluster = EtcdCluster::start(&scratch.path().join("etcd"), 1).unwrap();
    let mut admin = Client::connect(cluster.endpoints(), None).await.unwrap();
    add_node(&mut admin, "n1", Some("secret-1")).await;
    add_node(&mut admin, "n2", Some("secret-2")).await;
    enable(&mut admin, Some("r")).await;

    let password = scratch.path().join("password");
    fs::write(&password, "secret-1\n").unwrap();
    let settings = Settings {
        user: Some("n1".into()),
        password_file: Some(password.clone()),
        ..Settings::plain(cluster.endpoints())
    };
    is_confined_to_its_own_keys(&Etcd::new(settings.clone())).await;

    fs::write(&password, "guess").unwrap();
    let wrong = Etcd::new(settings);
    let error = wrong.get(&NodeKeys::new("n1").node()).await.unwrap_err();
    assert!(error.to_string().starts_with("etcd refuses the user: "), "{error}");
    // The file is read again for the next connection.
    fs::write(&password, "secret-1").unwrap();
    assert!(wrong.get(&NodeKeys::new("n1").node()).await.unwrap().is_some());
    let nobody = Etcd::new(Settings::plain(cluster.endpoints()));
    assert!(matches!(nobody.get("/x").await.unwrap_err(), EtcdError::Refused { .. }));
}

/// The node `n1` of a cluster with password authentication, with its password in `file`, and a client that may change users.
/// The node has written its own key, so that its connection is open.
async fn node_with_password(cluster: &EtcdCluster, file: &Path, password: &str) -> (Etcd, Client) {
    let mut admin = Client::connect(cluster.endpoints(), None).await.unwrap();
    add_node(&mut admin, "n1", Some(password)).await;
    enable(&mut admin, Some("r")).await;
    let as_root = etcd_client::ConnectOptions::new().with_user("root", "r");
    let admin = Client::connect(cluster.endpoints(), Some(as_root)).await.unwrap();
    fs::write(file, password).unwrap();
    let etcd = Etcd::new(Settings {
        user: Some("n1".into()),
        password_file: Some(file.to_owned()),
        ..Settings::plain(cluster.endpoints())
    });
    assert!(matches!(write(&etcd, &NodeKeys::new("n1").node()).await.unwrap(), Written::Done(_)));
    (etcd, admin)
}

#[tokio::test]
async fn auth_token_is_renewed_after_users_change() {
    let scratch = Scratch::new().unwrap();
    let secret = scratch.path().join("secret");
    fs::write(&secret, "a secret that the members share").unwrap();
    let token = format!("jwt,pub-key={0},priv-key={0},sign-method=HS256", secret.display());
    let dir = scratch.path().join("etcd");
    let cluster = EtcdCluster::start_with_arguments(&dir, 1, &["--auth-token", &token]).unwrap();
    let password = scratch.path().join("password");
    let (etcd, mut admin) = Box::pin(node_with_password(&cluster, &password, "secret-1")).await;
    let key = NodeKeys::new("n1").node();
    // Any user will do: etcd has one revision for all users and roles.
    add_user(&mut admin, "n2", Some("secret-2")).await;
    assert!(etcd.get(&key).await.unwrap().is_some());
}

#[tokio::test]
async fn changed_password_is_read_again_from_its_file() {
    let scratch = Scratch::new().unwrap();
    let cluster = EtcdCluster::start(&scratch.path().join("etcd"), 1).unwrap();
    let password = scratch.path().join("password");
    let (etcd, mut admin) = Box::pin(node_with_password(&cluster, &password, "before")).await;
    let key = NodeKeys::new("n1").node();

    admin.user_change_password("n1", "after").await.unwrap();
    let error = etcd.get(&key).await.unwrap_err();
    assert!(matches!(error, EtcdError::Refused { .. }), "{error}");
    fs::write(&password, "after").unwrap();
    assert!(etcd.get(&key).await.unwrap().is_some());
}

/// A certificate authority and its certificates, as files.
struct Pki {
    dir: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Pki {
    fn new(dir: &Path, name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let own = Self { dir: dir.join(name), issuer };
        fs::create_dir_all(&own.dir).unwrap();
        fs::write(own.ca(), own.issuer.pem()).unwrap();
        own
    }

    fn ca(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// Certificate and key of `name` at 127.0.0.1.
    fn sign(&self, name: &str) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = (self.dir.join(format!("{name}.crt")), self.dir.join(format!("{name}.key")));
        fs::write(&files.0, certificate.pem()).unwrap();
        fs::write(&files.1, key.serialize_pem()).unwrap();
        files
    }
}

#[tokio::test]
async fn mutual_tls_authenticates_both_sides_and_the_certificate_is_the_user() {
    let scratch = Scratch::new().unwrap();
    let pki = Pki::new(scratch.path(), "ours");
    let (cert, key) = pki.sign("etcd");
    let tls = EtcdTls { ca: pki.ca(), cert, key };
    let cluster = EtcdCluster::start_with_tls(&scratch.path().join("etcd"), 1, tls).unwrap();
    let as_user = |name: &str| {
        let (cert, key) = pki.sign(name);
        Settings {
            ca_file: Some(pki.ca()),
            cert_file: Some(cert),
            key_file: Some(key),
            ..Settings::plain(cluster.endpoints())
        }
    };
    let mut admin = connect::client(&as_user("root"), &cluster.endpoints()[0]).await.unwrap();
    add_node(&mut admin, "n1", None).await;
    add_node(&mut admin, "n2", None).await;
    enable(&mut admin, None).await;
    is_confined_to_its_own_keys(&Etcd::new(as_user("n1"))).await;

    let stranger = Pki::new(scratch.path(), "others");
    let believed = Settings { ca_file: Some(stranger.ca()), ..as_user("n1") };
    let error = Etcd::new(believed).get("/x").await.unwrap_err();
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    let nameless = Settings { cert_file: None, key_file: None, ..as_user("n1") };
    let error = Etcd::new(nameless).get("/x").await.unwrap_err();
    assert!(error.is_transient(), "{error}");
}
