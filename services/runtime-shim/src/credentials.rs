//! Sources of credentials for registries (runtime-and-resources.md §6.3): the pod's Secrets, then the node's docker
//! configuration, then the credential provider plugins.
//!
//! Credentials are in memory only while a pull needs them; those of plugins for as long as the plugins allow. They are
//! in no log, event, error or file.

use std::env;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::pod_config::v1::GetObjectRequest;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_runtime_shim_core::keyring::{ConfigFormat, Credential, DockerConfigError, Keyring, Origin};
use keelson_service_kit::PeerChannel;
use keelson_service_kit::status::{is_unanswered, reason};
use serde_json::Value;
use tonic::{Code, Request, Status};

use crate::clock::Clock;
use crate::credential_plugins::Plugins;

/// How long the node's configuration is cached (runtime-and-resources.md §6.3).
const CACHE_NANOS: i64 = 300 * 1_000_000_000;
/// Maximum size of a configuration file; larger files are ignored.
const MAX_BYTES: u64 = 1 << 20;
/// Timeout of reading a Secret from pod-config.
const SECRET_TIMEOUT: Duration = Duration::from_secs(10);

/// Finds credentials.
#[derive(Debug, Clone)]
pub struct Credentials {
    secrets: SecretSource,
    node: Arc<NodeConfig>,
    plugins: Plugins,
    clock: Clock,
}

/// The source of Secrets.
#[derive(Debug, Clone, Default)]
enum SecretSource {
    /// No Secrets.
    #[default]
    None,
    PodConfig(PeerChannel),
    #[cfg(test)]
    Set(Arc<Mutex<std::collections::BTreeMap<String, Result<Value, Status>>>>),
}

/// The docker configuration of the node.
#[derive(Debug, Default)]
struct NodeConfig {
    /// Folders that are searched, in this order.
    folders: Vec<PathBuf>,
    read: Mutex<Option<(i64, Keyring)>>,
}

/// The credentials of a pod for one image.
#[derive(Debug, Default)]
pub struct FoundCredentials {
    /// The credentials, in the order in which to try them.
    pub list: Vec<(Credential, Origin)>,
    /// Secrets that do not exist or cannot be used.
    pub missing: Vec<String>,
}

/// pod-config cannot tell whether a Secret exists.
#[derive(Debug, thiserror::Error)]
#[error("cannot read Secret {name:?} with credentials for the image: {}", .status.message())]
pub struct SecretUnavailableError {
    name: String,
    status: Status,
}

/// Why a Secret gives no credentials.
#[derive(Debug, thiserror::Error)]
enum SecretError {
    #[error("it does not exist")]
    Missing,
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    #[error("its type is {0:?}, not kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg")]
    OtherType(String),
    #[error("it has no key {0}")]
    NoKey(&'static str),
    #[error("its key {0} is not base64")]
    NotBase64(&'static str),
    #[error("its key {key} is not a docker configuration")]
    Config { key: &'static str, source: DockerConfigError },
}

impl Credentials {
    /// No credentials.
    pub fn none() -> Self {
        let plugins = Plugins::default();
        Self { secrets: SecretSource::None, node: Arc::default(), plugins, clock: Clock::System }
    }

    /// Uses Secrets from pod-config, and the node's configuration from the folders that Docker and the kubelet use.
    pub fn new(pod_config: PeerChannel, root: PathBuf) -> Self {
        let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".docker"));
        let folders = [Some(root), env::current_dir().ok(), home, Some("/.docker".into())];
        let node = NodeConfig { folders: folders.into_iter().flatten().collect(), read: Mutex::default() };
        let secrets = SecretSource::PodConfig(pod_config);
        Self { secrets, node: Arc::new(node), ..Self::none() }
    }

    /// Adds credentials from plugins.
    #[must_use]
    pub(crate) fn with_plugins(self, plugins: Plugins) -> Self {
        Self { plugins, ..self }
    }

    /// The credentials of a pod for `repository`: those of the Secrets `names`, then those of the node's configuration,
    /// then those of plugins. Running a plugin may take long.
    ///
    /// # Errors
    /// pod-config is down. A Secret that does not exist is not an error; it is listed in the result.
    pub async fn find(
        &self,
        pod: &PodRef,
        names: &[String],
        repository: &str,
    ) -> Result<FoundCredentials, SecretUnavailableError> {
        let mut found = self.pod_credentials(pod, names, repository).await?;
        found.list.extend(self.node_keyring().await.lookup(repository));
        let pod: Arc<str> = format!("{}/{}", pod.namespace, pod.name).into();
        found.list.extend(self.plugins.find(repository, &pod).await);
        Ok(found)
    }

    /// As [`Self::find`], with the pod's Secrets only.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub async fn pod_credentials(
        &self,
        pod: &PodRef,
        names: &[String],
        repository: &str,
    ) -> Result<FoundCredentials, SecretUnavailableError> {
        let (mut keyring, mut found) = (Keyring::default(), FoundCredentials::default());
        for name in names.iter().filter(|name| !name.is_empty()) {
            let secret = self.secret(&pod.namespace, name).await?;
            let Err(error) =
                secret.and_then(|secret| add_secret(&mut keyring, &secret, &pod.namespace, name))
            else {
                continue;
            };
            let text = keelson_service_kit::status::chain(&error);
            tracing::warn!(
                pod = pod.name,
                secret = name,
                error = text,
                "a Secret has no usable credentials for images"
            );
            if !matches!(error, SecretError::OtherType(_)) {
                found.missing.push(name.clone());
            }
        }
        found.list = keyring.lookup(repository);
        Ok(found)
    }

    async fn secret(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Result<Value, SecretError>, SecretUnavailableError> {
        let answer = match &self.secrets {
            SecretSource::None => return Ok(Err(SecretError::Missing)),
            SecretSource::PodConfig(channel) => {
                let mut request = Request::new(GetObjectRequest {
                    kind: "Secret".to_owned(),
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                });
                request.set_timeout(SECRET_TIMEOUT);
                let mut client = PodConfigClient::new(channel.clone()).max_decoding_message_size(64 << 20);
                client.get_object(request).await.map(|answer| answer.into_inner().object_json)
            }
            #[cfg(test)]
            SecretSource::Set(secrets) => {
                let found = secrets.lock().unwrap().get(&format!("{namespace}/{name}")).cloned();
                let found = found.unwrap_or_else(|| Err(Status::not_found("none")));
                found.map(|secret| secret.to_string().into_bytes())
            }
        };
        match answer {
            // The decoder's error is dropped, because it may repeat a part of the text.
            Ok(json) => {
                Ok(serde_json::from_slice(&json)
                    .map_err(|_| SecretError::Unreadable("it is not JSON".into())))
            }
            Err(status) if status.code() == Code::NotFound => Ok(Err(SecretError::Missing)),
            Err(status)
                if is_unanswered(&status) || reason(&status).as_deref() == Some("SOURCES_NOT_READ") =>
            {
                Err(SecretUnavailableError { name: name.to_owned(), status })
            }
            Err(status) => Ok(Err(SecretError::Unreadable(status.message().to_owned()))),
        }
    }

    async fn node_keyring(&self) -> Keyring {
        let now = self.clock.read().boot_nanos;
        let lock = |node: &NodeConfig| node.read.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((at, keyring)) = lock(&self.node)
            && now - at < CACHE_NANOS
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
    /// The first valid configuration: `config.json` in each folder, then `.dockercfg` in each folder.
    fn load(&self) -> Keyring {
        for (name, form) in [("config.json", ConfigFormat::Json), (".dockercfg", ConfigFormat::Legacy)] {
            for path in self.folders.iter().map(|folder| folder.join(name)) {
                let mut keyring = Keyring::default();
                match read_config_file(&path) {
                    Ok(text) => match keyring.add(&text, form, &Origin::Node) {
                        Ok(()) => return keyring,
                        Err(error) => {
                            tracing::warn!(path = %path.display(), %error, "this file is not a docker configuration");
                        }
                    },
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => {
                        tracing::warn!(path = %path.display(), %error, "cannot read a docker configuration")
                    }
                }
            }
        }
        Keyring::default()
    }
}

fn read_config_file(path: &std::path::Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.len() > MAX_BYTES {
        return Err(io::Error::other("it is not a regular file of at most 1 MiB"));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

fn add_secret(keyring: &mut Keyring, secret: &Value, namespace: &str, name: &str) -> Result<(), SecretError> {
    let (key, form) = match secret["type"].as_str().unwrap_or_default() {
        "kubernetes.io/dockerconfigjson" => (".dockerconfigjson", ConfigFormat::Json),
        "kubernetes.io/dockercfg" => (".dockercfg", ConfigFormat::Legacy),
        other => return Err(SecretError::OtherType(other.to_owned())),
    };
    // A manifest may use `stringData`, which takes precedence, as in the API.
    let text = match (secret["stringData"][key].as_str(), secret["data"][key].as_str()) {
        (Some(text), _) => text.as_bytes().to_vec(),
        (None, Some(text)) => keelson_kube_model::base64::decode(text).ok_or(SecretError::NotBase64(key))?,
        (None, None) => return Err(SecretError::NoKey(key)),
    };
    let origin = Origin::Secret {
        uid: secret["metadata"]["uid"].as_str().unwrap_or_default().to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    keyring.add(&text, form, &origin).map_err(|source| SecretError::Config { key, source })
}

#[cfg(test)]
pub(crate) mod testing {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    impl Credentials {
        /// Credentials of these Secrets and folders.
        pub(crate) fn of(
            secrets: &[(&str, Result<Value, Status>)],
            folders: &[PathBuf],
            clock: Clock,
        ) -> Self {
            let secrets: BTreeMap<_, _> =
                secrets.iter().map(|(name, secret)| ((*name).to_owned(), secret.clone())).collect();
            let node = NodeConfig { folders: folders.to_vec(), read: Mutex::default() };
            let secrets = SecretSource::Set(Arc::new(Mutex::new(secrets)));
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

    fn users(found: &FoundCredentials) -> Vec<&str> {
        found.list.iter().map(|(credential, _)| credential.username.as_str()).collect()
    }

    #[tokio::test]
    async fn pod_pull_secrets_in_both_formats_come_before_the_node_configuration() {
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
        let own = credentials.pod_credentials(&pod(), &names(&["b"]), REPO).await.unwrap();
        assert_eq!(users(&own), ["bob"]);
        assert!(users(&credentials.find(&pod(), &[], "other.example/a").await.unwrap()).is_empty());
    }

    #[tokio::test]
    async fn unusable_pull_secrets_are_reported_and_the_others_used() {
        let unavailable = error(Code::Unavailable, "CONTROL_PLANE_AWAY", "the control plane does not answer");
        let opaque = json!({"type": "Opaque", "data": {}});
        let empty = json!({"type": "kubernetes.io/dockercfg"});
        let bad = json!({"type": "kubernetes.io/dockercfg", "data": {".dockercfg": "!"}});
        let text = json!({"type": "kubernetes.io/dockercfg", "stringData": {".dockercfg": "hunter2"}});
        let secrets = [
            ("default/good", Ok(secret("r.example", "ann", "p"))),
            ("default/unread", Err(unavailable)),
            ("default/opaque", Ok(opaque)),
            ("default/empty", Ok(empty)),
            ("default/bad", Ok(bad)),
            ("default/text", Ok(text)),
        ];
        let credentials = Credentials::of(&secrets, &[], Clock::System);
        let requested = names(&["gone", "unread", "opaque", "empty", "bad", "text", "good"]);
        let found = credentials.find(&pod(), &requested, REPO).await.unwrap();
        assert_eq!(found.missing, ["gone", "unread", "empty", "bad", "text"]);
        assert_eq!(users(&found), ["ann"]);
    }

    #[tokio::test]
    async fn pull_waits_while_pod_config_cannot_tell_whether_a_secret_exists() {
        for reason in [PEER_UNAVAILABLE, "SOURCES_NOT_READ"] {
            let unavailable = error(Code::Unavailable, reason, "pod-config is not reachable");
            let credentials = Credentials::of(&[("default/a", Err(unavailable))], &[], Clock::System);
            let error = credentials.find(&pod(), &names(&["a"]), REPO).await.unwrap_err();
            assert!(error.to_string().contains("Secret \"a\""), "{error}");
            assert!(error.to_string().contains("pod-config is not reachable"), "{error}");
        }
    }

    #[tokio::test]
    async fn node_docker_configuration_is_the_first_valid_file_cached_for_5_minutes() {
        let (dir, clock) = (tempfile::tempdir().unwrap(), Clock::stopped());
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
        clock.advance(299, 0);
        assert_eq!(users(&found().await), ["legacy"]);
        clock.advance(1, 0);
        assert_eq!(users(&found().await), ["new"]);
    }

    #[test]
    fn huge_file_and_folder_are_refused_as_docker_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let huge = dir.path().join("huge");
        std::fs::write(&huge, vec![b' '; (1 << 20) + 1]).unwrap();
        for path in [huge.as_path(), dir.path()] {
            assert!(read_config_file(path).unwrap_err().to_string().contains("regular file"));
        }
    }
}
