//! What is known of this boot, in the run folder, which no reboot survives.

use std::fs;
use std::path::{Path, PathBuf};

/// There when etcd has answered in this boot.
const SEEN: &str = "etcd-seen-in-this-boot";
/// When this boot first asked what may start without etcd, in seconds since 1970.
const FIRST_LOOK: &str = "etcd-first-missed-in-this-boot";

/// The files of this boot.
#[derive(Debug)]
pub struct ThisBoot {
    folder: PathBuf,
}

impl ThisBoot {
    /// With the files in `folder`.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// Whether etcd has answered in this boot.
    pub fn has_seen_etcd(&self) -> bool {
        self.folder.join(SEEN).exists()
    }

    /// etcd has answered.
    pub fn sees_etcd(&self) {
        self.write(SEEN, "");
    }

    /// When this boot first asked what may start; `now` when this is the first time. So what has started goes on over a
    /// restart of the service, however old it gets meanwhile.
    pub fn first_look(&self, now: i64) -> i64 {
        let before = fs::read_to_string(self.folder.join(FIRST_LOOK)).ok();
        before.and_then(|text| text.trim().parse().ok()).unwrap_or_else(|| {
            self.write(FIRST_LOOK, &now.to_string());
            now
        })
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.folder.join(name);
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
        let boot = ThisBoot::new(folder.path());
        assert_eq!(boot.first_look(7), 7);
        assert_eq!(ThisBoot::new(folder.path()).first_look(9), 7);
        assert!(!boot.has_seen_etcd());
        boot.sees_etcd();
        assert!(ThisBoot::new(folder.path()).has_seen_etcd());
        fs::write(folder.path().join(FIRST_LOOK), "half").unwrap();
        assert_eq!(boot.first_look(11), 11);
    }
}
