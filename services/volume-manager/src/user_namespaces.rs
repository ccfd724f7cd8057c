//! The ranges of IDs of the pods with a user namespace, on disk (runtime-and-resources.md §2.6). All functions block.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use keelson_files::{Replacement, Written};
use keelson_volume_manager_core::user_namespaces::{
    IdRange, IdRangeError, IdRanges, NodeRange, range_in, record_of,
};

use crate::mounter::Mounter;
use crate::plugin_error::PluginError;

/// The record of a pod's range, in the pod's folder.
const RECORD: &str = "userns";
/// The user whose subordinate IDs pods get.
const USER: &str = "kubelet";
/// The beginning of its line in passwd(5).
const USER_FIELD: &[u8] = b"kubelet:";
/// The program that lists them.
const GETSUBIDS: &str = "getsubids";
/// How long it may take; the IDs may come from a directory service.
const GETSUBIDS_DEADLINE: Duration = Duration::from_secs(10);

/// Why a pod has no range.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserNamespaceError {
    /// None can be assigned.
    #[error(transparent)]
    Range(#[from] IdRangeError),
    /// The record cannot be written.
    #[error("cannot record the IDs of the pod's user namespace in {}", path.display())]
    Record { path: PathBuf, source: io::Error },
    /// The node's users are unknown.
    #[error("cannot read {}, which says whether there is a user {USER} with IDs for user namespaces", path.display())]
    Users { path: PathBuf, source: io::Error },
    /// The IDs of the node cannot be listed.
    #[error("cannot list the IDs for user namespaces of pods: {0}")]
    Subids(PluginError),
}

/// What decides about ranges.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UserNamespaceSettings {
    /// `userNamespaces.idsPerPod`.
    pub(crate) ids_per_pod: u32,
    /// `maxPods`.
    pub(crate) max_pods: u32,
}

/// The ranges of all pods.
#[derive(Debug)]
pub(crate) struct UserNamespaces {
    settings: UserNamespaceSettings,
    /// Where `etc/passwd` is.
    machine: PathBuf,
    /// Where programs are, in the form of `PATH`.
    search_path: OsString,
    ranges: Mutex<IdRanges>,
    /// The IDs from which pods get theirs, once they are known.
    node: Mutex<Option<NodeRange>>,
}

impl UserNamespaces {
    pub(crate) fn new(settings: UserNamespaceSettings) -> Self {
        Self {
            settings,
            machine: "/".into(),
            search_path: env::var_os("PATH").unwrap_or_default(),
            ranges: Mutex::default(),
            node: Mutex::default(),
        }
    }

    /// Reads the range of a pod with this folder, also one that a kubelet has assigned.
    pub(crate) fn found(&self, uid: &str, folder: &Path) {
        let range = match fs::read(folder.join(RECORD)) {
            Ok(content) => range_in(&content),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = self.lock().record(uid, range) {
            let path = folder.join(RECORD);
            tracing::error!(uid, path = %path.display(), error = why, "the IDs of a pod's user namespace are unusable");
        }
    }

    /// The range of a pod.
    pub(crate) fn of_pod(&self, uid: &str) -> Option<IdRange> {
        self.lock().of_pod(uid)
    }

    /// Assigns a range to a pod that has none, and sees to it that the record in the pod's folder names the pod's range. If
    /// the record cannot be written, the range stays the pod's until its folder is removed: the record may exist.
    pub(crate) fn assign(
        &self,
        uid: &str,
        folder: &Path,
        mounter: &Mounter,
    ) -> Result<(), UserNamespaceError> {
        let range = match self.of_pod(uid) {
            Some(range) => range,
            None => {
                let node = self.node_range(mounter)?;
                self.lock().assign(uid, node, self.settings.ids_per_pod)?
            }
        };
        let path = folder.join(RECORD);
        let record = Replacement::new().mode(0o644).durable().temporary_suffix(".tmp");
        let written = record.write_if_changed(&path, record_of(range).as_bytes());
        if written.map_err(|source| UserNamespaceError::Record { path, source })? != Written::Unchanged {
            tracing::debug!(uid, first = range.host_id, length = range.length, "recorded the IDs of a pod");
        }
        Ok(())
    }

    /// Frees the range of a pod whose folder is removed. Nothing of the pod runs then.
    pub(crate) fn release(&self, uid: &str) {
        self.lock().release(uid);
    }

    /// The IDs from which pods get theirs: the subordinate IDs of the user `kubelet`, if there are this user and the program
    /// that lists them; else all that are not the node's own.
    fn node_range(&self, mounter: &Mounter) -> Result<NodeRange, UserNamespaceError> {
        if let Some(range) = *self.node.lock().unwrap_or_else(PoisonError::into_inner) {
            return Ok(range);
        }
        let UserNamespaceSettings { ids_per_pod, max_pods } = self.settings;
        let range = if !self.has_user()? {
            NodeRange::whole_node(ids_per_pod)
        } else if env::split_paths(&self.search_path).any(|folder| folder.join(GETSUBIDS).is_file()) {
            let (users, groups) = (subids(mounter, &[USER])?, subids(mounter, &["-g", USER])?);
            NodeRange::from_subids(&users, &groups, ids_per_pod, max_pods).map_err(IdRangeError::from)?
        } else {
            tracing::warn!(
                "the user {USER} exists, but {GETSUBIDS} is not installed (Debian: uidmap): pods get IDs from all of the node's"
            );
            NodeRange::whole_node(ids_per_pod)
        };
        *self.node.lock().unwrap_or_else(PoisonError::into_inner) = Some(range);
        Ok(range)
    }

    fn has_user(&self) -> Result<bool, UserNamespaceError> {
        let path = self.machine.join("etc/passwd");
        match fs::read(&path) {
            Ok(passwd) => Ok(passwd.split(|byte| *byte == b'\n').any(|line| line.starts_with(USER_FIELD))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(UserNamespaceError::Users { path, source }),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, IdRanges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The output of getsubids(1).
fn subids(mounter: &Mounter, arguments: &[&str]) -> Result<String, UserNamespaceError> {
    let run = mounter.run(GETSUBIDS, arguments, GETSUBIDS_DEADLINE);
    let output = tokio::runtime::Handle::current().block_on(run).map_err(UserNamespaceError::Subids)?;
    if output.code == Some(0) {
        return Ok(output.stdout);
    }
    let (arguments, stderr) = (arguments.join(" "), output.stderr.trim());
    let code = output.code.map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"));
    let text = format!(
        "{GETSUBIDS} {arguments} ended with {code}: {stderr}; give the user {USER} IDs in /etc/subuid and /etc/subgid, \
         or remove the user"
    );
    Err(UserNamespaceError::Subids(PluginError::new(text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounter::testing::TestFolder;

    const SETTINGS: UserNamespaceSettings = UserNamespaceSettings { ids_per_pod: 65_536, max_pods: 2 };

    /// A node with its `etc/passwd`, and a script in place of getsubids.
    struct Node {
        folder: TestFolder,
    }

    impl Node {
        fn new(passwd: &str, getsubids: Option<&str>) -> Self {
            let folder = TestFolder::new();
            fs::write(folder.folder("etc").join("passwd"), passwd).unwrap();
            if let Some(script) = getsubids {
                folder.program(GETSUBIDS, script);
            }
            Self { folder }
        }

        fn pod_folder(&self, uid: &str) -> PathBuf {
            self.folder.folder(uid)
        }

        fn namespaces(&self) -> UserNamespaces {
            UserNamespaces {
                machine: self.folder.path().into(),
                search_path: self.folder.path().join("bin").into(),
                ..UserNamespaces::new(SETTINGS)
            }
        }

        /// Assigns a range on a thread on which blocking is allowed.
        async fn assign(&self, namespaces: UserNamespaces, uid: &str) -> Result<Option<IdRange>, String> {
            let (folder, uid, mounter) = (self.pod_folder(uid), uid.to_owned(), self.folder.mounter());
            let assign = move || {
                let assigned = namespaces.assign(&uid, &folder, &mounter);
                assigned.map(|()| namespaces.of_pod(&uid)).map_err(|error| error.to_string())
            };
            tokio::task::spawn_blocking(assign).await.unwrap()
        }
    }

    const KUBELET: &str = "root:x:0:0::/:/bin/sh\nkubelet:x:999:999::/:/bin/false\n";

    #[tokio::test]
    async fn pods_get_the_subordinate_ids_of_the_kubelet_user() {
        let node = Node::new(KUBELET, Some("echo '0: kubelet 131072 131072'"));
        let range = node.assign(node.namespaces(), "a").await.unwrap();
        assert_eq!(range, Some(IdRange { host_id: 131_072, length: 65_536 }));
        let record = fs::read_to_string(node.pod_folder("a").join(RECORD)).unwrap();
        assert_eq!(record, record_of(range.unwrap()));
    }

    #[tokio::test]
    async fn without_kubelet_user_or_getsubids_pods_get_ids_of_the_whole_node() {
        let first = Some(IdRange { host_id: 65_536, length: 65_536 });
        for (passwd, getsubids) in [("kubelet2:x:1:1::/:/bin/sh\n", Some("exit 1")), (KUBELET, None)] {
            let node = Node::new(passwd, getsubids);
            assert_eq!(node.assign(node.namespaces(), "a").await.unwrap(), first, "{passwd}");
        }
    }

    #[tokio::test]
    async fn a_lost_userns_file_of_a_pod_is_written_again() {
        let node = Node::new("", None);
        let namespaces = node.namespaces();
        namespaces.found("a", &node.pod_folder("a"));
        let record = node.pod_folder("a").join(RECORD);
        let (folder, mounter) = (node.pod_folder("a"), node.folder.mounter());
        let assign = move || {
            namespaces.assign("a", &folder, &mounter).unwrap();
            let written = fs::read(folder.join(RECORD)).unwrap();
            fs::remove_file(folder.join(RECORD)).unwrap();
            namespaces.assign("a", &folder, &mounter).unwrap();
            written
        };
        let written = tokio::task::spawn_blocking(assign).await.unwrap();
        assert_eq!(fs::read(record).unwrap(), written);
    }

    #[tokio::test]
    async fn a_kubelet_user_is_found_in_any_passwd_and_an_unreadable_one_is_an_error() {
        let node = Node::new("", Some("echo '0: kubelet 131072 131072'"));
        let passwd = node.folder.path().join("etc/passwd");
        fs::write(&passwd, b"j\xf6rg:x:1:1:J\xf6rg:/:/bin/sh\nkubelet:x:999:999::/:/bin/false\n").unwrap();
        assert_eq!(node.assign(node.namespaces(), "a").await.unwrap().unwrap().host_id, 131_072);
        fs::remove_file(&passwd).unwrap();
        fs::create_dir(&passwd).unwrap();
        let error = node.assign(node.namespaces(), "b").await.unwrap_err();
        assert!(error.contains("etc/passwd, which says whether there is a user kubelet"), "{error}");
    }

    #[tokio::test]
    async fn unusable_subordinate_ids_refuse_user_namespaces_with_the_remedy() {
        let different =
            "case $1 in -g) echo '0: kubelet 131072 131072';; *) echo '0: kubelet 65536 131072';; esac";
        let cases = [
            (
                "echo 'cannot open' >&2; exit 1",
                "ended with exit code 1: cannot open; give the user kubelet IDs",
            ),
            ("echo '0: kubelet 65536 65536'", "they are enough for 1 pods, but maxPods is 2"),
            (different, "differ"),
        ];
        for (script, why) in cases {
            let node = Node::new(KUBELET, Some(script));
            let error = node.assign(node.namespaces(), "a").await.unwrap_err();
            assert!(error.contains(why), "{error}");
            assert!(!node.pod_folder("a").join(RECORD).exists(), "{script}");
        }
    }

    #[tokio::test]
    async fn a_user_namespace_range_survives_a_restart_and_is_free_after_its_pods_end() {
        let node = Node::new("", None);
        let range = node.assign(node.namespaces(), "a").await.unwrap();
        let restarted = node.namespaces();
        restarted.found("a", &node.pod_folder("a"));
        restarted.found("without", &node.pod_folder("without"));
        assert_eq!(restarted.of_pod("a"), range);
        assert_eq!(restarted.of_pod("without"), None);
        assert_eq!(node.assign(restarted, "b").await.unwrap().unwrap().host_id, 131_072);
        let restarted = node.namespaces();
        restarted.found("a", &node.pod_folder("a"));
        restarted.release("a");
        assert_eq!(node.assign(restarted, "c").await.unwrap(), range);
    }

    #[tokio::test]
    async fn a_broken_userns_file_refuses_new_user_namespaces_and_keeps_the_file() {
        let node = Node::new("", None);
        fs::write(node.pod_folder("broken").join(RECORD), "{").unwrap();
        let namespaces = node.namespaces();
        namespaces.found("broken", &node.pod_folder("broken"));
        let error = node.assign(namespaces, "new").await.unwrap_err();
        assert!(error.contains("that of pod broken is unusable"), "{error}");
        assert_eq!(fs::read(node.pod_folder("broken").join(RECORD)).unwrap(), b"{");
    }

    #[tokio::test]
    async fn an_id_range_that_cannot_be_recorded_is_an_error_and_stays_its_pods() {
        let node = Node::new("", None);
        let namespaces = node.namespaces();
        let (folder, mounter) = (node.folder.path().join("missing"), node.folder.mounter());
        let error = namespaces.assign("a", &folder, &mounter).unwrap_err();
        assert!(matches!(error, UserNamespaceError::Record { .. }), "{error}");
        // The record may have been written nevertheless, so no other pod gets the range.
        let range = namespaces.of_pod("a");
        assert_eq!(node.assign(namespaces, "b").await.unwrap().unwrap().host_id, 131_072);
        assert_eq!(range.unwrap().host_id, 65_536);
    }
}
