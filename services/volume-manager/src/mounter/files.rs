//! Work on the files of a volume, which may hang, in the helper process.

use std::path::Path;

use keelson_volume_manager_core::desire::FsGroupPolicy;

use super::helper::{Answer, FileFacts, Line, Request};
use super::state::Mounter;
use crate::plugin_error::PluginError;
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
