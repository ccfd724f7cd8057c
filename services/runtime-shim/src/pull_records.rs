//! The records of pulls on disk: `<root>/image_manager/{pulling,pulled}`, the kubelet's own files
//! (runtime-and-resources.md §6.5). The core decides what they mean.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use keelson_config::ImagePulls;
use keelson_files::{Replacement, create_private_folder};
use keelson_runtime_shim_core::keyring::{Credential, Origin};
use keelson_runtime_shim_core::pull_record::{
    Access, ImagePullIntent, ImagePulledRecord, VerificationPolicy, access, file_name,
};

/// A file operation on the records failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct RecordError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl RecordError {
    /// The blocking task panicked or was cancelled.
    pub(crate) fn from_join(error: tokio::task::JoinError) -> Self {
        Self { action: "use", path: "image_manager".into(), source: io::Error::other(error) }
    }
}

/// The pull records. Every call except [`Self::none`] and [`Self::new`] reads or writes files and may block.
#[derive(Debug, Clone)]
pub struct PullRecords(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// `None`: nothing is recorded.
    folder: Option<PathBuf>,
    policy: VerificationPolicy,
    /// Number of running pulls of each image. Locked while files are read and written.
    pulling: Mutex<BTreeMap<String, usize>>,
}

/// A running pull whose intent is on disk; dropping it removes the intent.
#[derive(Debug)]
pub struct PullIntentGuard {
    records: PullRecords,
    image: String,
}

impl PullRecords {
    /// Records nothing: every pod may use every image.
    pub fn none() -> Self {
        Self::with(None, VerificationPolicy::Never)
    }

    /// Records below the agent's root folder.
    pub fn new(root: &Path, config: &ImagePulls) -> Self {
        let policy = VerificationPolicy::parse(&config.credentials_verification, &config.preloaded_allowlist);
        Self::with(Some(root.join("image_manager")), policy)
    }

    fn with(folder: Option<PathBuf>, policy: VerificationPolicy) -> Self {
        Self(Arc::new(Inner { folder, policy, pulling: Mutex::default() }))
    }

    fn pulling(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.pulling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, folder: &str, image: &str) -> Option<PathBuf> {
        Some(self.0.folder.as_ref()?.join(folder).join(file_name(image)))
    }

    fn record(&self, image_ref: &str) -> Option<ImagePulledRecord> {
        ImagePulledRecord::parse(&fs::read(self.path("pulled", image_ref)?).ok()?)
    }

    /// Decides whether a pod with `credentials` may use the present image.
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

    /// Writes the intent of a pull that begins.
    ///
    /// # Errors
    /// The file cannot be written; the image must not be pulled then.
    pub fn begin(&self, reference: &str) -> Result<PullIntentGuard, RecordError> {
        let intended = PullIntentGuard { records: self.clone(), image: reference.to_owned() };
        let mut pulling = self.pulling();
        if let Some(path) = self.path("pulling", reference) {
            write(&path, &serde_json::to_vec(&ImagePullIntent::new(reference)).unwrap_or_default())?;
        }
        *pulling.entry(reference.to_owned()).or_default() += 1;
        drop(pulling);
        Ok(intended)
    }

    /// Records the credential with which an image was pulled or may be used; `None`: without a credential.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(
        &self,
        repository: &str,
        image_ref: &str,
        used: Option<&(Credential, Origin)>,
    ) -> Result<(), RecordError> {
        let Some(path) = self.path("pulled", image_ref) else { return Ok(()) };
        let _guard = self.pulling();
        let now = now();
        let mut record = self.record(image_ref).unwrap_or_else(|| ImagePulledRecord::new(image_ref, &now));
        if !record.add(repository, used, &now) {
            return Ok(());
        }
        write(&path, &serde_json::to_vec(&record).unwrap_or_default())
    }

    /// The images whose pulls were interrupted by the end of an earlier process.
    pub fn interrupted(&self) -> Vec<String> {
        let Some(folder) = self.0.folder.as_ref().map(|folder| folder.join("pulling")) else {
            return Vec::new();
        };
        let pulling = self.pulling();
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        let intents = files.filter_map(|file| ImagePullIntent::parse(&fs::read(file.path()).ok()?));
        intents.map(|intent| intent.image).filter(|image| !pulling.contains_key(image)).collect()
    }

    /// Resolves an interrupted pull. If the image is present, it gets a record without credentials, because it is unknown
    /// with which credential it was pulled.
    ///
    /// # Errors
    /// The record cannot be written; the intent is kept.
    pub fn resolve_interrupted(&self, reference: &str, image_ref: Option<&str>) -> Result<(), RecordError> {
        let pulling = self.pulling();
        if pulling.contains_key(reference) {
            return Ok(());
        }
        if let Some(image_ref) = image_ref
            && self.record(image_ref).is_none()
            && let Some(path) = self.path("pulled", image_ref)
        {
            write(
                &path,
                &serde_json::to_vec(&ImagePulledRecord::new(image_ref, &now())).unwrap_or_default(),
            )?;
        }
        self.remove_intent(reference);
        Ok(())
    }

    fn remove_intent(&self, reference: &str) {
        if let Some(path) = self.path("pulling", reference)
            && let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove the intent of a finished pull");
        }
    }

    /// Removes the records of images that the runtime did not list at `listed_at`. Returns their number.
    pub fn prune(&self, listed: &BTreeSet<String>, listed_at: SystemTime) -> usize {
        let Some(folder) = self.0.folder.as_ref().map(|folder| folder.join("pulled")) else { return 0 };
        let _guard = self.pulling();
        let gone = |path: &Path| {
            let record = fs::read(path).ok().and_then(|text| ImagePulledRecord::parse(&text));
            // A record written after the list belongs to an image pulled after the list.
            let before = fs::metadata(path).and_then(|found| found.modified()).is_ok_and(|at| at < listed_at);
            before && record.is_some_and(|record| !listed.contains(&record.image_ref))
        };
        let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
        files.filter(|path| gone(path) && fs::remove_file(path).is_ok()).count()
    }

    /// Number of files in each of the two folders: `pulling`, `pulled`.
    pub fn counts(&self) -> (usize, usize) {
        let count = |name: &str| {
            let folder = self.0.folder.as_ref().map(|folder| folder.join(name));
            folder.map_or(0, |folder| fs::read_dir(folder).into_iter().flatten().flatten().count())
        };
        (count("pulling"), count("pulled"))
    }
}

impl Drop for PullIntentGuard {
    /// The pull has ended, successfully or not.
    fn drop(&mut self) {
        let mut pulling = self.records.pulling();
        let left = pulling.get_mut(&self.image).map(|count| {
            *count -= 1;
            *count
        });
        if left == Some(0) {
            pulling.remove(&self.image);
            self.records.remove_intent(&self.image);
        }
    }
}

/// The current time as RFC 3339, in whole seconds.
fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Replaces a file by rename, with mode 0600 in a folder of mode 0700.
fn write(path: &Path, text: &[u8]) -> Result<(), RecordError> {
    const RECORD: Replacement<'_> = Replacement::new().mode(0o600).temporary_suffix(".tmp");
    let fail = |action, path: &Path| {
        let path = path.to_owned();
        move |source| RecordError { action, path, source }
    };
    if let Some(folder) = path.parent() {
        create_private_folder(folder).map_err(fail("create the folder", folder))?;
    }
    RECORD.write(path, text).map_err(fail("write", path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    const IMAGE: &str = "r.example/a:1";
    const REPO: &str = "r.example/a";

    fn records(root: &Path) -> PullRecords {
        PullRecords::new(root, &ImagePulls::default())
    }

    fn secret() -> (Credential, Origin) {
        let credential = Credential { password: "hunter2".into(), ..Credential::default() };
        (credential, Origin::Secret { uid: "1".into(), namespace: "n".into(), name: "s".into() })
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn finished_pull_leaves_a_record_without_secret_and_no_intent() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        let intended = records.begin(IMAGE).unwrap();
        let intent = dir.path().join("image_manager/pulling").join(file_name(IMAGE));
        assert!(fs::read_to_string(&intent).unwrap().contains("ImagePullIntent"));
        assert_eq!((mode(&intent), mode(intent.parent().unwrap())), (0o600, 0o700));
        records.add(REPO, "sha256:1", Some(&secret())).unwrap();
        drop(intended);
        assert!(!intent.exists());
        let record = dir.path().join("image_manager/pulled").join(file_name("sha256:1"));
        let text = fs::read_to_string(&record).unwrap();
        assert!(text.contains("ImagePulledRecord") && !text.contains("hunter2"), "{text}");
        assert_eq!((mode(&record), records.counts()), (0o600, (0, 1)));
        assert_eq!(records.access(IMAGE, REPO, "sha256:1", &[]), Access::Unknown);
        assert_eq!(
            records.access(IMAGE, REPO, "sha256:1", &[secret()]),
            Access::Verified { to_record: None }
        );
        assert_eq!(records.access(IMAGE, REPO, "sha256:2", &[]), Access::Open);
    }

    #[test]
    fn image_of_an_interrupted_pull_needs_a_credential() {
        let dir = tempfile::tempdir().unwrap();
        // Killed: the intent is not dropped.
        std::mem::forget(records(dir.path()).begin(IMAGE).unwrap());
        let restarted = records(dir.path());
        assert_eq!(restarted.access(IMAGE, REPO, "sha256:1", &[]), Access::Unknown);
        assert_eq!(restarted.interrupted(), [IMAGE]);
        restarted.resolve_interrupted(IMAGE, Some("sha256:1")).unwrap();
        assert!(restarted.interrupted().is_empty());
        assert_eq!(restarted.access("other:1", REPO, "sha256:1", &[secret()]), Access::Unknown);
        // No record is kept for an image that is not present.
        std::mem::forget(restarted.begin("b:1").unwrap());
        let restarted_again = records(dir.path());
        restarted_again.resolve_interrupted("b:1", None).unwrap();
        assert_eq!(restarted_again.counts(), (0, 1));
    }

    #[test]
    fn pull_intent_is_removed_by_the_last_of_two_pulls() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        let (first, second) = (records.begin(IMAGE).unwrap(), records.begin(IMAGE).unwrap());
        drop(first);
        assert_eq!(records.counts(), (1, 0));
        assert!(records.interrupted().is_empty(), "one pull is still running");
        records.resolve_interrupted(IMAGE, None).unwrap();
        assert_eq!(records.counts(), (1, 0));
        drop(second);
        assert_eq!(records.counts(), (0, 0));
    }

    #[test]
    fn records_of_removed_images_are_pruned_and_new_ones_kept() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        for image in ["sha256:1", "sha256:2"] {
            records.add(REPO, image, None).unwrap();
        }
        let listed = BTreeSet::from(["sha256:1".to_owned()]);
        let (before, after) =
            (SystemTime::now() - Duration::from_secs(60), SystemTime::now() + Duration::from_secs(60));
        assert_eq!(records.prune(&listed, before), 0);
        assert_eq!(records.prune(&listed, after), 1);
        assert_eq!(records.access(IMAGE, REPO, "sha256:1", &[]), Access::Verified { to_record: None });
    }

    #[test]
    fn invalid_pull_record_is_ignored_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        let path = dir.path().join("image_manager/pulled").join(file_name("sha256:1"));
        write(&path, b"{").unwrap();
        assert_eq!(records.access(IMAGE, REPO, "sha256:1", &[]), Access::Open);
        records.add(REPO, "sha256:1", None).unwrap();
        assert!(ImagePulledRecord::parse(&fs::read(&path).unwrap()).is_some());
    }

    #[test]
    fn pull_fails_if_its_intent_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("image_manager"), "a file").unwrap();
        let error = records(dir.path()).begin(IMAGE).unwrap_err();
        assert!(error.to_string().contains("image_manager/pulling"), "{error}");
        assert!(PullRecords::none().begin(IMAGE).is_ok());
    }
}
