//! The source `etcd`: the pods, Secrets and ConfigMaps that stand under this node's keys (architecture §6).
//!
//! What was good is in the checkpoint, and Secrets are in memory: while etcd does not answer, pods of this boot go on over a
//! restart of the service, and after a reboot those start that the offline policy lets start. Only what etcd says settles
//! the source, so that nothing is ever removed because it is away.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use keelson_config::{Config, Etcd as Settings, Offline, ServiceName};
use keelson_etcd::keys::Named;
use keelson_etcd::{Change, Entry, Etcd, Follower, News, NodeKeys};
use keelson_kube_model::pod_ext::ETCD;
use keelson_pod_config_core::files::{Holders, SourceFiles};
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::offline::{WaitingPod, age, waits_for};
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::stored::{StoredName, parse_stored};

use keelson_pod_config_core::{FileContent, ManifestError, Why};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, Progress};

use crate::checkpoint::Checkpoint;
use crate::control_plane::{
    ControlPlane, ControlPlaneError, NodeState, ObjectRequest, PlanePods, standalone,
};
use crate::last_word::{LastWord, but, now_unix_seconds};
use crate::secrets::{SecretName, Secrets};
use crate::this_boot::ThisBoot;

/// The condition that says how etcd is.
const CONDITION: &str = "control-plane";

/// What an earlier run of the service has left.
#[derive(Debug, Default)]
pub struct Earlier {
    /// What stood under the keys, by key; no Secrets.
    pub values: BTreeMap<String, Vec<u8>>,
    /// When etcd was last heard, seconds since 1970; `None`: nobody knows.
    pub heard: Option<i64>,
}

/// etcd as pod-config reads it.
pub struct EtcdPlane {
    config: Arc<Config>,
    etcd: Etcd,
    progress: Progress,
    checkpoint: Checkpoint,
    /// Until the pods are asked for.
    earlier: Mutex<Earlier>,
}

impl EtcdPlane {
    /// For the node of `ctx`; `earlier` is what the checkpoint has of earlier runs.
    pub fn new(ctx: &Context, settings: &Settings, checkpoint: Checkpoint, earlier: Earlier) -> Self {
        Self {
            config: Arc::clone(&ctx.config),
            etcd: Etcd::new(settings.handed_over(&ctx.config.paths.credentials(ServiceName::PodConfig))),
            progress: ctx.progress.clone(),
            checkpoint,
            earlier: Mutex::new(earlier),
        }
    }

    /// The connection.
    pub fn etcd(&self) -> Etcd {
        self.etcd.clone()
    }
}

impl ControlPlane for EtcdPlane {
    fn name(&self) -> &'static str {
        ETCD
    }

    fn source(&self) -> Option<&'static str> {
        Some(ETCD)
    }

    fn pods(&self) -> BoxStream<'static, PlanePods> {
        let keys = NodeKeys::new(&self.config.node_name);
        let Earlier { mut values, heard } =
            std::mem::take(&mut *self.earlier.lock().unwrap_or_else(PoisonError::into_inner));
        let run_dir = self.config.paths.socket_dir(ServiceName::PodConfig);
        let (secrets, kept) = Secrets::open(&run_dir);
        let key_of = |(namespace, name): SecretName| keys.object(Kind::Secret.as_str(), &namespace, &name);
        values.extend(kept.into_iter().map(|(name, bytes)| (key_of(name), bytes)));
        let source = EtcdSource {
            follower: Follower::new(self.etcd.clone(), keys.desired()),
            keys,
            rules: StaticRules::standalone(&self.config.node_name),
            progress: self.progress.clone(),
            checkpoint: self.checkpoint.clone(),
            secrets,
            remembered: values,
            last_word: LastWord::new(ETCD, heard, &self.config.offline, self.checkpoint.clone()),
            files: SourceFiles::resuming(Holders::new()),
            known: BTreeMap::new(),
            settled: false,
            begun: false,
            boot: ThisBoot::new(&run_dir, ETCD, &self.config.resources.identity_files.boot_id),
            offline: self.config.offline.clone(),
            waiting: BTreeMap::new(),
        };
        stream::unfold(source, |mut source| async move { Some((source.next().await, source)) }).boxed()
    }

    fn node(&self) -> BoxStream<'static, NodeState> {
        standalone(&self.config)
    }

    fn get_object(&self, _: ObjectRequest) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlPlaneError>> {
        // All objects of the node are a part of its source.
        Box::pin(std::future::ready(Ok(None)))
    }
}

/// The revisions of a key that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Revisions {
    create: i64,
    last: i64,
}

struct EtcdSource {
    follower: Follower,
    keys: NodeKeys,
    rules: StaticRules,
    progress: Progress,
    checkpoint: Checkpoint,
    secrets: Secrets,
    /// What an earlier run of the service left of keys that have not been read.
    remembered: BTreeMap<String, Vec<u8>>,
    last_word: LastWord,
    files: SourceFiles,
    known: BTreeMap<String, Revisions>,
    settled: bool,
    begun: bool,
    boot: ThisBoot,
    offline: Offline,
    /// What does not start before etcd answers, by key.
    waiting: BTreeMap<String, Vec<WaitingPod>>,
}

impl EtcdSource {
    /// The next set.
    async fn next(&mut self) -> PlanePods {
        if !std::mem::replace(&mut self.begun, true) && self.recall_all() {
            return self.set();
        }
        loop {
            // Cancel-safe: a follower tells again what it could not tell.
            let news = tokio::select! {
                news = self.follower.next() => news,
                () = self.last_word.due() => {
                    self.last_word.write();
                    continue;
                }
            };
            match news {
                News::Listed(entries) => {
                    self.in_touch();
                    self.take_all(entries);
                    return self.set();
                }
                News::Changed(changes) => {
                    self.in_touch();
                    for change in changes {
                        match change {
                            Change::Put(entry) => self.take(&entry),
                            Change::Deleted(key) => self.forget(&key),
                        }
                    }
                    return self.set();
                }
                News::InTouch => self.in_touch(),
                News::Lost(error) => {
                    self.last_word.is_not_heard();
                    let waiting = self.waiting.values().flatten().count();
                    let text = format!("{}; what is known of it goes on{}", chain(&error), but(waiting));
                    self.progress.condition(CONDITION, Err(text));
                }
            }
        }
    }

    fn set(&mut self) -> PlanePods {
        let mut set = self.files.assemble();
        set.waiting = self.waiting.values().flatten().cloned().collect();
        PlanePods { set, settled: self.settled }
    }

    fn in_touch(&mut self) {
        self.progress.condition(CONDITION, Ok(()));
        self.last_word.is_heard();
    }

    /// Takes everything that there is.
    fn take_all(&mut self, entries: Vec<Entry>) {
        let gone: Vec<String> = self
            .known
            .keys()
            .chain(self.remembered.keys())
            .filter(|key| entries.binary_search_by(|entry| entry.key.as_str().cmp(key)).is_err())
            .cloned()
            .collect();
        gone.iter().for_each(|key| self.forget(key));
        for entry in &entries {
            self.take(entry);
        }
        self.remembered.clear();
        self.waiting.clear();
        self.files.all_are_known();
        let (keys, files) = (&self.keys, &self.files);
        self.secrets.retain(|(namespace, name)| {
            let key = keys.object(Kind::Secret.as_str(), namespace, name);
            files.content(&key).is_some_and(|content| !content.objects.is_empty())
        });
        for path in self.checkpoint.paths() {
            if path.starts_with(self.keys.prefix()) && self.files.content(&path).is_none() {
                self.checkpoint.remove(&path);
            }
        }
        if !std::mem::replace(&mut self.settled, true) {
            self.boot.sees();
        }
    }

    fn take(&mut self, entry: &Entry) {
        let revisions = Revisions { create: entry.create_revision, last: entry.mod_revision };
        let before = self.known.insert(entry.key.clone(), revisions);
        if before == Some(revisions) {
            return;
        }
        if before.is_some_and(|before| before.create != revisions.create) {
            self.files.remove(&entry.key);
            self.forget_kept(&entry.key);
        }
        match self.read(&entry.key, &entry.value, revisions.create) {
            Ok(mut content) => {
                match std::mem::take(&mut content.checkpoint) {
                    none if none.is_empty() => self.checkpoint.remove(&entry.key),
                    some => self.checkpoint.put(&entry.key, remember(revisions.create, &some)),
                }
                let secrets = content.objects.iter().filter(|object| object.key.kind == Kind::Secret);
                for ObjectKey { namespace, name, .. } in secrets.map(|object| object.key.clone()) {
                    self.secrets.put((namespace, name), &remember(revisions.create, &entry.value));
                }
                self.files.read(&entry.key, Ok(content));
            }
            Err(errors) => {
                self.files.read(&entry.key, Err(errors));
                if let Some((create, content)) = self.recall(&entry.key)
                    && create == revisions.create
                {
                    self.files.remember(&entry.key, content);
                }
            }
        }
    }

    fn read(&self, key: &str, value: &[u8], create: i64) -> Result<FileContent, Vec<ManifestError>> {
        let refuse = |text: String| Err(vec![ManifestError::file(Why::WrongKind, text)]);
        let promised = match self.keys.named(key) {
            Some(Named::Pod { namespace, name }) => StoredName { kind: Kind::Pod, namespace, name },
            Some(Named::Object { kind, namespace, name }) => match Kind::parse(kind) {
                Some(kind) if kind != Kind::Pod => StoredName { kind, namespace, name },
                _ => return refuse(format!("there are keys for Secret and ConfigMap, none for {kind:?}")),
            },
            _ => {
                return refuse(
                    "this is no key of a pod (pods/<namespace>/<name>) nor of an object \
                     (objects/<kind>/<namespace>/<name>)"
                        .to_owned(),
                );
            }
        };
        parse_stored(value, key, promised, create, &self.rules)
    }

    fn forget(&mut self, key: &str) {
        self.known.remove(key);
        self.remembered.remove(key);
        self.forget_kept(key);
        self.files.remove(key);
    }

    /// Nothing of the key is left for the time after a restart.
    fn forget_kept(&mut self, key: &str) {
        self.checkpoint.remove(key);
        if let Some(Named::Object { kind, namespace, name }) = self.keys.named(key)
            && kind == Kind::Secret.as_str()
        {
            self.secrets.remove(&(namespace.to_owned(), name.to_owned()));
        }
    }

    /// What an earlier run knew of a key, with the revision that made it.
    fn recall(&mut self, key: &str) -> Option<(i64, FileContent)> {
        let bytes = self.remembered.remove(key)?;
        let (create, value) = remembered(&bytes)?;
        match self.read(key, value, create) {
            Ok(content) => Some((create, content)),
            Err(errors) => {
                tracing::warn!(key, error = %errors[0], "the remembered version is not valid any more");
                None
            }
        }
    }

    /// Brings back what an earlier run knew, as far as it may start now. Whether that is anything.
    fn recall_all(&mut self) -> bool {
        let same_boot = self.boot.has_seen();
        let keys: Vec<String> = self.remembered.keys().cloned().collect();
        let mut any = false;
        for key in keys {
            let bytes = self.remembered.get(&key).cloned();
            let Some((_, mut content)) = self.recall(&key) else { continue };
            if !same_boot {
                self.hold_back(&key, &mut content);
            }
            self.files.remember(&key, content);
            self.remembered.extend(bytes.map(|bytes| (key, bytes)));
            any = true;
        }
        if any {
            tracing::info!(same_boot, "what etcd said last goes on until it answers");
        }
        any
    }

    /// Takes out what does not start after a reboot without etcd.
    fn hold_back(&mut self, key: &str, content: &mut FileContent) {
        let age = age(self.last_word.of_earlier_runs(), self.boot.first_look(now_unix_seconds()));
        let mut waiting = Vec::new();
        content.pods.retain(|pod| {
            let why = waits_for(&pod.json, &self.offline, age);
            if let Some(why) = &why {
                let name = format!("{}/{}", pod.namespace, pod.name);
                tracing::info!(pod = name, %why, "the pod does not start after the reboot before etcd answers");
                let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
                waiting.push(WaitingPod { namespace, name, origin: key.to_owned(), why: why.clone() });
            }
            why.is_none()
        });
        if !waiting.is_empty() {
            self.waiting.insert(key.to_owned(), waiting);
        }
    }
}

/// A value as the checkpoint keeps it: the revision that made its key stands before it.
fn remember(create: i64, value: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{create}\n").into_bytes();
    bytes.extend_from_slice(value);
    bytes
}

fn remembered(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let create = std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()?;
    Some((create, &bytes[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_the_revision_and_the_value() {
        assert_eq!(remembered(&remember(7, b"a\nb")), Some((7, &b"a\nb"[..])));
        for broken in [&b""[..], b"7", b"x\nvalue", b"\xff\nvalue"] {
            assert_eq!(remembered(broken), None);
        }
    }
}
