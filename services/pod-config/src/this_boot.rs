//! What is known of this boot, in the run folder, which no reboot survives where it is in memory.

use std::fs;
use std::path::{Path, PathBuf};

/// There, behind the name of the source, when it has answered in this boot.
const SEEN: &str = "seen-in-this-boot";
/// When this boot first asked what may start without it, in seconds since 1970.
const FIRST_LOOK: &str = "first-missed-in-this-boot";

/// The files of this boot. Each has the boot's id, for a run folder that lies on a disk.
#[derive(Debug)]
pub struct ThisBoot {
    folder: PathBuf,
    source: &'static str,
    id: String,
}

impl ThisBoot {
    /// With the files of `source` in `folder`; the first of `id_files` that says something names the boot.
    pub fn new(folder: &Path, source: &'static str, id_files: &[PathBuf]) -> Self {
        let ids = id_files.iter().filter_map(|path| fs::read_to_string(path).ok());
        let id = ids.map(|text| text.trim().to_owned()).find(|id| !id.is_empty()).unwrap_or_default();
        Self { folder: folder.to_owned(), source, id }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{}-{name}", self.source))
    }

    /// Whether the source has answered in this boot.
    pub fn has_seen(&self) -> bool {
        self.read(SEEN).is_some()
    }

    /// The source has answered.
    pub fn sees(&self) {
        self.write(SEEN, "-");
    }

    /// When this boot first asked what may start; `now` when this is the first time. So what has started goes on over a
    /// restart of the service, however old it gets meanwhile.
    pub fn first_look(&self, now: i64) -> i64 {
        self.read(FIRST_LOOK).and_then(|text| text.parse().ok()).unwrap_or_else(|| {
            self.write(FIRST_LOOK, &now.to_string());
            now
        })
    }

    /// What a file of this boot says. One without an id is of a release that wrote none; it counts, so that an upgrade is
    /// no reboot.
    fn read(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.file(name)).ok()?;
        let mut words = text.split_whitespace();
        let said = words.next().unwrap_or_default().to_owned();
        words.next().is_none_or(|id| id == self.id).then_some(said)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.file(name);
        if let Err(error) = fs::write(&path, format!("{text} {}", self.id)) {
            let file = path.display();
            tracing::warn!(%file, %error, "a restart of the service will take this boot for a new one");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_look_of_a_boot_stays_what_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let boot = ThisBoot::new(folder.path(), "etcd", &[]);
        assert_eq!(boot.first_look(7), 7);
        assert_eq!(ThisBoot::new(folder.path(), "etcd", &[]).first_look(9), 7);
        assert!(!boot.has_seen());
        boot.sees();
        assert!(ThisBoot::new(folder.path(), "etcd", &[]).has_seen());
        fs::write(folder.path().join("etcd-first-missed-in-this-boot"), "half").unwrap();
        assert_eq!(boot.first_look(11), 11);
    }

    #[test]
    fn on_a_disk_the_files_of_another_boot_say_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let id = folder.path().join("boot-id");
        let of = |boot: &str| {
            fs::write(&id, boot).unwrap();
            ThisBoot::new(folder.path(), "api", &["/nowhere".into(), id.clone()])
        };
        let first = of("b-1\n");
        first.sees();
        assert_eq!((first.first_look(7), of("b-1").has_seen(), of("b-1").first_look(8)), (7, true, 7));
        let second = of("b-2\n");
        assert_eq!((second.has_seen(), second.first_look(9)), (false, 9));
        // As a release before this one left it.
        fs::write(folder.path().join("api-seen-in-this-boot"), "").unwrap();
        fs::write(folder.path().join("api-first-missed-in-this-boot"), "5").unwrap();
        assert_eq!((second.has_seen(), second.first_look(9)), (true, 5));
    }
}
