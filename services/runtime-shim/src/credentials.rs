//! Where credentials for registries come from (runtime-and-resources.md §6.3): the Secrets that a pod names, then the
//! node's own docker configuration, then the credential provider plugins.
//!
//! Credentials are in memory only while a pull needs them, those of plugins for as long as these allow, and in no log, event, error or file.

use std::env;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::pod_config::v1::GetObjectRequest;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_runtime_shim_core::keyring::{BadConfig, Credential, Form, Keyring, Origin};
use keelson_service_kit::PeerChannel;
use keelson_service_kit::status::{is_unanswered, reason};
use serde_json::Value;
use tonic::{Code, Request, Status};

use crate::clock::Clock;
use crate::credential_plugins::Plugins;

/// How long what was read of the node's configuration is used (runtime-and-resources.md §6.3).
const KEEP_NANOS: i64 = 300 * 1_000_000_000;
/// A configuration file that is larger is none.
const MOST_BYTES: u64 = 1 << 20;
/// How long pod-config may take to give a Secret.
const ASK_WITHIN: Duration = Duration::from_secs(10);

/// Finds credentials.
#[derive(Debug, Clone)]
pub struct Credentials {
    secrets: Secrets,
    node: Arc<NodeConfig>,
    plugins: Plugins,
    clock: Clock,
}

/// Who has the Secrets.
#[derive(Debug, Clone, Default)]
enum Secrets {
    /// Nobody.
    #[default]
    None,
    PodConfig(PeerChannel),
    #[cfg(test)]
    Set(Arc<Mutex<std::collections::BTreeMap<String, Result<Value, Status>>>>),
}

/// The docker configuration of the node.
#[derive(Debug, Default)]
struct NodeConfig {
    /// Folders in which it is looked for, in this order.
    folders: Vec<PathBuf>,
    read: Mutex<Option<(i64, Keyring)>>,
}

/// The credentials of a pod for one image.
#[derive(Debug, Default)]
pub struct Found {
    /// To be tried in this order.
    pub list: Vec<(Credential, Origin)>,
    /// Secrets that are not there or cannot be read.
    pub missing: Vec<String>,
}

/// Nobody knows whether a Secret is there.
#[derive(Debug, thiserror::Error)]
#[error("cannot read Secret {name:?} with credentials for the image: {}", .status.message())]
pub struct NobodyKnows {
    name: String,
    status: Status,
}

/// Why a Secret gives no credentials.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("there is none")]
    Absent,
    #[error("it cannot be read: {0}")]
    Unread(String),
    #[error("its type is {0:?}, not kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg")]
    OtherType(String),
    #[error("it has no key {0}")]
    NoKey(&'static str),
    #[error("its key {0} is not base64")]
    NotBase64(&'static str),
    #[error("its key {key} is no docker configuration")]
    Config { key: &'static str, source: BadConfig },
}

impl Credentials {
    /// Nobody has any.
    pub fn none() -> Self {
        let plugins = Plugins::default();
        Self { secrets: Secrets::None, node: Arc::default(), plugins, clock: Clock::System }
    }

    /// Secrets from pod-config; the node's configuration in the places where docker and the kubelet have it.
    pub fn new(pod_config: PeerChannel, root: PathBuf) -> Self {
        let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".docker"));
        let folders = [Some(root), env::current_dir().ok(), home, Some("/.docker".into())];
        let node = NodeConfig { folders: folders.into_iter().flatten().collect(), read: Mutex::default() };
        let secrets = Secrets::PodConfig(pod_config);
        Self { secrets, node: Arc::new(node), ..Self::none() }
    }

    /// And from plugins.
    #[must_use]
    pub(crate) fn with_plugins(self, plugins: Plugins) -> Self {
        Self { plugins, ..self }
    }

    /// The credentials of a pod that names these Secrets for `repository`: its own, then those of the node's
    /// configuration, then those of plugins. A plugin that has to be run takes its time.
    ///
    /// # Errors
    /// pod-config is away. A Secret that is not there is no error: it is named in the answer.
    pub async fn find(&self, pod: &PodRef, names: &[String], repository: &str) -> Result<Found, NobodyKnows> {
        let mut found = self.of_pod(pod, names, repository).await?;
        found.list.extend(self.of_node().await.lookup(repository));
        let pod: Arc<str> = format!("{}/{}", pod.namespace, pod.name).into();
        found.list.extend(self.plugins.find(repository, &pod).await);
        Ok(found)
    }

    /// As [`Self::find`], without the node's and those of plugins.
    ///
    /// # Errors
    /// As there.
    pub async fn of_pod(
        &self,
        pod: &PodRef,
        names: &[String],
        repository: &str,
    ) -> Result<Found, NobodyKnows> {
        let (mut keyring, mut found) = (Keyring::default(), Found::default());
        for name in names.iter().filter(|name| !name.is_empty()) {
            let secret = self.secret(&pod.namespace, name).await?;
            let Err(why) = secret.and_then(|secret| add_secret(&mut keyring, &secret, &pod.namespace, name))
            else {
                continue;
            };
            let error = keelson_service_kit::status::chain(&why);
            tracing::warn!(pod = pod.name, secret = name, error, "a Secret gives no credentials for images");
            if !matches!(why, Unusable::OtherType(_)) {
                found.missing.push(name.clone());
            }
        }
        found.list = keyring.lookup(repository);
        Ok(found)
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Result<Value, Unusable>, NobodyKnows> {
        let answer = match &self.secrets {
            Secrets::None => return Ok(Err(Unusable::Absent)),
            Secrets::PodConfig(channel) => {
                let mut request = Request::new(GetObjectRequest {
                    kind: "Secret".to_owned(),
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                });
                request.set_timeout(ASK_WITHIN);
                let mut client = PodConfigClient::new(channel.clone()).max_decoding_message_size(64 << 20);
                client.get_object(request).await.map(|answer| answer.into_inner().object_json)
            }
            #[cfg(test)]
            Secrets::Set(secrets) => {
                let found = secrets.lock().unwrap().get(&format!("{namespace}/{name}")).cloned();
                let found = found.unwrap_or_else(|| Err(Status::not_found("none")));
                found.map(|secret| secret.to_string().into_bytes())
            }
        };
        match answer {
            // The decoder's error may repeat a part of the text.
            Ok(json) => {
                Ok(serde_json::from_slice(&json).map_err(|_| Unusable::Unread("it is no JSON".into())))
            }
            Err(status) if status.code() == Code::NotFound => Ok(Err(Unusable::Absent)),
            Err(status)
                if is_unanswered(&status) || reason(&status).as_deref() == Some("SOURCES_NOT_READ") =>
            {
                Err(NobodyKnows { name: name.to_owned(), status })
            }
            Err(status) => Ok(Err(Unusable::Unread(status.message().to_owned()))),
        }
    }

    async fn of_node(&self) -> Keyring {
        let now = self.clock.read().boot_nanos;
        let lock = |node: &NodeConfig| node.read.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((at, keyring)) = lock(&self.node)
            && now - at < KEEP_NANOS
        {
            return keyring;
        }
        let node = Arc::clone(&self.node);
        let read = tokio::task::spawn_blocking(move || {
            let keyring = node.load();
            *node.read.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, keyring.clone()));
            keyring
        });
        read.await.unwrap_or_default()
    }
}

impl NodeConfig {
    /// The first configuration that there is: `config.json` in each folder, then `.dockercfg`.
    fn load(&self) -> Keyring {
        for (name, form) in [("config.json", Form::Json), (".dockercfg", Form::Legacy)] {
            for path in self.folders.iter().map(|folder| folder.join(name)) {
                let mut keyring = Keyring::default();
                match read_small(&path) {
                    Ok(text) => match keyring.add(&text, form, &Origin::Node) {
                        Ok(()) => return keyring,
                        Err(error) => {
                            tracing::warn!(path = %path.display(), %error, "this is no docker configuration");
                        }
                    },
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => tracing::warn!(path = %path.display(), %error, "cannot read"),
                }
            }
        }
        Keyring::default()
    }
}

fn read_small(path: &std::path::Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.len() > MOST_BYTES {
        return Err(io::Error::other("it is no regular file of at most 1 MiB"));
    }
    let mut text = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

fn add_secret(keyring: &mut Keyring, secret: &Value, namespace: &str, name: &str) -> Result<(), Unusable> {
    let (key, form) = match secret["type"].as_str().unwrap_or_default() {
        "kubernetes.io/dockerconfigjson" => (".dockerconfigjson", Form::Json),
        "kubernetes.io/dockercfg" => (".dockercfg", Form::Legacy),
        other => return Err(Unusable::OtherType(other.to_owned())),
    };
    // A manifest may have the text as it is, which goes before the other, as in the API.
    let text = match (secret["stringData"][key].as_str(), secret["data"][key].as_str()) {
        (Some(text), _) => text.as_bytes().to_vec(),
        (None, Some(text)) => keelson_kube_model::base64::decode(text).ok_or(Unusable::NotBase64(key))?,
        (None, None) => return Err(Unusable::NoKey(key)),
    };
    let origin = Origin::Secret {
        uid: secret["metadata"]["uid"].as_str().unwrap_or_default().to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    keyring.add(&text, form, &origin).map_err(|source| Unusable::Config { key, source })
}

#[cfg(test)]
pub(crate) mod testing {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    impl Credentials {
        /// Those of these Secrets and of these folders.
        pub(crate) fn of(
            secrets: &[(&str, Result<Value, Status>)],
            folders: &[PathBuf],
            clock: Clock,
        ) -> Self {
            let secrets: BTreeMap<_, _> =
                secrets.iter().map(|(name, secret)| ((*name).to_owned(), secret.clone())).collect();
            let node = NodeConfig { folders: folders.to_vec(), read: Mutex::default() };
            let secrets = Secrets::Set(Arc::new(Mutex::new(secrets)));
            Self { secrets, node: Arc::new(node), clock, ..Self::none() }
        }
    }

    /// A Secret with one entry.
    pub(crate) fn secret(host: &str, user: &str, password: &str) -> Value {
        let config = json!({"auths": {host: {"username": user, "password": password}}});
        json!({
            "type": "kubernetes.io/dockerconfigjson",
            "metadata": {"uid": format!("uid-{user}")},
            "data": {".dockerconfigjson": keelson_kube_model::base64::encode(config.to_string().as_bytes())},
        })
    }
}

#[cfg(test)]
mod tests {
    use keelson_service_kit::status::{PEER_UNAVAILABLE, error};
    use serde_json::json;

    use super::testing::secret;
    use super::*;

    const REPO: &str = "r.example/a";

    fn pod() -> PodRef {
        PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn users(found: &Found) -> Vec<&str> {
        found.list.iter().map(|(credential, _)| credential.username.as_str()).collect()
    }

    #[tokio::test]
    async fn a_pods_secrets_come_before_the_nodes_configuration_and_in_both_forms() {
        let dir = tempfile::tempdir().unwrap();
        let config = r#"{"auths": {"r.example": {"username": "node", "password": "p"}}}"#;
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let legacy = json!({
            "type": "kubernetes.io/dockercfg",
            "stringData": {".dockercfg": r#"{"r.example": {"username": "bob", "password": "p"}}"#},
        });
        let secrets = [("default/a", Ok(secret("r.example", "ann", "p"))), ("default/b", Ok(legacy))];
        let credentials = Credentials::of(&secrets, &[dir.path().to_owned()], Clock::System);
        let found = credentials.find(&pod(), &names(&["a", "", "b"]), REPO).await.unwrap();
        assert_eq!(users(&found), ["ann", "bob", "node"]);
        assert!(found.missing.is_empty());
        let origin = Origin::Secret { uid: "uid-ann".into(), namespace: "default".into(), name: "a".into() };
        assert_eq!(found.list[0].1, origin);
        let own = credentials.of_pod(&pod(), &names(&["b"]), REPO).await.unwrap();
        assert_eq!(users(&own), ["bob"]);
        assert!(users(&credentials.find(&pod(), &[], "other.example/a").await.unwrap()).is_empty());
    }

    #[tokio::test]
    async fn secrets_that_give_nothing_are_named_and_the_others_are_used() {
        let away = error(Code::Unavailable, "CONTROL_PLANE_AWAY", "the control plane does not answer");
        let opaque = json!({"type": "Opaque", "data": {}});
        let empty = json!({"type": "kubernetes.io/dockercfg"});
        let bad = json!({"type": "kubernetes.io/dockercfg", "data": {".dockercfg": "!"}});
        let text = json!({"type": "kubernetes.io/dockercfg", "stringData": {".dockercfg": "hunter2"}});
        let secrets = [
            ("default/good", Ok(secret("r.example", "ann", "p"))),
            ("default/unread", Err(away)),
            ("default/opaque", Ok(opaque)),
            ("default/empty", Ok(empty)),
            ("default/bad", Ok(bad)),
            ("default/text", Ok(text)),
        ];
        let credentials = Credentials::of(&secrets, &[], Clock::System);
        let asked = names(&["gone", "unread", "opaque", "empty", "bad", "text", "good"]);
        let found = credentials.find(&pod(), &asked, REPO).await.unwrap();
        assert_eq!(found.missing, ["gone", "unread", "empty", "bad", "text"]);
        assert_eq!(users(&found), ["ann"]);
    }

    #[tokio::test]
    async fn while_nobody_can_tell_whether_a_secret_is_there_nothing_is_pulled_without_it() {
        for reason in [PEER_UNAVAILABLE, "SOURCES_NOT_READ"] {
            let away = error(Code::Unavailable, reason, "pod-config is not reachable");
            let credentials = Credentials::of(&[("default/a", Err(away))], &[], Clock::System);
            let error = credentials.find(&pod(), &names(&["a"]), REPO).await.unwrap_err();
            assert!(error.to_string().contains("Secret \"a\""), "{error}");
            assert!(error.to_string().contains("pod-config is not reachable"), "{error}");
        }
    }

    #[tokio::test]
    async fn the_nodes_configuration_is_the_first_good_one_and_kept_for_five_minutes() {
        let (dir, clock) = (tempfile::tempdir().unwrap(), Clock::standing());
        let folders: Vec<PathBuf> = ["a", "b", "c"].iter().map(|name| dir.path().join(name)).collect();
        for folder in &folders {
            std::fs::create_dir(folder).unwrap();
        }
        let entry =
            |user: &str| format!("{{\"r.example\": {{\"username\": {user:?}, \"password\": \"p\"}}}}");
        std::fs::write(folders[0].join("config.json"), "hunter2").unwrap();
        std::fs::write(folders[0].join(".dockercfg"), entry("legacy")).unwrap();
        let credentials = Credentials::of(&[], &folders, clock.clone());
        let found = async || credentials.find(&pod(), &[], REPO).await.unwrap();
        assert_eq!(users(&found().await), ["legacy"]);
        std::fs::write(folders[2].join("config.json"), format!("{{\"auths\": {}}}", entry("new"))).unwrap();
        clock.pass(299, 0);
        assert_eq!(users(&found().await), ["legacy"]);
        clock.pass(1, 0);
        assert_eq!(users(&found().await), ["new"]);
    }

    #[test]
    fn a_huge_file_and_a_folder_are_no_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let huge = dir.path().join("huge");
        std::fs::write(&huge, vec![b' '; (1 << 20) + 1]).unwrap();
        for path in [huge.as_path(), dir.path()] {
            assert!(read_small(path).unwrap_err().to_string().contains("regular file"));
        }
    }
}
