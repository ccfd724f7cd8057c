//! The control plane `etcd`: the pods and other objects under this node's keys (architecture §6).
//!
//! Secrets are kept over a restart in memory; everything else is in the checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use keelson_config::{Config, Etcd as Settings, ServiceName};
use keelson_etcd::keys::KeyKind;
use keelson_etcd::{Change, Entry, Etcd, EtcdListWatch, Follower, NodeKeys};
use keelson_kube_model::Pod;
use keelson_kube_model::pod_ext::ETCD;
use keelson_pod_config_core::binder::ClaimKey;
use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::files::{NameOwners, SourceFiles, SourceSet};
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::offline::SingleRun;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::stored::{ExpectedObject, parse_stored};
use keelson_pod_config_core::{FileContent, ManifestError, ManifestErrorKind};
use keelson_service_kit::{Context, Progress};

use crate::checkpoint::Checkpoint;
use crate::control_plane::{
    ControlPlane, ControlPlaneError, ControlPlanePods, NodeState, ObjectRequest, standalone,
};
use crate::followed_pods::{FollowedPods, OfflineStart, PodStore, RestoredState};
use crate::secrets::{SecretName, Secrets};

/// The control plane `etcd`.
pub struct EtcdControlPlane {
    config: Arc<Config>,
    etcd: Etcd,
    progress: Progress,
    checkpoint: Checkpoint,
    /// Taken when the pods are first requested.
    restored: Mutex<RestoredState>,
    /// The claims that the run before the restart bound to paths of this node.
    node_local_claims: BTreeSet<ClaimKey>,
}

impl EtcdControlPlane {
    /// For the node of `ctx`; `restored` and `node_local_claims`, those bound to paths of this node, are from the checkpoint.
    pub fn new(
        ctx: &Context,
        settings: &Settings,
        checkpoint: Checkpoint,
        restored: RestoredState,
        node_local_claims: BTreeSet<ClaimKey>,
    ) -> Self {
        Self {
            config: Arc::clone(&ctx.config),
            etcd: Etcd::new(settings.handed_over(&ctx.config.paths.credentials(ServiceName::PodConfig))),
            progress: ctx.progress.clone(),
            checkpoint,
            restored: Mutex::new(restored),
            node_local_claims,
        }
    }

    /// The etcd client.
    pub fn etcd(&self) -> Etcd {
        self.etcd.clone()
    }
}

impl ControlPlane for EtcdControlPlane {
    fn name(&self) -> &'static str {
        ETCD
    }

    fn source(&self) -> Option<&'static str> {
        Some(ETCD)
    }

    fn pods(&self) -> BoxStream<'static, ControlPlanePods> {
        let keys = NodeKeys::new(&self.config.node_name);
        let RestoredState { mut values, last_contact } =
            std::mem::take(&mut *self.restored.lock().unwrap_or_else(PoisonError::into_inner));
        let run_dir = self.config.paths.socket_dir(ServiceName::PodConfig);
        let (secrets, stored_secrets) = Secrets::open(&run_dir);
        let key_of = |(namespace, name): SecretName| keys.object(Kind::Secret.as_str(), &namespace, &name);
        values.extend(stored_secrets.into_iter().map(|(name, bytes)| (key_of(name), bytes)));
        let follower = Follower::new(self.etcd.clone(), keys.desired());
        let store = EtcdObjects {
            keys,
            rules: StaticRules::standalone(&self.config.node_name),
            checkpoint: self.checkpoint.clone(),
            secrets,
            restored: values,
            node_local_claims: self.node_local_claims.clone(),
            files: SourceFiles::restore(NameOwners::new()),
            known: BTreeMap::new(),
        };
        FollowedPods::new(
            &self.config,
            self.progress.clone(),
            self.checkpoint.clone(),
            last_contact,
            follower,
            store,
        )
        .into_stream()
    }

    fn node(&self) -> BoxStream<'static, NodeState> {
        standalone(&self.config)
    }

    fn get_object(&self, _: ObjectRequest) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlPlaneError>> {
        // All objects of the node are part of its source.
        Box::pin(std::future::ready(Ok(None)))
    }
}

/// The revisions of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Revisions {
    create: i64,
    last: i64,
}

/// The pods and objects under the keys of this node.
struct EtcdObjects {
    keys: NodeKeys,
    rules: StaticRules,
    checkpoint: Checkpoint,
    secrets: Secrets,
    /// Restored values of keys that have not been read yet.
    restored: BTreeMap<String, Vec<u8>>,
    node_local_claims: BTreeSet<ClaimKey>,
    files: SourceFiles,
    known: BTreeMap<String, Revisions>,
}

impl PodStore for EtcdObjects {
    type Watch = EtcdListWatch;

    const SOURCE: &'static str = ETCD;
    const CONTROL_PLANE: &'static str = "etcd";

    fn restore(&mut self, start: &mut OfflineStart<'_>) -> bool {
        let keys: Vec<String> = self.restored.keys().cloned().collect();
        let mut any = false;
        for key in keys {
            let bytes = self.restored.get(&key).cloned();
            let Some((_, mut content)) = self.restore_content(&key) else { continue };
            let local = &self.node_local_claims;
            content.pods.retain(|pod| match start.hold_back(&without_node_local_claims(pod, local)) {
                Some(reason) => {
                    let pod = format!("{}/{}", pod.namespace, pod.name);
                    tracing::info!(event = "pod_waits_offline", pod, %reason, "after the reboot the pod waits for etcd");
                    false
                }
                None => true,
            });
            self.files.restore_content(&key, content);
            self.restored.extend(bytes.map(|bytes| (key, bytes)));
            any = true;
        }
        any
    }

    fn apply_list(&mut self, entries: Vec<Entry>) {
        let removed: Vec<String> = self
            .known
            .keys()
            .chain(self.restored.keys())
            .filter(|key| entries.binary_search_by(|entry| entry.key.as_str().cmp(key)).is_err())
            .cloned()
            .collect();
        removed.iter().for_each(|key| self.forget(key));
        for entry in &entries {
            self.apply_entry(entry);
        }
        self.restored.clear();
        self.files.forget_unread_owners();
        let (keys, files) = (&self.keys, &self.files);
        self.secrets.retain(|(namespace, name)| {
            let key = keys.object(Kind::Secret.as_str(), namespace, name);
            files.content(&key).is_some_and(|content| !content.objects.is_empty())
        });
        self.checkpoint.retain(|path| !path.starts_with(keys.prefix()) || files.content(path).is_some());
    }

    fn apply_changes(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Put(entry) => self.apply_entry(&entry),
                Change::Deleted(key) => self.forget(&key),
            }
        }
    }

    fn set(&mut self) -> SourceSet {
        self.files.assemble()
    }
}

impl EtcdObjects {
    fn apply_entry(&mut self, entry: &Entry) {
        let revisions = Revisions { create: entry.create_revision, last: entry.mod_revision };
        let before = self.known.insert(entry.key.clone(), revisions);
        if before == Some(revisions) {
            return;
        }
        if before.is_some_and(|before| before.create != revisions.create) {
            self.files.remove(&entry.key);
            self.forget_stored(&entry.key);
        }
        match self.read(&entry.key, &entry.value, revisions.create) {
            Ok(mut content) => {
                match std::mem::take(&mut content.checkpoint) {
                    none if none.is_empty() => self.checkpoint.remove(&entry.key),
                    some => self.checkpoint.put(&entry.key, encode_row(revisions.create, &some)),
                }
                let secrets = content.objects.iter().filter(|object| object.key.kind == Kind::Secret);
                for ObjectKey { namespace, name, .. } in secrets.map(|object| object.key.clone()) {
                    self.secrets.put((namespace, name), &encode_row(revisions.create, &entry.value));
                }
                self.files.update(&entry.key, Ok(content));
            }
            Err(errors) => {
                self.files.update(&entry.key, Err(errors));
                if let Some((create, content)) = self.restore_content(&entry.key)
                    && create == revisions.create
                {
                    self.files.restore_content(&entry.key, content);
                }
            }
        }
    }

    fn read(&self, key: &str, value: &[u8], create: i64) -> Result<FileContent, Vec<ManifestError>> {
        let wrong_kind = |text: String| Err(vec![ManifestError::file(ManifestErrorKind::WrongKind, text)]);
        let expected = match self.keys.named(key) {
            Some(KeyKind::Pod { namespace, name }) => ExpectedObject { kind: Kind::Pod, namespace, name },
            Some(KeyKind::Object { kind, namespace, name }) => match Kind::parse(kind) {
                Some(Kind::Pod) | None => {
                    return wrong_kind(format!(
                        "there are keys for Secret, ConfigMap, PersistentVolumeClaim and PersistentVolume, none for {kind:?}"
                    ));
                }
                Some(Kind::PersistentVolume) => {
                    return wrong_kind(
                        "a PersistentVolume has no namespace; its key is objects/PersistentVolume/<name>"
                            .to_owned(),
                    );
                }
                Some(kind) => ExpectedObject { kind, namespace, name },
            },
            Some(KeyKind::ClusterObject { kind, name }) if kind == Kind::PersistentVolume.as_str() => {
                ExpectedObject { kind: Kind::PersistentVolume, namespace: "", name }
            }
            _ => {
                return wrong_kind(
                    "this is no key of a pod (pods/<namespace>/<name>) nor of an object \
                     (objects/<kind>/<namespace>/<name>, objects/PersistentVolume/<name>)"
                        .to_owned(),
                );
            }
        };
        parse_stored(value, key, expected, create, &self.rules)
    }

    fn forget(&mut self, key: &str) {
        self.known.remove(key);
        self.restored.remove(key);
        self.forget_stored(key);
        self.files.remove(key);
    }

    /// Removes the key from the checkpoint and from the stored Secrets.
    fn forget_stored(&mut self, key: &str) {
        self.checkpoint.remove(key);
        if let Some(KeyKind::Object { kind, namespace, name }) = self.keys.named(key)
            && kind == Kind::Secret.as_str()
        {
            self.secrets.remove(&(namespace.to_owned(), name.to_owned()));
        }
    }

    /// Takes the restored value of a key, with the revision at which the key was created.
    fn restore_content(&mut self, key: &str) -> Option<(i64, FileContent)> {
        let bytes = self.restored.remove(key)?;
        let invalid = |error: &dyn std::fmt::Display| {
            tracing::warn!(event = "checkpoint_row_invalid", key, %error, "the version in the checkpoint is not valid");
        };
        let Some((create, value)) = decode_row(&bytes) else {
            invalid(&"the row does not begin with a revision");
            return None;
        };
        match self.read(key, value, create) {
            Ok(content) => Some((create, content)),
            Err(errors) => {
                invalid(&errors[0]);
                None
            }
        }
    }
}

/// The pod, where a claim to a path of this node is no reason to run only once: no other node can use it.
fn without_node_local_claims(pod: &DesiredPod, node_local_claims: &BTreeSet<ClaimKey>) -> DesiredPod {
    let mut pod = pod.clone();
    if let Some(SingleRun::Claim { .. }) = pod.single_run
        && let Ok(decoded) = serde_json::from_slice::<Pod>(&pod.json)
    {
        let namespace = pod.namespace.clone();
        pod.single_run = SingleRun::with_node_local_claims(&decoded, |name| {
            let key = ClaimKey { namespace: namespace.clone(), name: name.to_owned() };
            node_local_claims.contains(&key)
        });
    }
    pod
}

/// Encodes a checkpoint row: the create revision of the key, a newline, the value.
fn encode_row(create: i64, value: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{create}\n").into_bytes();
    bytes.extend_from_slice(value);
    bytes
}

fn decode_row(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let create = std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()?;
    Some((create, &bytes[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_row_holds_the_create_revision_and_the_value() {
        assert_eq!(decode_row(&encode_row(7, b"a\nb")), Some((7, &b"a\nb"[..])));
        for broken in [&b""[..], b"7", b"x\nvalue", b"\xff\nvalue"] {
            assert_eq!(decode_row(broken), None);
        }
    }
}
