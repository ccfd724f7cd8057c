//! hostPath as the source of a PersistentVolume (volumes.md §10.2): the path itself. Below `volumes`, there is only an empty folder
//! with the name of the PersistentVolume, so that a restart finds the volume.

use std::path::{Path, PathBuf};

use keelson_volume_manager_core::hostpath::{self, CheckResult, FileKind, TypeCheck};
use keelson_volume_manager_core::world::{FailureClass, Learned, MountLabel, Shape};
use serde::Deserialize;

use super::disk::{pod_path, read_source, wrong_source};
use super::host::FOLDER_MODE as POD_FOLDER_MODE;
use super::{
    Abilities, Answer, FoundFolder, Identity, Plugin, PluginError, Reconstructed, SetUp, SetUpRequest,
    VolumePlace, VolumeSpec,
};
use crate::mounter::Mounter;

/// The name of the plugin.
const NAME: &str = "kubernetes.io/host-path";
/// The mode of a folder that is created.
const FOLDER_MODE: u32 = 0o755;
/// The mode of a file that is created.
const FILE_MODE: u32 = 0o644;

/// `hostPath`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Source {
    path: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// The plugin.
#[derive(Debug)]
pub(crate) struct HostPath {
    root: PathBuf,
    run_dir: PathBuf,
    mounter: Mounter,
}

impl HostPath {
    /// The plugin. `root` is the agent's root folder. `run_dir` is the folder of the agent's sockets: no PersistentVolume leads into it, because admission,
    /// which decides on such paths, sees only those that a pod names itself (ADR 0004).
    pub(crate) fn new(root: PathBuf, run_dir: PathBuf, mounter: Mounter) -> Self {
        Self { root, run_dir, mounter }
    }

    fn source(&self, volume: &VolumeSpec) -> Result<(String, String), PluginError> {
        let source: Source = read_source(volume)?;
        let (path, kind) = (source.path.unwrap_or_default(), source.kind.unwrap_or_default());
        let error = |problem: &str| {
            let name = &volume.inner_name;
            Err(wrong_source(format!(
                "hostPath volume {name}: the path {path:?} {problem}; correct spec.hostPath of the PersistentVolume"
            )))
        };
        if !path.starts_with('/') || path.contains('\0') {
            return error("is not an absolute path");
        }
        if Path::new(&path).starts_with(&self.run_dir) {
            return error("is in the folder of the agent's sockets");
        }
        hostpath::type_check(&path, &kind).map_err(wrong_source)?;
        Ok((path, kind))
    }

    async fn check(&self, volume: &VolumeSpec) -> Result<PathBuf, PluginError> {
        let (path, kind) = self.source(volume)?;
        let target = Path::new(&path);
        let found = self.mounter.inspect(target).await?;
        if let Some(found) = &found {
            hostpath::reject_link_into(&self.run_dir, &path, &found.path).map_err(wrong_source)?;
        }
        if hostpath::type_check(&path, &kind).map_err(wrong_source)? == TypeCheck::Skipped {
            return Ok(target.to_owned());
        }
        let found = found.map_or(FileKind::Missing, |found| found.kind());
        match hostpath::check_type(&path, &kind, found).map_err(wrong_source)? {
            CheckResult::Matches => return Ok(target.to_owned()),
            CheckResult::CreateDirectory => self.mounter.create_folders(target, FOLDER_MODE).await?,
            CheckResult::CreateFile => self.mounter.create_file(target, FILE_MODE).await?,
        }
        let found = self.mounter.inspect(target).await?;
        if let Some(found) = &found {
            hostpath::reject_link_into(&self.run_dir, &path, &found.path).map_err(wrong_source)?;
        }
        let found = found.map_or(FileKind::Missing, |found| found.kind());
        hostpath::check_type(&path, &kind, found).map_err(wrong_source)?;
        Ok(target.to_owned())
    }
}

impl Plugin for HostPath {
    fn name(&self) -> &'static str {
        NAME
    }

    fn field(&self) -> &'static str {
        "hostPath"
    }

    /// A pod's own hostPath is no matter of plugins: it is checked with the pod's other volumes.
    fn abilities(&self) -> Abilities {
        Abilities { mount_options: false, block: false, inline: false, persistent: true }
    }

    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity> {
        Box::pin(async move {
            self.source(volume)?;
            Ok(Identity {
                shared_name: None,
                shape: Shape::PerPod,
                is_set_up_each_sync: false,
                supports_label: false,
                can_expand: false,
                read_only: volume.read_only,
            })
        })
    }

    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, _: SetUpRequest<'a>) -> Answer<'a, SetUp> {
        Box::pin(async move {
            let host_path = self.check(volume).await?;
            // Nothing else on disk says after a restart that a pod uses the volume, whose claim has to stay bound.
            let folder = pod_path(&self.root, NAME, &volume.pod.uid, &volume.inner_name);
            let created = self.mounter.create_folders(&folder, POD_FOLDER_MODE).await;
            created.map_err(|error| error.of_class(FailureClass::Uncertain))?;
            Ok(SetUp { host_path, learned: Learned::default() })
        })
    }

    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()> {
        Box::pin(async move {
            let folder = pod_path(&self.root, NAME, place.pod.as_str(), &place.inner_name);
            self.mounter.clean_mount_point(&folder, true).await
        })
    }

    fn reconstruct<'a>(&'a self, _: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(async {
            Ok(Reconstructed {
                shared_name: None,
                has_device: false,
                device_mount_path: None,
                label: Some(MountLabel::Unlabelled),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::mounter::testing::{TestFolder, mode, request, volume};
    use crate::walks::FsGroupWalks;

    fn plugin(folder: &TestFolder) -> HostPath {
        HostPath::new(folder.path().join("root"), folder.path().join("run"), folder.mounter())
    }

    async fn set_up(folder: &TestFolder, path: &Path, kind: &str) -> Result<PathBuf, String> {
        let plugin = plugin(folder);
        let spec = volume("uid", "hostPath", json!({"path": path, "type": kind}));
        plugin.identify(&spec).await.map_err(|error| error.message)?;
        let walks = FsGroupWalks::default();
        let ready = plugin.set_up(&spec, request(&walks)).await;
        ready.map(|ready| ready.host_path).map_err(|error| error.message)
    }

    #[tokio::test]
    async fn a_host_path_is_checked_and_created_by_its_type() {
        let folder = TestFolder::new();
        let at = |name: &str| folder.path().join(name);
        for (name, kind) in [("missing", ""), ("a/dir", "DirectoryOrCreate"), ("file", "FileOrCreate")] {
            assert_eq!(set_up(&folder, &at(name), kind).await, Ok(at(name)));
        }
        assert!(!at("missing").exists());
        assert_eq!((mode(&at("a/dir")), mode(&at("file"))), (0o755, 0o644));
        for (name, kind) in
            [("missing", "Directory"), ("file", "Directory"), ("a/dir", "File"), ("file", "X")]
        {
            let text = set_up(&folder, &at(name), kind).await.unwrap_err();
            assert!(text.contains("hostPath type check failed"), "{text}");
        }
        assert!(set_up(&folder, &at("no/file"), "FileOrCreate").await.is_err());
    }

    #[tokio::test]
    async fn no_host_path_of_a_claim_leads_to_the_agents_sockets() {
        let folder = TestFolder::new();
        let run = folder.folder("run/sub");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&run, &link).unwrap();
        for path in [&run, &link] {
            let text = set_up(&folder, path, "").await.unwrap_err();
            assert!(text.contains("the agent's sockets"), "{text}");
        }
        for path in ["", "relative", "/a/../b"] {
            assert!(set_up(&folder, Path::new(path), "").await.is_err(), "{path}");
        }
        fs::remove_file(link).unwrap();
    }

    #[tokio::test]
    async fn a_host_path_of_a_claim_has_an_empty_folder_as_long_as_a_pod_uses_it() {
        let folder = TestFolder::new();
        let data = folder.folder("data");
        fs::write(data.join("file"), "kept").unwrap();
        let marker = folder.path().join("root/pods/uid/volumes/kubernetes.io~host-path/pv");
        let text = set_up(&folder, &data, "File").await.unwrap_err();
        assert!(!marker.exists(), "{text}");
        for _ in 0..2 {
            assert_eq!(set_up(&folder, &data, "Directory").await, Ok(data.clone()));
            assert_eq!(fs::read_dir(&marker).unwrap().count(), 0);
        }
        let place = VolumePlace {
            volume: "kubernetes.io/host-path/uid-pv".into(),
            pod: "uid".into(),
            plugin: NAME.into(),
            inner_name: "pv".into(),
            is_block: false,
        };
        for _ in 0..2 {
            plugin(&folder).tear_down(&place).await.unwrap();
            assert!(!marker.exists());
        }
        assert_eq!(fs::read_to_string(data.join("file")).unwrap(), "kept");
    }
}
