//! Work on the files of a volume, which may hang, in the helper process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_volume_manager_core::desire::FsGroupPolicy;

use super::client::HelperError;
use super::helper::{Answer, FileFacts, Line, Request};
use super::runner::RunError;
use super::state::Mounter;
use super::threads::blocking;
use crate::measure::Usage;
use crate::plugin_error::PluginError;
use crate::subpath::{self, SubPath, SubPathError};
use crate::walks::{FsGroupWalks, WalkRecorder};

impl Mounter {
    /// Creates a folder and those above it, with this mode. An existing one stays as it is.
    pub(crate) async fn create_folders(&self, path: &Path, mode: u32) -> Result<(), PluginError> {
        self.ask(&Request::CreateFolders { path: path.to_owned(), mode }, |_| ()).await.map(drop)
    }

    /// Creates an empty file with this mode. An existing one stays as it is.
    pub(crate) async fn create_file(&self, path: &Path, mode: u32) -> Result<(), PluginError> {
        self.ask(&Request::CreateFile { path: path.to_owned(), mode }, |_| ()).await.map(drop)
    }

    /// What is at `path`, after links; `None` if nothing is.
    pub(crate) async fn inspect(&self, path: &Path) -> Result<Option<FileFacts>, PluginError> {
        match self.ask(&Request::Inspect { path: path.to_owned() }, |_| ()).await? {
            Answer::File(facts) => Ok(facts),
            other => Err(PluginError::new(format!("the helper gave a wrong answer: {other:?}"))),
        }
    }

    /// Applies the fsGroup to the files of a volume (volumes.md §5), in the helper process. Dropping the future ends the
    /// walk.
    pub(crate) async fn apply_fs_group(
        &self,
        path: &Path,
        group: u32,
        read_only: bool,
        policy: FsGroupPolicy,
        walks: &FsGroupWalks,
    ) -> Result<(), PluginError> {
        let request = Request::ApplyFsGroup {
            path: path.to_owned(),
            group,
            read_only,
            on_root_mismatch: match policy {
                FsGroupPolicy::Always => false,
                FsGroupPolicy::OnRootMismatch => true,
            },
        };
        let mut walk = RecordedWalk { recorder: Some(walks.start(path, group)), files: 0 };
        let result = self.ask(&request, |line| walk.record(line, path)).await;
        walk.end(result.is_ok());
        result.map(drop)
    }
}

impl Mounter {
    /// Prepares a subPath of the volume at `root` for a container (volumes.md §8.3), as [`subpath::prepare`] does.
    pub(crate) async fn prepare_subpath(
        &self,
        pod_folder: &Path,
        container: &str,
        root: &Path,
        subpath: &SubPath,
    ) -> Result<PathBuf, SubPathError> {
        let request = Request::PrepareSubpath {
            path: root.to_owned(),
            pod_folder: pod_folder.to_owned(),
            container: container.to_owned(),
            subpath: subpath.clone(),
        };
        let note = |line| {
            if let Line::Warning(path) = line {
                tracing::warn!(path, "cannot prepare a subPath");
            }
        };
        match self.client.ask(&request, note).await {
            Ok(Answer::Path(path)) => Ok(path),
            Ok(other) => Err(SubPathError::Helper(format!("the helper gave a wrong answer: {other:?}"))),
            Err(HelperError::Failed(failure)) => Err(SubPathError::Helper(failure.message)),
            Err(HelperError::Run(RunError::Deadline { .. } | RunError::Refused(_))) => {
                tracing::warn!(path = %root.display(), "a volume does not answer");
                Err(SubPathError::NoAnswer)
            }
            Err(HelperError::Run(error)) => {
                Err(SubPathError::Helper(format!("cannot run a helper: {error:?}")))
            }
        }
    }

    /// Unmounts and removes the subPaths of one volume of a pod, or of all of its volumes (volumes.md §8.3). Missing ones
    /// are no error.
    pub(crate) async fn remove_subpaths(
        &self,
        pod_folder: &Path,
        volume: Option<&str>,
    ) -> Result<(), PluginError> {
        let all = subpath::folder(pod_folder);
        let folder = pod_folder.to_owned();
        // Most pods have none.
        let has_any = blocking(move || Ok(subpath::has_any(&folder))).await;
        if !has_any.map_err(|error| PluginError::new(format!("cannot look for subPaths: {error}")))? {
            return Ok(());
        }
        let path = volume.map_or_else(|| all.clone(), |volume| all.join(volume));
        let (pod_folder, volume) = (pod_folder.to_owned(), volume.map(str::to_owned));
        self.ask(&Request::RemoveSubpaths { path, pod_folder, volume }, |_| ()).await.map(drop)
    }

    /// The usage of the filesystem that is mounted at `path`. While an earlier measurement hangs, there is no other one.
    pub(crate) async fn measure(&self, path: &Path) -> Result<Usage, PluginError> {
        match self.ask(&Request::Measure { path: path.to_owned() }, |_| ()).await? {
            Answer::Usage(usage) => Ok(usage),
            other => Err(PluginError::new(format!("the helper gave a wrong answer: {other:?}"))),
        }
    }

    /// The same mounter that waits less long for its helper.
    pub(crate) fn with_patience(self, patience: Duration) -> Self {
        Self { client: self.client.clone().with_patience(patience), ..self }
    }
}

/// Records a walk of the helper. One that is dropped has failed.
struct RecordedWalk<'a> {
    recorder: Option<WalkRecorder<'a>>,
    files: u64,
}

impl RecordedWalk<'_> {
    fn record(&mut self, line: Line, path: &Path) {
        match line {
            Line::Files(files) => {
                if let Some(recorder) = &self.recorder {
                    (self.files..files).for_each(|_| recorder.count_file());
                }
                self.files = files;
            }
            Line::Warning(why) => {
                let path = path.display();
                tracing::warn!(volume = %path, why, "cannot apply the pod's fsGroup to a file");
            }
            Line::Done(_) | Line::Failed(_) => {}
        }
    }

    fn end(&mut self, succeeded: bool) {
        if let Some(recorder) = self.recorder.take() {
            recorder.end(succeeded);
        }
    }
}

impl Drop for RecordedWalk<'_> {
    fn drop(&mut self) {
        self.end(false);
    }
}
