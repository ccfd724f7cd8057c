//! What is known of this boot, in the run folder, which no reboot survives.

use std::fs;
use std::path::{Path, PathBuf};

/// There, behind the name of the source, when it has answered in this boot.
const SEEN: &str = "seen-in-this-boot";
/// When this boot first asked what may start without it, in seconds since 1970.
const FIRST_LOOK: &str = "first-missed-in-this-boot";

/// The files of this boot.
#[derive(Debug)]
pub struct ThisBoot {
    folder: PathBuf,
    source: &'static str,
}

impl ThisBoot {
    /// With the files of `source` in `folder`.
    pub fn new(folder: &Path, source: &'static str) -> Self {
        Self { folder: folder.to_owned(), source }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{}-{name}", self.source))
    }

    /// Whether the source has answered in this boot.
    pub fn has_seen(&self) -> bool {
        self.file(SEEN).exists()
    }

    /// The source has answered.
    pub fn sees(&self) {
        self.write(SEEN, "");
    }

    /// When this boot first asked what may start; `now` when this is the first time. So what has started goes on over a
    /// restart of the service, however old it gets meanwhile.
    pub fn first_look(&self, now: i64) -> i64 {
        let before = fs::read_to_string(self.file(FIRST_LOOK)).ok();
        before.and_then(|text| text.trim().parse().ok()).unwrap_or_else(|| {
            self.write(FIRST_LOOK, &now.to_string());
            now
        })
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.file(name);
        if let Err(error) = fs::write(&path, text) {
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
        let boot = ThisBoot::new(folder.path(), "etcd");
        assert_eq!(boot.first_look(7), 7);
        assert_eq!(ThisBoot::new(folder.path(), "etcd").first_look(9), 7);
        assert!(!boot.has_seen());
        boot.sees();
        assert!(ThisBoot::new(folder.path(), "etcd").has_seen());
        fs::write(folder.path().join("etcd-first-missed-in-this-boot"), "half").unwrap();
        assert_eq!(boot.first_look(11), 11);
    }
}
