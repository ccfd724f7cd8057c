//! What the files of one source add up to.
//!
//! Parity: the kubelet drops a pod whose manifest no longer parses at its next rescan, and lets the later of two
//! files with one pod's name win without a word. Here the last good version of a file goes on until the file is
//! good again or gone, and of several files with one name the one that has it keeps it, so that no running pod gives
//! way to a copy; where none has it yet, the first in the order of paths. The problem names both.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::PodFullName;

use crate::error::{ManifestError, Why};
use crate::merge::SourcePod;
use crate::object::ObjectKey;
use crate::offline::WaitingPod;
use crate::parse::{FileContent, ManifestWarning};
use crate::static_pod::StaticPod;

/// The files of one source, each with its last good content.
#[derive(Debug, Default)]
pub struct SourceFiles {
    files: BTreeMap<String, FileState>,
    holders: Holders,
}

/// The file whose definition counts, for each name of a pod or an object.
pub type Holders = BTreeMap<String, String>;

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
    /// Its pods, in the order of their paths.
    pub pods: Vec<SourcePod>,
    /// Its Secrets and ConfigMaps.
    pub objects: BTreeMap<ObjectKey, SourceObject>,
    /// What is refused.
    pub problems: Vec<Problem>,
    /// Pods that do not start before the control plane answers.
    pub waiting: Vec<WaitingPod>,
    /// What is not used as it was written, with the file that it stands in.
    pub warnings: Vec<(String, ManifestWarning)>,
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
    /// No files yet; `holders` is what an earlier run of the service had, see [`SourceFiles::holders`].
    pub fn resuming(holders: Holders) -> Self {
        Self { files: BTreeMap::new(), holders }
    }

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
        self.holders.retain(|_, origin| origin != path);
        self.files.remove(path).is_some()
    }

    /// Every file has been read: what an earlier run knew of others does not count any more.
    pub fn all_are_known(&mut self) {
        self.holders.retain(|_, origin| self.files.contains_key(origin));
    }

    /// By name, the file whose definition counts since the last [`SourceFiles::assemble`]; of files that have not been
    /// read yet, what an earlier run said.
    pub fn holders(&self) -> &Holders {
        &self.holders
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
    pub fn assemble(&mut self) -> SourceSet {
        let mut set = SourceSet::default();
        for (path, file) in &self.files {
            let kept: Vec<_> = file.good.pods.iter().map(StaticPod::full_name).collect();
            set.problems.extend(file.errors.iter().map(|error| Problem {
                origin: path.clone(),
                error: error.clone(),
                kept: kept.clone(),
            }));
            let warnings = file.good.warnings.iter().cloned();
            set.warnings.extend(warnings.map(|warning| (path.clone(), warning)));
        }
        let mut holders = Holders::new();
        self.take_pods(&mut set, &mut holders);
        self.take_objects(&mut set, &mut holders);
        let unread = |(_, origin): &(&String, &String)| !self.files.contains_key(origin.as_str());
        for (name, origin) in self.holders.iter().filter(unread) {
            holders.entry(name.clone()).or_insert_with(|| origin.clone());
        }
        self.holders = holders;
        set
    }

    /// What all files say of one kind, those that hold their name first.
    fn claims<'a, T>(
        &'a self,
        of: impl Fn(&'a FileContent) -> &'a [T],
        name: impl Fn(&T) -> String,
    ) -> Vec<Claim<'a, T>> {
        let all =
            self.files.iter().flat_map(|(path, file)| of(&file.good).iter().map(move |what| (path, what)));
        let mut claims: Vec<_> = all
            .enumerate()
            .map(|(place, (path, what))| Claim { place, path, name: name(what), what })
            .collect();
        // Stable: among equals the order of paths stays.
        claims.sort_by_key(|claim| self.holders.get(&claim.name) != Some(claim.path));
        claims
    }

    fn take_pods(&self, set: &mut SourceSet, holders: &mut Holders) {
        let mut names: BTreeMap<String, String> = BTreeMap::new();
        let mut uids: BTreeMap<&str, String> = BTreeMap::new();
        let mut taken = BTreeMap::new();
        for Claim { place, path, name, what: pod } in
            self.claims(|good| &good.pods, |pod| pod_key(&pod.namespace, &pod.name))
        {
            let first =
                names.get(&name).map(|first| (format!("the pod {}/{}", pod.namespace, pod.name), first));
            let first = first
                .or_else(|| uids.get(pod.uid.as_str()).map(|first| (format!("the UID {}", pod.uid), first)));
            if let Some((what, first)) = first {
                let at = (pod.document, pod.line);
                set.problems.push(duplicate(path, at, &what, first, Some(pod.full_name())));
                continue;
            }
            let here = format!("{path}:{}", pod.line);
            uids.insert(&pod.uid, here.clone());
            names.insert(name.clone(), here);
            holders.insert(name, path.clone());
            taken.insert(place, SourcePod::of(pod, path));
        }
        set.pods = taken.into_values().collect();
    }

    fn take_objects(&self, set: &mut SourceSet, holders: &mut Holders) {
        for Claim { path, name, what: object, .. } in
            self.claims(|good| &good.objects, |object| object_key(&object.key))
        {
            let key = &object.key;
            if let Some(first) = set.objects.get(key) {
                let what = format!("the {} {}/{}", key.kind.as_str(), key.namespace, key.name);
                let first = format!("{}:{}", first.origin, first.line);
                set.problems.push(duplicate(path, (object.document, object.line), &what, &first, None));
                continue;
            }
            holders.insert(name, path.clone());
            let entry =
                SourceObject { json: Arc::clone(&object.json), origin: path.clone(), line: object.line };
            set.objects.insert(key.clone(), entry);
        }
    }
}

/// One file's definition of a pod or an object.
struct Claim<'a, T> {
    /// Its place in the order of paths.
    place: usize,
    path: &'a String,
    name: String,
    what: &'a T,
}

fn pod_key(namespace: &str, name: &str) -> String {
    format!("Pod {namespace}/{name}")
}

fn object_key(key: &ObjectKey) -> String {
    format!("{} {}/{}", key.kind.as_str(), key.namespace, key.name)
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
