//! What the files of one source add up to.
//!
//! Parity: the kubelet drops a pod whose manifest no longer parses at its next rescan, and lets the later of two
//! files with one pod's name win without a word. Here the last good version of a file goes on until the file is
//! good again or gone, and the first file in the order of names wins, with a problem that names both.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::PodFullName;

use crate::error::{ManifestError, Why};
use crate::merge::SourcePod;
use crate::object::ObjectKey;
use crate::parse::FileContent;
use crate::static_pod::StaticPod;

/// The files of one source, each with its last good content.
#[derive(Debug, Default)]
pub struct SourceFiles {
    files: BTreeMap<String, FileState>,
}

#[derive(Debug, Default)]
struct FileState {
    good: FileContent,
    errors: Vec<ManifestError>,
}

/// A manifest, or a part of one, that is not used as it stands.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file.
    pub origin: String,
    /// What is wrong.
    pub error: ManifestError,
    /// The pods that go on with the last good version of the file.
    pub kept: Vec<PodFullName>,
}

/// Everything that a source says at one moment.
#[derive(Debug, Default)]
pub struct SourceSet {
    /// Its pods, in the order of their files.
    pub pods: Vec<SourcePod>,
    /// Its Secrets and ConfigMaps.
    pub objects: BTreeMap<ObjectKey, SourceObject>,
    /// What is refused.
    pub problems: Vec<Problem>,
}

/// A Secret or ConfigMap of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceObject {
    /// The object as JSON.
    pub json: Arc<[u8]>,
    /// The file.
    pub origin: String,
    line: u32,
}

impl SourceFiles {
    /// Takes a new reading of a file. After an error its last good content stays.
    pub fn read(&mut self, path: &str, reading: Result<FileContent, Vec<ManifestError>>) {
        let file = self.files.entry(path.to_owned()).or_default();
        match reading {
            Ok(content) => {
                // What goes to the disk is written once and not kept in memory.
                file.good = FileContent { checkpoint: Vec::new(), ..content };
                file.errors.clear();
            }
            Err(errors) => file.errors = errors,
        }
    }

    /// Takes the last good content of a file from an earlier run of the service. It stands until the file has been
    /// read well; a file that has been read well already keeps what it has.
    pub fn remember(&mut self, path: &str, content: FileContent) {
        let file = self.files.entry(path.to_owned()).or_default();
        if file.good.pods.is_empty() && file.good.objects.is_empty() {
            file.good = FileContent { checkpoint: Vec::new(), ..content };
        }
    }

    /// The file is gone, and with it what it said. Whether it was known.
    pub fn remove(&mut self, path: &str) -> bool {
        self.files.remove(path).is_some()
    }

    /// The paths that are known.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Whether nothing is known, neither good nor bad.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The good content of a file.
    pub fn content(&self, path: &str) -> Option<&FileContent> {
        self.files.get(path).map(|file| &file.good)
    }

    /// The set of the source now.
    pub fn assemble(&self) -> SourceSet {
        let mut set = SourceSet::default();
        let mut names: BTreeMap<PodFullName, String> = BTreeMap::new();
        let mut uids: BTreeMap<&str, String> = BTreeMap::new();
        for (path, file) in &self.files {
            let kept: Vec<_> = file.good.pods.iter().map(StaticPod::full_name).collect();
            set.problems.extend(file.errors.iter().map(|error| Problem {
                origin: path.clone(),
                error: error.clone(),
                kept: kept.clone(),
            }));
            for pod in &file.good.pods {
                let here = format!("{path}:{}", pod.line);
                let first = names
                    .get(&pod.full_name())
                    .map(|first| (format!("the pod {}/{}", pod.namespace, pod.name), first));
                let first = first.or_else(|| {
                    uids.get(pod.uid.as_str()).map(|first| (format!("the UID {}", pod.uid), first))
                });
                if let Some((what, first)) = first {
                    set.problems.push(duplicate(
                        path,
                        (pod.document, pod.line),
                        &what,
                        first,
                        Some(pod.full_name()),
                    ));
                    continue;
                }
                names.insert(pod.full_name(), here.clone());
                uids.insert(&pod.uid, here);
                set.pods.push(SourcePod::of(pod, path));
            }
            set.take_objects(path, &file.good);
        }
        set
    }
}

impl SourceSet {
    fn take_objects(&mut self, path: &str, content: &FileContent) {
        for object in &content.objects {
            let key = &object.key;
            if let Some(first) = self.objects.get(key) {
                let what = format!("the {} {}/{}", key.kind.as_str(), key.namespace, key.name);
                let first = format!("{}:{}", first.origin, first.line);
                self.problems.push(duplicate(path, (object.document, object.line), &what, &first, None));
                continue;
            }
            let entry =
                SourceObject { json: Arc::clone(&object.json), origin: path.to_owned(), line: object.line };
            self.objects.insert(key.clone(), entry);
        }
    }
}

fn duplicate(path: &str, at: (u32, u32), what: &str, first: &str, pod: Option<PodFullName>) -> Problem {
    let (document, line) = at;
    Problem {
        origin: path.to_owned(),
        error: ManifestError {
            document,
            line,
            pod,
            ..ManifestError::file(
                Why::Duplicate,
                format!("{what} is defined in {first} already; this one is not used, remove one of the two"),
            )
        },
        kept: Vec::new(),
    }
}
