//! The records of pulls on disk: `<root>/image_manager/{pulling,pulled}`, the kubelet's own files
//! (runtime-and-resources.md §6.5). Which of them says what is decided in the core.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use keelson_config::ImagePulls;
use keelson_runtime_shim_core::keyring::{Credential, Origin};
use keelson_runtime_shim_core::pull_record::{Access, Intent, Policy, Record, access, file_name};

/// A file of the records cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act} {}", path.display())]
pub struct RecordError {
    act: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl RecordError {
    /// The thread that was to do it is gone.
    pub(crate) fn lost(error: tokio::task::JoinError) -> Self {
        Self { act: "use", path: "image_manager".into(), source: io::Error::other(error) }
    }
}

/// Keeps the records. Every call but [`Self::none`] and [`Self::new`] reads or writes files and may block.
#[derive(Debug, Clone)]
pub struct Records(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// `None`: nothing is recorded.
    folder: Option<PathBuf>,
    policy: Policy,
    /// How many pulls of each image go on. Held while files are read and written.
    pulling: Mutex<BTreeMap<String, usize>>,
}

/// A pull whose intent is on disk.
#[derive(Debug)]
pub struct Intended {
    records: Records,
    image: String,
}

impl Records {
    /// Records nothing: every image is for everybody.
    pub fn none() -> Self {
        Self::with(None, Policy::Never)
    }

    /// Below the agent's root folder.
    pub fn new(root: &Path, config: &ImagePulls) -> Self {
        let policy = Policy::parse(&config.credentials_verification, &config.preloaded_allowlist);
        Self::with(Some(root.join("image_manager")), policy)
    }

    fn with(folder: Option<PathBuf>, policy: Policy) -> Self {
        Self(Arc::new(Inner { folder, policy, pulling: Mutex::default() }))
    }

    fn pulling(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.pulling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, folder: &str, image: &str) -> Option<PathBuf> {
        Some(self.0.folder.as_ref()?.join(folder).join(file_name(image)))
    }

    fn record(&self, image_ref: &str) -> Option<Record> {
        Record::parse(&fs::read(self.path("pulled", image_ref)?).ok()?)
    }

    /// Whether a pod with `credentials` may use the image that is there.
    pub fn access(
        &self,
        reference: &str,
        repository: &str,
        image_ref: &str,
        credentials: &[(Credential, Origin)],
    ) -> Access {
        let record = self.record(image_ref);
        let intended = self.path("pulling", reference).is_some_and(|path| path.exists());
        access(&self.0.policy, repository, record.as_ref(), intended, credentials)
    }

    /// Writes down that a pull begins.
    ///
    /// # Errors
    /// The file cannot be written; nothing may be pulled then.
    pub fn begin(&self, reference: &str) -> Result<Intended, RecordError> {
        let intended = Intended { records: self.clone(), image: reference.to_owned() };
        let mut pulling = self.pulling();
        if let Some(path) = self.path("pulling", reference) {
            write(&path, &serde_json::to_vec(&Intent::of(reference)).unwrap_or_default())?;
        }
        *pulling.entry(reference.to_owned()).or_default() += 1;
        drop(pulling);
        Ok(intended)
    }

    /// Writes down with what an image was pulled or may be used, `None` for nothing.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn note(
        &self,
        repository: &str,
        image_ref: &str,
        used: Option<&(Credential, Origin)>,
    ) -> Result<(), RecordError> {
        let Some(path) = self.path("pulled", image_ref) else { return Ok(()) };
        let _in_turn = self.pulling();
        let now = now();
        let mut record = self.record(image_ref).unwrap_or_else(|| Record::of(image_ref, &now));
        if !record.note(repository, used, &now) {
            return Ok(());
        }
        write(&path, &serde_json::to_vec(&record).unwrap_or_default())
    }

    /// The images whose pulls were cut off by the end of an earlier agent.
    pub fn cut_off(&self) -> Vec<String> {
        let Some(folder) = self.0.folder.as_ref().map(|folder| folder.join("pulling")) else {
            return Vec::new();
        };
        let pulling = self.pulling();
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        let intents = files.filter_map(|file| Intent::parse(&fs::read(file.path()).ok()?));
        intents.map(|intent| intent.image).filter(|image| !pulling.contains_key(image)).collect()
    }

    /// Settles a pull that was cut off: an image that is there was pulled with nobody knows what.
    ///
    /// # Errors
    /// The record cannot be written; the intent stays.
    pub fn settle(&self, reference: &str, image_ref: Option<&str>) -> Result<(), RecordError> {
        let pulling = self.pulling();
        if pulling.contains_key(reference) {
            return Ok(());
        }
        if let Some(image_ref) = image_ref
            && self.record(image_ref).is_none()
            && let Some(path) = self.path("pulled", image_ref)
        {
            write(&path, &serde_json::to_vec(&Record::of(image_ref, &now())).unwrap_or_default())?;
        }
        self.forget_intent(reference);
        Ok(())
    }

    fn forget_intent(&self, reference: &str) {
        if let Some(path) = self.path("pulling", reference)
            && let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove the record of a pull that is over");
        }
    }

    /// Forgets images that the runtime did not list at `listed_at`. How many.
    pub fn prune(&self, listed: &BTreeSet<String>, listed_at: SystemTime) -> usize {
        let Some(folder) = self.0.folder.as_ref().map(|folder| folder.join("pulled")) else { return 0 };
        let _in_turn = self.pulling();
        let gone = |path: &Path| {
            let record = fs::read(path).ok().and_then(|text| Record::parse(&text));
            // One that was written since belongs to an image that has come since.
            let before = fs::metadata(path).and_then(|found| found.modified()).is_ok_and(|at| at < listed_at);
            before && record.is_some_and(|record| !listed.contains(&record.image_ref))
        };
        let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
        files.filter(|path| gone(path) && fs::remove_file(path).is_ok()).count()
    }

    /// How many files each of the two folders holds: `pulling`, `pulled`.
    pub fn counts(&self) -> (usize, usize) {
        let count = |name: &str| {
            let folder = self.0.folder.as_ref().map(|folder| folder.join(name));
            folder.map_or(0, |folder| fs::read_dir(folder).into_iter().flatten().flatten().count())
        };
        (count("pulling"), count("pulled"))
    }
}

impl Drop for Intended {
    /// The pull is over, whatever has come of it.
    fn drop(&mut self) {
        let mut pulling = self.records.pulling();
        let left = pulling.get_mut(&self.image).map(|count| {
            *count -= 1;
            *count
        });
        if left == Some(0) {
            pulling.remove(&self.image);
            self.records.forget_intent(&self.image);
        }
    }
}

/// Now as RFC 3339, in whole seconds.
fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Replaces a file by rename, mode 0600 in a folder of 0700.
fn write(path: &Path, text: &[u8]) -> Result<(), RecordError> {
    let fail = |act, path: &Path| {
        let path = path.to_owned();
        move |source| RecordError { act, path, source }
    };
    if let Some(folder) = path.parent() {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(fail("make the folder", folder))?;
    }
    let unfinished = path.with_extension("tmp");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&unfinished)
        .map_err(fail("write", &unfinished))?;
    file.write_all(text).map_err(fail("write", &unfinished))?;
    fs::rename(&unfinished, path).map_err(fail("write", path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    const IMAGE: &str = "r.example/a:1";
    const REPO: &str = "r.example/a";

    fn records(root: &Path) -> Records {
        Records::new(root, &ImagePulls::default())
    }

    fn secret() -> (Credential, Origin) {
        let credential = Credential { password: "hunter2".into(), ..Credential::default() };
        (credential, Origin::Secret { uid: "1".into(), namespace: "n".into(), name: "s".into() })
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_pull_leaves_a_record_and_no_intent_and_no_secret_is_in_any_file() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        let intended = records.begin(IMAGE).unwrap();
        let intent = dir.path().join("image_manager/pulling").join(file_name(IMAGE));
        assert!(fs::read_to_string(&intent).unwrap().contains("ImagePullIntent"));
        assert_eq!((mode(&intent), mode(intent.parent().unwrap())), (0o600, 0o700));
        records.note(REPO, "sha256:1", Some(&secret())).unwrap();
        drop(intended);
        assert!(!intent.exists());
        let record = dir.path().join("image_manager/pulled").join(file_name("sha256:1"));
        let text = fs::read_to_string(&record).unwrap();
        assert!(text.contains("ImagePulledRecord") && !text.contains("hunter2"), "{text}");
        assert_eq!((mode(&record), records.counts()), (0o600, (0, 1)));
        assert_eq!(records.access(IMAGE, REPO, "sha256:1", &[]), Access::Unknown);
        assert_eq!(records.access(IMAGE, REPO, "sha256:1", &[secret()]), Access::Verified { note: None });
        assert_eq!(records.access(IMAGE, REPO, "sha256:2", &[]), Access::Open);
    }

    #[test]
    fn a_pull_that_a_kill_cut_off_leaves_an_image_that_has_to_be_shown_a_credential_for() {
        let dir = tempfile::tempdir().unwrap();
        // Killed: nothing is dropped.
        std::mem::forget(records(dir.path()).begin(IMAGE).unwrap());
        let again = records(dir.path());
        assert_eq!(again.access(IMAGE, REPO, "sha256:1", &[]), Access::Unknown);
        assert_eq!(again.cut_off(), [IMAGE]);
        again.settle(IMAGE, Some("sha256:1")).unwrap();
        assert!(again.cut_off().is_empty());
        assert_eq!(again.access("other:1", REPO, "sha256:1", &[secret()]), Access::Unknown);
        // Of an image that is not there nothing is kept.
        std::mem::forget(again.begin("b:1").unwrap());
        let third = records(dir.path());
        third.settle("b:1", None).unwrap();
        assert_eq!(third.counts(), (0, 1));
    }

    #[test]
    fn of_two_pulls_of_one_image_the_last_one_takes_the_intent_away() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        let (first, second) = (records.begin(IMAGE).unwrap(), records.begin(IMAGE).unwrap());
        drop(first);
        assert_eq!(records.counts(), (1, 0));
        assert!(records.cut_off().is_empty(), "it goes on");
        records.settle(IMAGE, None).unwrap();
        assert_eq!(records.counts(), (1, 0));
        drop(second);
        assert_eq!(records.counts(), (0, 0));
    }

    #[test]
    fn records_of_images_that_are_gone_go_and_new_ones_stay() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        for image in ["sha256:1", "sha256:2"] {
            records.note(REPO, image, None).unwrap();
        }
        let listed = BTreeSet::from(["sha256:1".to_owned()]);
        let (before, after) =
            (SystemTime::now() - Duration::from_secs(60), SystemTime::now() + Duration::from_secs(60));
        assert_eq!(records.prune(&listed, before), 0);
        assert_eq!(records.prune(&listed, after), 1);
        assert_eq!(records.access(IMAGE, REPO, "sha256:1", &[]), Access::Verified { note: None });
    }

    #[test]
    fn a_file_that_is_no_record_counts_for_nothing_and_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        let path = dir.path().join("image_manager/pulled").join(file_name("sha256:1"));
        write(&path, b"{").unwrap();
        assert_eq!(records.access(IMAGE, REPO, "sha256:1", &[]), Access::Open);
        records.note(REPO, "sha256:1", None).unwrap();
        assert!(Record::parse(&fs::read(&path).unwrap()).is_some());
    }

    #[test]
    fn without_a_place_for_the_intent_nothing_may_be_pulled() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("image_manager"), "a file").unwrap();
        let error = records(dir.path()).begin(IMAGE).unwrap_err();
        assert!(error.to_string().contains("image_manager/pulling"), "{error}");
        assert!(Records::none().begin(IMAGE).is_ok());
    }
}
