//! Reads the manifest files named on the command line.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use keelson_config::{KUBELET_KIND, MANIFEST_LIMIT};
use serde_json::Value;

use crate::error::CliError;

const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];
/// The kinds of [`ObjectKind`] for messages.
pub(crate) const KINDS: &str = "Pod, Secret, ConfigMap, PersistentVolume or PersistentVolumeClaim";

/// A manifest file.
#[derive(Debug)]
pub(crate) struct ManifestFile {
    /// The path as given; `standard input` for `-`.
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
}

/// The name of an object in a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedObject {
    pub(crate) kind: ObjectKind,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// `spec.nodeName` of a pod; empty if not set.
    pub(crate) node: String,
}

/// The kinds that pod-config stores, in the order of their deletion: what uses another object goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub(crate) enum ObjectKind {
    Pod,
    ConfigMap,
    Secret,
    PersistentVolumeClaim,
    PersistentVolume,
}

impl ObjectKind {
    /// The name of the kind.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::PersistentVolumeClaim => "PersistentVolumeClaim",
            Self::PersistentVolume => "PersistentVolume",
        }
    }

    /// The kind of the field `kind`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Pod, Self::ConfigMap, Self::Secret, Self::PersistentVolumeClaim, Self::PersistentVolume]
            .into_iter()
            .find(|kind| kind.as_str() == text)
    }

    /// Whether objects of this kind have a namespace.
    pub(crate) fn is_namespaced(self) -> bool {
        match self {
            Self::Pod | Self::ConfigMap | Self::Secret | Self::PersistentVolumeClaim => true,
            Self::PersistentVolume => false,
        }
    }

    /// Whether it is a claim or a PersistentVolume, which others use.
    pub(crate) fn is_volume_object(self) -> bool {
        match self {
            Self::Pod | Self::ConfigMap | Self::Secret => false,
            Self::PersistentVolumeClaim | Self::PersistentVolume => true,
        }
    }

    /// The name of the kind in the command line, in the plural: `persistentvolumes`.
    pub(crate) fn plural(self) -> String {
        format!("{}s", self.as_str().to_lowercase())
    }

    /// Kind and name for messages: `configmap/settings`.
    pub(crate) fn label(self, name: &str) -> String {
        format!("{}/{name}", self.as_str().to_lowercase())
    }
}

/// The files that the arguments name, folders expanded, in order.
///
/// # Errors
/// An argument does not exist or names a folder without manifests.
pub(crate) fn paths(arguments: &[PathBuf]) -> Result<Vec<PathBuf>, CliError> {
    let mut paths = Vec::new();
    for argument in arguments {
        if argument.as_os_str() != "-" && argument.is_dir() {
            paths.extend(in_folder(argument)?);
        } else {
            paths.push(argument.clone());
        }
    }
    Ok(paths)
}

fn in_folder(folder: &Path) -> Result<Vec<PathBuf>, CliError> {
    let fail = |source| CliError::Read { path: folder.to_owned(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let hidden = path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
        let manifest = path.extension().and_then(|e| e.to_str()).is_some_and(|e| EXTENSIONS.contains(&e));
        if manifest && !hidden && path.is_file() {
            found.push(path);
        }
    }
    if found.is_empty() {
        return Err(CliError::Manifest {
            path: folder.to_owned(),
            reason: "no *.yaml, *.yml or *.json in this folder".into(),
        });
    }
    found.sort();
    Ok(found)
}

/// Reads a file, or standard input for `-`.
///
/// # Errors
/// The file cannot be read, or reaches the limit of pod-config.
pub(crate) fn read(path: &Path) -> Result<ManifestFile, CliError> {
    let mut bytes = Vec::new();
    let limit = MANIFEST_LIMIT as u64;
    let (path, read) = if path.as_os_str() == "-" {
        (PathBuf::from("standard input"), io::stdin().lock().take(limit).read_to_end(&mut bytes))
    } else {
        (path.to_owned(), fs::File::open(path).and_then(|f| f.take(limit).read_to_end(&mut bytes)))
    };
    if let Err(source) = read {
        return Err(CliError::Read { path, source });
    }
    if bytes.len() >= MANIFEST_LIMIT {
        let limit = MANIFEST_LIMIT >> 20;
        return Err(CliError::Manifest {
            path,
            reason: format!("{limit} MiB or more; a manifest has to be smaller"),
        });
    }
    Ok(ManifestFile { path, bytes })
}

/// The documents of a file.
///
/// # Errors
/// The file is neither YAML nor JSON.
pub(crate) fn documents(file: &ManifestFile) -> Result<Vec<Value>, CliError> {
    let wrong = |reason: String| CliError::Manifest { path: file.path.clone(), reason };
    let text = std::str::from_utf8(&file.bytes).map_err(|e| wrong(format!("not UTF-8: {e}")))?;
    serde_saphyr::from_multiple(text)
        .map_err(|e| wrong(e.to_string().lines().next().unwrap_or("neither YAML nor JSON").to_owned()))
}

/// The objects in a file, in the order of their deletion.
///
/// # Errors
/// The file is neither YAML nor JSON, or contains none of them.
pub(crate) fn objects(file: &ManifestFile) -> Result<Vec<NamedObject>, CliError> {
    let mut objects = Vec::new();
    let documents = documents(file)?;
    for document in &documents {
        collect(document, &mut objects);
    }
    if objects.is_empty() {
        let reason = if documents.iter().any(|document| document["kind"] == KUBELET_KIND) {
            format!("a {KUBELET_KIND} cannot be deleted by its file: use `keelson delete config --etcd …`")
        } else {
            format!("no {KINDS} in this manifest")
        };
        return Err(CliError::Manifest { path: file.path.clone(), reason });
    }
    objects.sort_by_key(|object| object.kind);
    Ok(objects)
}

fn collect(document: &Value, objects: &mut Vec<NamedObject>) {
    let kind = match document["kind"].as_str() {
        None => ObjectKind::Pod,
        Some("List" | "PodList") => {
            for item in document["items"].as_array().into_iter().flatten() {
                collect(item, objects);
            }
            return;
        }
        Some(kind) => match ObjectKind::parse(kind) {
            Some(kind) => kind,
            None => return,
        },
    };
    if let Some(name) = document["metadata"]["name"].as_str() {
        let written = document["metadata"]["namespace"].as_str().filter(|n| !n.is_empty());
        let namespace = if kind.is_namespaced() { written.unwrap_or("default") } else { "" };
        let node = document["spec"]["nodeName"].as_str().unwrap_or_default();
        objects.push(NamedObject { kind, namespace: namespace.into(), name: name.into(), node: node.into() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Result<Vec<String>, String> {
        let file = ManifestFile { path: "x.yaml".into(), bytes: text.as_bytes().to_vec() };
        objects(&file)
            .map(|list| {
                list.iter()
                    .map(|o| format!("{} in {}", o.kind.label(&o.name), o.namespace).trim_end().to_owned())
                    .collect()
            })
            .map_err(|e| e.to_string())
    }

    #[test]
    fn objects_that_others_use_are_read_after_those_that_use_them() {
        let yaml = "kind: PersistentVolume\nmetadata: {name: disk, namespace: web}\n---\n\
                    kind: PersistentVolumeClaim\nmetadata: {name: db, namespace: web}\n---\n\
                    kind: Pod\nmetadata: {name: db, namespace: web}\n";
        assert_eq!(
            names(yaml).unwrap(),
            ["pod/db in web", "persistentvolumeclaim/db in web", "persistentvolume/disk in"]
        );
    }

    #[test]
    fn manifest_objects_are_read_from_documents_and_lists_pods_first() {
        let yaml = "kind: ConfigMap\nmetadata: {name: c}\n---\nkind: Pod\nmetadata: {name: a}\n---\n\
                    kind: Service\nmetadata: {name: s}\n---\n\
                    kind: PodList\nitems:\n- metadata: {name: b, namespace: web}\n";
        assert_eq!(names(yaml).unwrap(), ["pod/a in default", "pod/b in web", "configmap/c in default"]);
        assert_eq!(names(r#"{"kind": "Pod", "metadata": {"name": "j"}}"#).unwrap(), ["pod/j in default"]);
    }

    #[test]
    fn manifest_without_an_object_is_an_error_with_its_file() {
        assert_eq!(
            names("kind: Service\n").unwrap_err(),
            "x.yaml: no Pod, Secret, ConfigMap, PersistentVolume or PersistentVolumeClaim in this manifest"
        );
        assert!(names("a: [").unwrap_err().starts_with("x.yaml: "));
        let config = names("kind: KubeletConfiguration\n").unwrap_err();
        assert!(config.contains("`keelson delete config --etcd …`"), "{config}");
    }

    #[test]
    fn folder_is_expanded_to_its_sorted_manifests() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.yaml", "a.json", ".hidden.yaml", "notes.txt"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let found = paths(&[dir.path().to_owned(), "-".into()]).unwrap();
        let names: Vec<_> = found.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a.json", "b.yaml", "-"]);
    }

    #[test]
    fn a_manifest_of_10_mib_is_refused_and_one_byte_less_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("huge.yaml");
        let limit = 10 << 20;
        fs::File::create(&path).unwrap().set_len(limit).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("10 MiB or more"));
        fs::File::create(&path).unwrap().set_len(limit - 1).unwrap();
        assert!(read(&path).is_ok());
    }
}
