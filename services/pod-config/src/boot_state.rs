//! Facts about this boot, in the run folder, which does not survive a reboot if it is in memory.

use std::fs;
use std::path::{Path, PathBuf};

/// File name suffix: the source has answered in this boot.
const CONTACT: &str = "seen-in-this-boot";
/// File name suffix: when this boot first checked what may start offline, in seconds since 1970.
const FIRST_OFFLINE_CHECK: &str = "first-missed-in-this-boot";

/// The files of this boot. Each contains the boot id, in case the run folder is on a disk.
#[derive(Debug)]
pub struct BootState {
    folder: PathBuf,
    source: &'static str,
    id: String,
}

impl BootState {
    /// The files of `source` in `folder`; the first non-empty file of `id_files` identifies the boot.
    pub fn new(folder: &Path, source: &'static str, id_files: &[PathBuf]) -> Self {
        let ids = id_files.iter().filter_map(|path| fs::read_to_string(path).ok());
        let id = ids.map(|text| text.trim().to_owned()).find(|id| !id.is_empty()).unwrap_or_default();
        Self { folder: folder.to_owned(), source, id }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{}-{name}", self.source))
    }

    /// Whether the source has answered in this boot.
    pub fn has_contact(&self) -> bool {
        self.read(CONTACT).is_some()
    }

    /// Records that the source has answered.
    pub fn record_contact(&self) {
        self.write(CONTACT, "-");
    }

    /// When this boot first checked what may start offline; `now` if this is the first time. So pods that have started keep
    /// running over a restart of the service, even if they exceed the maximum age meanwhile.
    pub fn first_offline_check(&self, now: i64) -> i64 {
        self.read(FIRST_OFFLINE_CHECK).and_then(|text| text.parse().ok()).unwrap_or_else(|| {
            self.write(FIRST_OFFLINE_CHECK, &now.to_string());
            now
        })
    }

    /// Reads a file of this boot. A file without a boot id is from an older release; it counts, so that an upgrade is not taken
    /// for a reboot.
    fn read(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.file(name)).ok()?;
        let mut words = text.split_whitespace();
        let value = words.next().unwrap_or_default().to_owned();
        words.next().is_none_or(|id| id == self.id).then_some(value)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.file(name);
        if let Err(error) = fs::write(&path, format!("{text} {}", self.id)) {
            let file = path.display();
            tracing::warn!(%file, %error, "after a restart the service will take this boot for a new one");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_offline_check_of_a_boot_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let boot = BootState::new(folder.path(), "etcd", &[]);
        assert_eq!(boot.first_offline_check(7), 7);
        assert_eq!(BootState::new(folder.path(), "etcd", &[]).first_offline_check(9), 7);
        assert!(!boot.has_contact());
        boot.record_contact();
        assert!(BootState::new(folder.path(), "etcd", &[]).has_contact());
        fs::write(folder.path().join("etcd-first-missed-in-this-boot"), "half").unwrap();
        assert_eq!(boot.first_offline_check(11), 11);
    }

    #[test]
    fn files_of_another_boot_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let id = folder.path().join("boot-id");
        let of = |boot: &str| {
            fs::write(&id, boot).unwrap();
            BootState::new(folder.path(), "api", &["/nowhere".into(), id.clone()])
        };
        let first = of("b-1\n");
        first.record_contact();
        assert_eq!(
            (first.first_offline_check(7), of("b-1").has_contact(), of("b-1").first_offline_check(8)),
            (7, true, 7)
        );
        let second = of("b-2\n");
        assert_eq!((second.has_contact(), second.first_offline_check(9)), (false, 9));
        // As an older release wrote it.
        fs::write(folder.path().join("api-seen-in-this-boot"), "").unwrap();
        fs::write(folder.path().join("api-first-missed-in-this-boot"), "5").unwrap();
        assert_eq!((second.has_contact(), second.first_offline_check(9)), (true, 5));
    }
}
