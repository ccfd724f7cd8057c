//! The source `manifest`: stores applied manifests, one file per object in `<state>/manifests`.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_files::create_private_folder;
use keelson_kube_model::PodFullName;
use keelson_kube_model::pod_ext::ETCD;
use keelson_pod_config_core::files::SourceFiles;
use keelson_pod_config_core::manifest::{Document, Kind, read_manifest};
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::scan::Listing;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{
    FileContent, ManifestError, ManifestErrorKind, ManifestWarning, parse_file, validate_documents,
};

use keelson_proto::keelson::pod_config::v1::AppliedPod;
use keelson_service_kit::{Context, LoopHandle};
use serde_json::json;
use tokio::sync::{mpsc, oneshot};

use crate::blocking::run_blocking;
use crate::control_plane::static_rules;
use crate::desired_state::{DesiredState, FILE, HTTP, MANIFEST};
use crate::disk::{self, Reading};
use crate::manifest_files::{file_name, remove, replace};

/// The configured sources of manifests, which take precedence.
const CONFIGURED: [&str; 2] = [FILE, HTTP];
/// The sources of objects that are changed there and not here.
const OTHERS: [&str; 3] = [FILE, HTTP, ETCD];
/// The kinds that are stored.
const KINDS: [Kind; 5] =
    [Kind::Pod, Kind::Secret, Kind::ConfigMap, Kind::PersistentVolumeClaim, Kind::PersistentVolume];
const CONDITION: &str = "manifest-folder";
/// Delay before an unreadable folder is read again.
const RETRY: Duration = Duration::from_secs(1);

/// Why a manifest was not stored or deleted.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The manifest is invalid; the message has one line per error.
    #[error("{0}")]
    Invalid(String),
    /// The object belongs to another source, or the UID of a pod to another pod.
    #[error("{what} is defined in {origin}; change it there")]
    OwnedBySource {
        /// The object.
        what: String,
        /// Where it was read.
        origin: String,
    },
    /// The file contains other objects besides the named one.
    #[error("{} contains other objects besides {what}; delete the file by hand", path.display())]
    Shared {
        /// The object.
        what: String,
        /// The file.
        path: PathBuf,
    },
    /// No such object is stored.
    #[error("no manifest of {what} is stored; {}", list_hint(*kind))]
    Unknown {
        /// The requested kind.
        kind: Option<Kind>,
        /// The requested object.
        what: String,
    },
    /// Objects of several kinds have the name, and the request names no kind.
    #[error("{name} is the name of {}; name the kind of the one to delete", found.join(" and "))]
    Ambiguous {
        /// The requested name.
        name: String,
        /// The objects.
        found: Vec<String>,
    },
    /// The folder has not been read yet.
    #[error("the manifest folder {} has not been read yet; try again", path.display())]
    NotRead {
        /// The folder.
        path: PathBuf,
    },
    /// The file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The service is shutting down.
    #[error("pod-config is shutting down; try again")]
    ShuttingDown,
}

/// How to find an object of this kind that is not stored.
fn list_hint(kind: Option<Kind>) -> &'static str {
    match kind {
        None | Some(Kind::Pod) => "`keelson get pods` lists the running pods",
        Some(Kind::PersistentVolumeClaim) => "`keelson get pvc -A` lists the claims of this node",
        Some(Kind::PersistentVolume) => "`keelson get pv` lists the PersistentVolumes of this node",
        Some(Kind::Secret | Kind::ConfigMap) => "`keelson apply` stores manifests",
    }
}

/// An object to delete.
#[derive(Debug, Clone)]
pub struct ObjectName {
    /// Its kind; without it, the name must belong to one object only.
    pub kind: Option<Kind>,
    /// Its namespace; empty: `default`. Ignored for a PersistentVolume.
    pub namespace: String,
    /// Its name. That of a pod may lack the name of the node.
    pub name: String,
}

/// An object that has a requested name.
#[derive(Debug)]
struct Found {
    /// `the pod default/web`, `the Secret default/key`.
    what: String,
    /// Of a pod; else empty.
    uid: String,
    place: Place,
}

/// Where an object is defined.
#[derive(Debug)]
enum Place {
    /// In this file of the store.
    Stored(String),
    /// Elsewhere: the file, URL or key.
    Other(String),
}

#[derive(Debug)]
enum Command {
    Apply { manifest: Vec<u8>, hint: String, reply: oneshot::Sender<Result<Vec<AppliedPod>, StoreError>> },
    Delete { object: ObjectName, reply: oneshot::Sender<Result<String, StoreError>> },
}

/// Sends commands to the loop of the store, which executes them one at a time.
#[derive(Debug, Clone)]
pub struct ManifestStore(mpsc::Sender<Command>);

impl ManifestStore {
    /// Validates the complete manifest and stores its objects.
    pub async fn apply(&self, manifest: Vec<u8>, hint: String) -> Result<Vec<AppliedPod>, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.0.send(Command::Apply { manifest, hint, reply }).await.map_err(|_| StoreError::ShuttingDown)?;
        answer.await.map_err(|_| StoreError::ShuttingDown)?
    }

    /// Deletes an object. Returns the UID of a pod; empty for another object.
    pub async fn delete(&self, object: ObjectName) -> Result<String, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.0.send(Command::Delete { object, reply }).await.map_err(|_| StoreError::ShuttingDown)?;
        answer.await.map_err(|_| StoreError::ShuttingDown)?
    }
}

/// The loop of [`ManifestStore`]. Nothing else changes the folder.
#[derive(Debug)]
pub struct StoreLoop {
    ctx: Context,
    loop_handle: LoopHandle,
    folder: PathBuf,
    rules: StaticRules,
    desired: DesiredState,
    files: SourceFiles,
    commands: mpsc::Receiver<Command>,
    read: bool,
}

/// A file to write.
#[derive(Debug)]
struct Planned {
    path: PathBuf,
    bytes: Vec<u8>,
    content: FileContent,
}

impl StoreLoop {
    /// Creates the store in `folder` and its loop.
    pub fn new(ctx: &Context, folder: &Path, desired: DesiredState) -> (ManifestStore, Self) {
        let (sender, commands) = mpsc::channel(16);
        let own = Self {
            ctx: ctx.clone(),
            loop_handle: ctx.progress.register("manifest-store"),
            folder: folder.to_owned(),
            rules: static_rules(&ctx.config),
            desired,
            files: SourceFiles::default(),
            commands,
            read: false,
        };
        (ManifestStore(sender), own)
    }

    /// Reads the folder, then executes commands until the service shuts down.
    pub async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        loop {
            self.loop_handle.tick();
            if !self.read {
                self.load().await;
            }
            let wait = if self.read { LoopHandle::HEARTBEAT } else { RETRY };
            // Cancel-safe: a command is taken only when it is returned.
            tokio::select! {
                () = shutdown.cancelled() => return,
                command = self.commands.recv() => match command {
                    Some(command) => self.take(command).await,
                    None => shutdown.cancelled().await,
                },
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        run_blocking(&self.ctx, &self.loop_handle, CONDITION, &self.folder, work).await
    }

    async fn load(&mut self) {
        let folder = self.folder.clone();
        let loaded = self.blocking(move || {
            let folder_created = create_private_folder(&folder);
            // Without a folder there are no manifests, even if it cannot be created.
            let listing = match fs::metadata(&folder) {
                Err(error) if error.kind() == ErrorKind::NotADirectory => Listing::Missing,
                Ok(_) | Err(_) => disk::list(&folder),
            };
            let readings = match &listing {
                Listing::Files(files) => {
                    files.keys().map(|p| (p.clone(), disk::read(Path::new(p)))).collect()
                }
                Listing::Missing | Listing::Unreadable(_) => Vec::new(),
            };
            (folder_created, listing, readings)
        });
        let Some((folder_created, listing, readings)) = loaded.await else { return };
        if let Listing::Unreadable(message) = listing {
            self.ctx.progress.condition(CONDITION, Err(message));
            return;
        }
        let state = folder_created.map_err(|error| {
            format!(
                "cannot create {}: {error}; `keelson apply` does not work until the folder can be created",
                self.folder.display()
            )
        });
        self.ctx.progress.condition(CONDITION, state);
        for (path, reading) in readings {
            match reading {
                Reading::Bytes(bytes, _) => self.files.update(&path, parse_file(&bytes, &path, &self.rules)),
                Reading::Failed(error) => {
                    let text = format!("cannot be read: {error}");
                    self.files
                        .update(&path, Err(vec![ManifestError::file(ManifestErrorKind::Unreadable, text)]));
                }
                Reading::Missing => {}
            }
        }
        self.read = true;
        self.publish();
    }

    fn publish(&mut self) {
        self.desired.publish(MANIFEST, self.files.assemble(), true);
    }

    async fn take(&mut self, command: Command) {
        // If the caller is gone, nobody needs the reply.
        match command {
            Command::Apply { manifest, hint, reply } => {
                let _ = reply.send(self.apply(&manifest, &hint).await);
            }
            Command::Delete { object, reply } => {
                let _ = reply.send(self.delete(&object).await);
            }
        }
    }

    async fn apply(&mut self, manifest: &[u8], hint: &str) -> Result<Vec<AppliedPod>, StoreError> {
        if !self.read {
            return Err(StoreError::NotRead { path: self.folder.clone() });
        }
        let (planned, warnings) = self.plan(manifest, hint)?;
        let mut applied = Vec::new();
        let mut error = None;
        for Planned { path, bytes, content } in planned {
            let target = path.clone();
            let Some(written) = self.blocking(move || replace(&target, &bytes)).await else {
                error = Some(StoreError::ShuttingDown);
                break;
            };
            let result = match written {
                Ok(result) => result,
                Err(source) => {
                    error = Some(StoreError::Write { path, source });
                    break;
                }
            };
            applied.extend(content.pods.iter().map(|pod| AppliedPod {
                uid: pod.uid.clone(),
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                result: result.to_owned(),
                warnings: warnings_of_pod(&warnings, &pod.full_name()),
            }));
            self.files.update(&path.to_string_lossy(), Ok(content));
        }
        self.publish();
        error.map_or(Ok(applied), Err)
    }

    /// Validates everything before anything is written.
    fn plan(&self, manifest: &[u8], hint: &str) -> Result<(Vec<Planned>, Vec<ManifestWarning>), StoreError> {
        let hint = if hint.is_empty() { "manifest" } else { hint };
        let invalid = |errors: Vec<ManifestError>| {
            let lines: Vec<String> = errors.iter().map(|error| error.at(hint)).collect();
            StoreError::Invalid(lines.join("\n"))
        };
        let documents = read_manifest(manifest).map_err(|error| invalid(vec![error]))?;
        let content = validate_documents(documents.clone(), manifest, hint, &self.rules).map_err(invalid)?;
        let warnings = content.warnings.clone();
        let mut applied_files = SourceFiles::default();
        applied_files.update(hint, Ok(content));
        let set = applied_files.assemble();
        if !set.errors.is_empty() {
            return Err(invalid(set.errors.into_iter().map(|source_error| source_error.error).collect()));
        }
        let planned: Vec<Planned> = documents
            .into_iter()
            .map(|document| self.plan_document(document))
            .collect::<Result<_, _>>()
            .map_err(invalid)?;
        planned.iter().try_for_each(|file| self.check_owner(file))?;
        Ok((planned, warnings))
    }

    fn plan_document(&self, document: Document) -> Result<Planned, Vec<ManifestError>> {
        let Document { kind, mut value, .. } = document;
        let text =
            |pointer: &str| value.pointer(pointer).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
        let name = text("/metadata/name");
        let written = Some(text("/metadata/namespace")).filter(|n| !n.is_empty());
        let namespace = kind.is_namespaced().then(|| written.unwrap_or_else(|| "default".to_owned()));
        if let Some(object) = value.as_object_mut() {
            object.entry("apiVersion").or_insert(json!("v1"));
            object.entry("kind").or_insert(json!(kind.as_str()));
            if let Some(metadata) = object.get_mut("metadata").and_then(|m| m.as_object_mut())
                && let Some(namespace) = &namespace
            {
                metadata.insert("namespace".into(), json!(namespace));
            }
        }
        let path = self.folder.join(file_name(kind, namespace.as_deref().unwrap_or_default(), &name));
        let mut bytes = format!("{value:#}").into_bytes();
        bytes.push(b'\n');
        let content = parse_file(&bytes, &path.to_string_lossy(), &self.rules)?;
        Ok(Planned { path, bytes, content })
    }

    /// The origin of the pod with this name in a configured source.
    fn configured_origin(&self, name: &PodFullName) -> Option<String> {
        CONFIGURED.into_iter().find_map(|source| self.desired.find(source, name)).map(|(_, origin)| origin)
    }

    fn check_owner(&self, file: &Planned) -> Result<(), StoreError> {
        for pod in &file.content.pods {
            let what = format!("the pod {}/{}", pod.namespace, pod.name);
            if let Some(origin) = self.configured_origin(&pod.full_name()) {
                return Err(StoreError::OwnedBySource { what, origin });
            }
            if let Some(other) = self.desired.pod(&pod.uid)
                && other.pod.full_name() != pod.full_name()
            {
                return Err(StoreError::OwnedBySource {
                    what: format!("the UID {}", pod.uid),
                    origin: other.pod.origin.clone(),
                });
            }
        }
        for object in &file.content.objects {
            let of = |source| self.desired.object_origin(source, &object.key);
            if let Some(origin) = CONFIGURED.into_iter().find_map(of) {
                return Err(StoreError::OwnedBySource { what: format!("the {}", object.key), origin });
            }
        }
        Ok(())
    }

    async fn delete(&mut self, wanted: &ObjectName) -> Result<String, StoreError> {
        if !self.read {
            return Err(StoreError::NotRead { path: self.folder.clone() });
        }
        let (uid, path) = self.stored(wanted)?;
        let target = path.clone();
        match self.blocking(move || remove(Path::new(&target))).await {
            None => return Err(StoreError::ShuttingDown),
            Some(Err((path, source))) => return Err(StoreError::Write { path, source }),
            Some(Ok(())) => {}
        }
        self.files.remove(&path);
        self.publish();
        Ok(uid)
    }

    /// The UID and the file of the object. Without a kind, objects of other sources count too, so that the name is never taken
    /// for another object than the caller means.
    fn stored(&self, wanted: &ObjectName) -> Result<(String, String), StoreError> {
        let namespace = if wanted.namespace.is_empty() { "default" } else { &wanted.namespace };
        let kinds = KINDS.into_iter().filter(|kind| wanted.kind.is_none_or(|wanted| wanted == *kind));
        let mut found: Vec<Found> =
            kinds.filter_map(|kind| self.find(kind, namespace, &wanted.name)).collect();
        let one = match found.len() {
            0 => {
                let what = wanted.kind.map_or_else(
                    || format!("{namespace}/{}", wanted.name),
                    |kind| description(kind, namespace, &wanted.name),
                );
                return Err(StoreError::Unknown { kind: wanted.kind, what });
            }
            1 => found.remove(0),
            _ => {
                let found = found.into_iter().map(|object| object.what).collect();
                return Err(StoreError::Ambiguous { name: wanted.name.clone(), found });
            }
        };
        let Found { what, uid, place } = one;
        match place {
            Place::Other(origin) => Err(StoreError::OwnedBySource { what, origin }),
            Place::Stored(path) => {
                let all = self.files.content(&path).map_or(0, |all| all.pods.len() + all.objects.len());
                if all > 1 {
                    return Err(StoreError::Shared { what, path: path.into() });
                }
                Ok((uid, path))
            }
        }
    }

    /// The object of this kind and name, stored here or else in another source.
    fn find(&self, kind: Kind, namespace: &str, name: &str) -> Option<Found> {
        if kind == Kind::Pod {
            return self.find_pod(namespace, name);
        }
        let key = object_key(kind, namespace, name);
        let holds = |content: &FileContent| content.objects.iter().any(|object| object.key == key);
        let path = self.files.paths().find(|path| self.files.content(path).is_some_and(holds));
        let place = match path {
            Some(path) => Place::Stored(path.to_owned()),
            None => {
                Place::Other(OTHERS.into_iter().find_map(|other| self.desired.object_origin(other, &key))?)
            }
        };
        Some(Found { what: description(kind, namespace, name), uid: String::new(), place })
    }

    /// The pod with exactly this name, else with the node's name appended.
    fn find_pod(&self, namespace: &str, name: &str) -> Option<Found> {
        let names = [name.to_owned(), self.rules.name_on_node(name)];
        let found = |name: &str, uid: String, place: Place| Found {
            what: description(Kind::Pod, namespace, name),
            uid,
            place,
        };
        let stored = names.iter().find_map(|name| {
            let full = PodFullName::new(name, namespace);
            self.files.paths().find_map(|path| {
                let pod = self.files.content(path)?.pods.iter().find(|pod| pod.full_name() == full)?;
                Some(found(name, pod.uid.clone(), Place::Stored(path.to_owned())))
            })
        });
        stored.or_else(|| {
            names.iter().find_map(|name| {
                let full = PodFullName::new(name, namespace);
                let (_, origin) = OTHERS.into_iter().find_map(|other| self.desired.find(other, &full))?;
                Some(found(name, String::new(), Place::Other(origin)))
            })
        })
    }
}

/// `the pod default/web`, `the Secret default/key`, `the PersistentVolume disk`.
fn description(kind: Kind, namespace: &str, name: &str) -> String {
    match kind {
        Kind::Pod => format!("the pod {namespace}/{name}"),
        Kind::Secret | Kind::ConfigMap | Kind::PersistentVolume | Kind::PersistentVolumeClaim => {
            format!("the {}", object_key(kind, namespace, name))
        }
    }
}

fn object_key(kind: Kind, namespace: &str, name: &str) -> ObjectKey {
    let namespace = if kind.is_namespaced() { namespace } else { "" };
    ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() }
}

/// The messages of the warnings about one pod.
fn warnings_of_pod(warnings: &[ManifestWarning], name: &PodFullName) -> Vec<String> {
    let matching = warnings.iter().filter(|warning| warning.pod.as_ref() == Some(name));
    matching.map(|warning| warning.message.clone()).collect()
}
