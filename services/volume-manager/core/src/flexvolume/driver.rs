//! The folders of flexVolume drivers (volumes.md §2, §10.8).

use std::path::{Component, Path};

use crate::names;

/// The plugin's folder, relative to the agent's root folder.
pub const ROOT: &str = "plugins/kubernetes.io/flexvolume";
/// The folder of a driver in it that has the device mounts.
pub const MOUNTS: &str = "mounts";

/// Why a name is not that of a driver or a volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The driver's name cannot be the name of folders.
    #[error(
        "flexVolume driver {name:?} is not of the form vendor/driver; correct driver in the volume's source"
    )]
    InvalidName {
        /// The name.
        name: String,
    },
    /// The volume's name cannot be the name of a folder.
    #[error("flexVolume {volume:?}: the name cannot be the name of a folder")]
    InvalidVolume {
        /// The volume's inner name.
        volume: String,
    },
}

/// A driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Driver {
    name: String,
}

impl Driver {
    /// The driver with this name, `vendor/driver`; the vendor may be missing.
    pub fn new(name: &str) -> Result<Self, DriverError> {
        let is_safe =
            name.split('/').all(names::is_path_component) && !name.contains('~') && !name.starts_with('.');
        if is_safe && name.split('/').count() <= 2 && names::is_path_component(&names::escape(name)) {
            Ok(Self { name: name.to_owned() })
        } else {
            Err(DriverError::InvalidName { name: name.to_owned() })
        }
    }

    /// The driver in a folder of the plugin folder, `vendor~driver`. `None` if the name begins with a dot or is none of
    /// a driver.
    pub fn in_folder(folder: &str) -> Option<Self> {
        Self::new(&names::unescape(folder)).ok().filter(|driver| driver.folder() == folder)
    }

    /// Its name, which is also the plugin name of its volumes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder in the plugin folder. The folders of its volumes in pods have the same name.
    pub fn folder(&self) -> String {
        names::escape(&self.name)
    }

    /// The name of its executable.
    fn executable_name(&self) -> &str {
        self.name.rsplit_once('/').map_or(self.name.as_str(), |(_, name)| name)
    }

    /// The path of its executable, relative to the plugin folder.
    pub fn executable(&self) -> String {
        format!("{}/{}", self.folder(), self.executable_name())
    }

    /// The unique volume name of an attachable volume (volumes.md §1).
    pub fn unique_name(&self, volume: &str) -> String {
        format!("{}/{volume}", self.name)
    }

    /// Where the device of `volume` is mounted, relative to the agent's root folder.
    pub fn global_mount(&self, volume: &str) -> Result<String, DriverError> {
        if names::is_path_component(volume) {
            Ok(format!("{ROOT}/{}/{MOUNTS}/{volume}", self.name))
        } else {
            Err(DriverError::InvalidVolume { volume: volume.to_owned() })
        }
    }
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileEvent {
    /// It was created, written or made executable.
    Changed,
    /// It is gone.
    Removed,
}

/// What follows a change in the plugin folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginChange {
    /// Nothing.
    None,
    /// The plugin folder itself is gone: create it again and watch it.
    CreateFolder,
    /// Call `init` of the driver.
    Init(Driver),
    /// Forget the driver.
    Forget(Driver),
}

/// What the change of a file means. `path` is relative to the plugin folder; empty: the folder itself.
pub fn plugin_change(path: &Path, event: FileEvent) -> PluginChange {
    let mut parts = path.components().map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let folder = match (parts.next(), event) {
        (None, FileEvent::Removed) => return PluginChange::CreateFolder,
        (None, FileEvent::Changed) | (Some(None), _) => return PluginChange::None,
        (Some(Some(folder)), _) => folder,
    };
    let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    let Some(driver) = Driver::in_folder(folder).filter(|_| !is_hidden) else {
        return PluginChange::None;
    };
    let is_driver = path == Path::new(folder) || path == Path::new(&driver.executable());
    match event {
        FileEvent::Removed if is_driver => PluginChange::Forget(driver),
        FileEvent::Changed if is_driver => PluginChange::Init(driver),
        // A driver that logs beside itself would be called for each line of its own calls.
        FileEvent::Removed | FileEvent::Changed => PluginChange::None,
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_driver_has_a_folder_an_executable_and_a_mounts_folder() {
        let driver = Driver::new("example.com/cifs").unwrap();
        assert_eq!(driver.folder(), "example.com~cifs");
        assert_eq!(driver.executable(), "example.com~cifs/cifs");
        assert_eq!(driver.unique_name("pv"), "example.com/cifs/pv");
        let mount = driver.global_mount("pv").unwrap();
        assert_eq!(mount, "plugins/kubernetes.io/flexvolume/example.com/cifs/mounts/pv");
        let plain = Driver::new("cifs").unwrap();
        assert_eq!((plain.folder().as_str(), plain.executable().as_str()), ("cifs", "cifs/cifs"));
    }

    #[test]
    fn a_name_that_is_no_driver_is_refused() {
        for name in ["", "/", "a/", "/a", "a/b/c", "../a", "a/..", "a~b", "a\0", ".a/b"] {
            let text = Driver::new(name).unwrap_err().to_string();
            assert!(text.contains("is not of the form vendor/driver"), "{name:?}: {text}");
        }
        for volume in ["", "..", "a/b"] {
            assert!(Driver::new("a/b").unwrap().global_mount(volume).is_err(), "{volume:?}");
        }
    }

    #[test]
    fn hidden_folders_and_other_names_are_no_drivers() {
        for folder in ["", ".hidden", ".v~d", "a/b", "a~b~c", "~", "a~", "~a", ".."] {
            assert_eq!(Driver::in_folder(folder), None, "{folder:?}");
        }
        assert_eq!(Driver::in_folder("v~d"), Some(Driver::new("v/d").unwrap()));
    }

    #[test]
    fn only_the_folder_and_the_executable_of_a_driver_count() {
        let driver = Driver::new("v/d").unwrap();
        let (init, forget) = (PluginChange::Init(driver.clone()), PluginChange::Forget(driver));
        for (path, on_change, on_removal) in [
            ("", &PluginChange::None, &PluginChange::CreateFolder),
            ("v~d", &init, &forget),
            ("v~d/d", &init, &forget),
            ("v~d/config", &PluginChange::None, &PluginChange::None),
            ("v~d/lib/d", &PluginChange::None, &PluginChange::None),
            ("v~d/.d.swp", &PluginChange::None, &PluginChange::None),
            (".tmp/d", &PluginChange::None, &PluginChange::None),
            (".hidden", &PluginChange::None, &PluginChange::None),
            ("a~b~c/c", &PluginChange::None, &PluginChange::None),
            ("../v~d", &PluginChange::None, &PluginChange::None),
        ] {
            assert_eq!(&plugin_change(Path::new(path), FileEvent::Changed), on_change, "{path}");
            assert_eq!(&plugin_change(Path::new(path), FileEvent::Removed), on_removal, "{path}");
        }
    }

    #[test]
    fn every_driver_is_found_again_from_its_folder() {
        let reached = &Reached::default();
        proptest!(ProptestConfig::with_cases(512), |(name in "([a-z][a-z.-]{0,8}/)?[a-z][a-z.-]{0,8}")| {
            let driver = Driver::new(&name).expect("a driver");
            prop_assert_eq!(Driver::in_folder(&driver.folder()), Some(driver));
            reached.case([("a vendor", name.contains('/')), ("no vendor", !name.contains('/'))]);
        });
        // The rarest: "no vendor", in one case of 2.
        reached.assert_each();
    }
}
