//! The file next to the global folder of a disk that says which volume it belongs to.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use keelson_volume_manager_core::global_folder::side_file;
use keelson_volume_manager_core::names;

use crate::plugins::FoundFolder;
use crate::plugins::host::remove;

/// The file next to the global folder of a disk that says which volume it belongs to, as the API names it. The name of the
/// folder alone does not: a portal may be written with or without its port, and identifiers may contain what separates them.
/// The kubelet has no such file and ignores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeFile {
    /// The unique volume name.
    pub(crate) volume: String,
    /// The volume's inner name.
    pub(crate) inner_name: String,
}

impl VolumeFile {
    pub(crate) fn file(folder: &Path) -> PathBuf {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        folder.with_file_name(side_file(&name, "volume"))
    }

    /// Writes the file of a folder.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        let file = Self::file(folder);
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let new = folder.with_file_name(side_file(&name, "volume.new"));
        fs::write(&new, format!("{}\n{}\n", self.volume, self.inner_name))?;
        fs::rename(new, file)
    }

    /// The file of a folder, if there is one and it is complete.
    pub(crate) fn read(folder: &Path) -> Option<Self> {
        let text = fs::read_to_string(Self::file(folder)).ok()?;
        let (volume, rest) = text.split_once('\n')?;
        let inner_name = rest.strip_suffix('\n')?;
        Some(Self { volume: volume.to_owned(), inner_name: inner_name.to_owned() })
    }

    /// Removes the file of a folder, and the folder, which has to be empty.
    pub(crate) fn remove_with(folder: &Path) -> io::Result<()> {
        remove(fs::remove_dir(folder))?;
        remove(fs::remove_file(Self::file(folder)))
    }
}

/// Which of `folders`, which contain block maps, has the block map of a pod's volume: the one whose file names the volume,
/// else the one whose map is the device that the pod's link leads to.
pub(super) fn folder_with_map(
    folders: &[PathBuf],
    root: &Path,
    plugin: &str,
    found: &FoundFolder,
) -> Option<PathBuf> {
    let pod = found.pod.as_str();
    let maps: Vec<&PathBuf> = folders.iter().filter(|folder| folder.join(pod).exists()).collect();
    let is_named =
        |folder: &&&PathBuf| VolumeFile::read(folder).is_some_and(|file| file.inner_name == found.inner_name);
    if let Some(folder) = maps.iter().find(is_named) {
        return Some((*folder).clone());
    }
    let link =
        root.join("pods").join(pod).join("volumeDevices").join(names::escape(plugin)).join(&found.inner_name);
    let number = |path: &Path| fs::metadata(path).ok().map(|meta| meta.rdev()).filter(|rdev| *rdev != 0);
    let wanted = number(&link)?;
    maps.into_iter().find(|folder| number(&folder.join(pod)) == Some(wanted)).cloned()
}

/// The folder with the block maps of the volume with this inner name.
pub(super) fn folder_of_volume(folders: &[PathBuf], inner_name: &str) -> Option<PathBuf> {
    let is_named =
        |folder: &&PathBuf| VolumeFile::read(folder).is_some_and(|file| file.inner_name == inner_name);
    folders.iter().find(is_named).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/dev/null` and `/dev/zero` serve as devices: they have device numbers.
    #[test]
    fn a_block_map_of_another_agent_is_found_by_its_device_and_then_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let folders = ["a", "b"].map(|name| root.join("maps").join(name));
        let links = root.join("pods/u1/volumeDevices/kubernetes.io~fc");
        fs::create_dir_all(&links).unwrap();
        for (folder, device) in folders.iter().zip(["/dev/null", "/dev/zero"]) {
            fs::create_dir_all(folder).unwrap();
            std::os::unix::fs::symlink(device, folder.join("u1")).unwrap();
        }
        std::os::unix::fs::symlink("/dev/zero", links.join("pv1")).unwrap();
        let found = |inner: &str| FoundFolder { pod: "u1".into(), inner_name: inner.into(), is_block: true };
        let find = |inner: &str| folder_with_map(&folders, root, "kubernetes.io/fc", &found(inner));
        assert_eq!(find("pv1"), Some(folders[1].clone()));
        assert_eq!(find("pv2"), None, "its link is missing");
        assert_eq!(folder_of_volume(&folders, "pv1"), None);
        VolumeFile { volume: "guess".into(), inner_name: "pv1".into() }.write(&folders[1]).unwrap();
        assert_eq!(folder_of_volume(&folders, "pv1"), Some(folders[1].clone()));
        fs::remove_file(links.join("pv1")).unwrap();
        assert_eq!(find("pv1"), Some(folders[1].clone()), "by the stored name");
    }

    #[test]
    fn a_half_written_volume_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("disk");
        for (text, is_read) in
            [("", false), ("name\n", false), ("name\ninner", false), ("name\ninner\n", true)]
        {
            fs::write(VolumeFile::file(&folder), text).unwrap();
            assert_eq!(VolumeFile::read(&folder).is_some(), is_read, "{text:?}");
        }
    }

    #[test]
    fn a_folder_with_the_longest_name_has_its_volume_file() {
        let dir = tempfile::tempdir().unwrap();
        for length in [1, 200, 247, 248, 255] {
            let folder = dir.path().join("x".repeat(length));
            fs::create_dir(&folder).unwrap();
            let file = VolumeFile { volume: "v".into(), inner_name: length.to_string() };
            file.write(&folder).unwrap();
            assert_eq!(VolumeFile::read(&folder), Some(file), "{length}");
            VolumeFile::remove_with(&folder).unwrap();
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{length}");
        }
    }
}
