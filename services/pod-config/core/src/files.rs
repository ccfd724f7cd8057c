//! Combines the files of one source.
//!
//! Parity: the kubelet drops a pod at the next rescan after its manifest became invalid, and silently lets the later of two files
//! with one pod's name win. Here the last good version of a file is used until the file is valid again or deleted. If several
//! files define one name, the file that owns the name keeps it, so that a copy never displaces a running pod; without an owner
//! the first path wins. The error names both files.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::PodFullName;

use crate::desired_pod::DesiredPod;
use crate::error::{ManifestError, ManifestErrorKind};
use crate::object::{ObjectKey, StoredObject};
use crate::offline::WaitingPod;
use crate::parse::{FileContent, ManifestWarning};

/// The files of one source, each with its last good content.
#[derive(Debug, Default)]
pub struct SourceFiles {
    files: BTreeMap<String, FileState>,
    name_owners: NameOwners,
}

/// For each pod or object, the file whose definition is used.
pub type NameOwners = BTreeMap<String, String>;

#[derive(Debug, Default)]
struct FileState {
    last_good: FileContent,
    errors: Vec<ManifestError>,
}

/// An error in a manifest of a source, or in a part of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceError {
    /// The file.
    pub origin: String,
    /// What is wrong.
    pub error: ManifestError,
    /// The pods that keep running with the last good version of the file.
    pub kept_pods: Vec<PodFullName>,
}

/// The complete content of a source at one moment.
#[derive(Debug, Default)]
pub struct SourceSet {
    /// Its pods, ordered by path.
    pub pods: Vec<Arc<DesiredPod>>,
    /// Its other objects.
    pub objects: BTreeMap<ObjectKey, Arc<StoredObject>>,
    /// Errors of rejected files and documents.
    pub errors: Vec<SourceError>,
    /// Pods that wait for the control plane before they start.
    pub waiting: Vec<WaitingPod>,
    /// What is not used as it was written, with its file.
    pub warnings: Vec<(String, ManifestWarning)>,
}

impl SourceFiles {
    /// A source without files; `name_owners` are those of the run before the restart, see [`SourceFiles::name_owners`].
    pub fn restore(name_owners: NameOwners) -> Self {
        Self { files: BTreeMap::new(), name_owners }
    }

    /// Takes the result of reading a file. After an error its last good content stays in use. Pods and objects that are the same
    /// as before keep their records.
    pub fn update(&mut self, path: &str, reading: Result<FileContent, Vec<ManifestError>>) {
        let file = self.files.entry(path.to_owned()).or_default();
        match reading {
            Ok(content) => {
                // The checkpoint bytes are written once and not kept in memory.
                let pods = with_known_records(content.pods, &file.last_good.pods, |pod| &pod.uid);
                let objects =
                    with_known_records(content.objects, &file.last_good.objects, |object| &object.key);
                file.last_good = FileContent { pods, objects, checkpoint: Vec::new(), ..content };
                file.errors.clear();
            }
            Err(errors) => file.errors = errors,
        }
    }

    /// Takes the last good content of a file from the checkpoint. It is used until the file has been read successfully; content
    /// that has been read already is not replaced.
    pub fn restore_content(&mut self, path: &str, content: FileContent) {
        let file = self.files.entry(path.to_owned()).or_default();
        if file.last_good.pods.is_empty() && file.last_good.objects.is_empty() {
            file.last_good = FileContent { checkpoint: Vec::new(), ..content };
        }
    }

    /// Removes a file and its content. Returns whether it was known.
    pub fn remove(&mut self, path: &str) -> bool {
        self.name_owners.retain(|_, origin| origin != path);
        self.files.remove(path).is_some()
    }

    /// Drops the restored owners of files that have not been read; call it after all files have been read.
    pub fn forget_unread_owners(&mut self) {
        self.name_owners.retain(|_, origin| self.files.contains_key(origin));
    }

    /// For each name, the file whose definition is used since the last [`SourceFiles::assemble`]; for files that have not been
    /// read yet, as restored.
    pub fn name_owners(&self) -> &NameOwners {
        &self.name_owners
    }

    /// The known paths.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Whether no file is known, valid or not.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The last good content of a file.
    pub fn content(&self, path: &str) -> Option<&FileContent> {
        self.files.get(path).map(|file| &file.last_good)
    }

    /// Builds the current set of the source. It shares the records of pods and objects with the files, so that those of unchanged
    /// files are the same records each time.
    pub fn assemble(&mut self) -> SourceSet {
        let mut set = SourceSet::default();
        for (path, file) in &self.files {
            let kept_pods: Vec<_> = file.last_good.pods.iter().map(|pod| pod.full_name()).collect();
            set.errors.extend(file.errors.iter().map(|error| SourceError {
                origin: path.clone(),
                error: error.clone(),
                kept_pods: kept_pods.clone(),
            }));
            let warnings = file.last_good.warnings.iter().cloned();
            set.warnings.extend(warnings.map(|warning| (path.clone(), warning)));
        }
        let mut name_owners = NameOwners::new();
        self.collect_pods(&mut set, &mut name_owners);
        self.collect_objects(&mut set, &mut name_owners);
        let unread = |(_, origin): &(&String, &String)| !self.files.contains_key(origin.as_str());
        for (name, origin) in self.name_owners.iter().filter(unread) {
            name_owners.entry(name.clone()).or_insert_with(|| origin.clone());
        }
        self.name_owners = name_owners;
        set
    }

    /// All definitions of one kind, the owners of their names first.
    fn definitions<'a, T>(
        &'a self,
        of: impl Fn(&'a FileContent) -> &'a [T],
        name: impl Fn(&T) -> String,
    ) -> Vec<Definition<'a, T>> {
        let all = self
            .files
            .iter()
            .flat_map(|(path, file)| of(&file.last_good).iter().map(move |item| (path, item)));
        let mut definitions: Vec<_> = all
            .enumerate()
            .map(|(index, (path, item))| Definition { index, path, name: name(item), item })
            .collect();
        // The sort is stable: definitions of the same rank stay in the order of paths.
        definitions.sort_by_key(|definition| self.name_owners.get(&definition.name) != Some(definition.path));
        definitions
    }

    fn collect_pods(&self, set: &mut SourceSet, name_owners: &mut NameOwners) {
        let mut names: BTreeMap<String, String> = BTreeMap::new();
        let mut uids: BTreeMap<&str, String> = BTreeMap::new();
        let mut pods = BTreeMap::new();
        for Definition { index, path, name, item: pod } in
            self.definitions(|last_good| &last_good.pods, |pod| pod_key(&pod.namespace, &pod.name))
        {
            let first =
                names.get(&name).map(|first| (format!("the pod {}/{}", pod.namespace, pod.name), first));
            let first = first
                .or_else(|| uids.get(pod.uid.as_str()).map(|first| (format!("the UID {}", pod.uid), first)));
            if let Some((what, first)) = first {
                let at = (pod.document, pod.line);
                set.errors.push(duplicate(path, at, &what, first, Some(pod.full_name())));
                continue;
            }
            let here = format!("{path}:{}", pod.line);
            uids.insert(&pod.uid, here.clone());
            names.insert(name.clone(), here);
            name_owners.insert(name, path.clone());
            pods.insert(index, Arc::clone(pod));
        }
        set.pods = pods.into_values().collect();
    }

    fn collect_objects(&self, set: &mut SourceSet, name_owners: &mut NameOwners) {
        for Definition { path, name, item: object, .. } in
            self.definitions(|last_good| &last_good.objects, |object| object_key(&object.key))
        {
            let key = &object.key;
            if let Some(first) = set.objects.get(key) {
                let what = format!("the {key}");
                let first = format!("{}:{}", first.origin, first.line);
                set.errors.push(duplicate(path, (object.document, object.line), &what, &first, None));
                continue;
            }
            name_owners.insert(name, path.clone());
            set.objects.insert(key.clone(), Arc::clone(object));
        }
    }
}

/// The records `new`, of which those that equal a known one are replaced by it.
fn with_known_records<T: PartialEq, K: Ord + ?Sized>(
    new: Vec<Arc<T>>,
    known: &[Arc<T>],
    key: impl Fn(&T) -> &K,
) -> Vec<Arc<T>> {
    let known: BTreeMap<&K, &Arc<T>> = known.iter().map(|known| (key(known), known)).collect();
    let same = |new: Arc<T>| match known.get(key(&new)) {
        Some(known) if **known == new => Arc::clone(known),
        _ => new,
    };
    new.into_iter().map(same).collect()
}

/// One file's definition of a pod or an object.
struct Definition<'a, T> {
    /// Its index in the order of paths.
    index: usize,
    path: &'a String,
    name: String,
    item: &'a T,
}

fn pod_key(namespace: &str, name: &str) -> String {
    format!("Pod {namespace}/{name}")
}

fn object_key(key: &ObjectKey) -> String {
    key.to_string()
}

fn duplicate(path: &str, at: (u32, u32), what: &str, first: &str, pod: Option<PodFullName>) -> SourceError {
    let (document, line) = at;
    SourceError {
        origin: path.to_owned(),
        error: ManifestError {
            document,
            line,
            pod,
            ..ManifestError::file(
                ManifestErrorKind::Duplicate,
                format!(
                    "{what} is already defined in {first}; this definition is ignored, remove one of the two"
                ),
            )
        },
        kept_pods: Vec::new(),
    }
}
