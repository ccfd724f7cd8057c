//! The labels of folders where SELinux is on (volumes.md §2).

use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;

/// The folders of the root folder in which plugins meet the agent.
const FOLDERS: [&str; 2] = ["plugins", "plugins_registry"];
/// Their label: a container may use what lies there.
const FOLDER_LABEL: &str = "system_u:object_r:container_file_t:s0";

/// Labels the folders of plugins below `root` by `set` where SELinux is on. A label that cannot be set is logged:
/// only plugins that run in containers miss it.
pub(crate) fn label_folders(root: &Path, is_enabled: bool, set: impl Fn(&Path) -> io::Result<()>) {
    if !is_enabled {
        return;
    }
    for folder in FOLDERS.map(|name| root.join(name)) {
        if let Err(error) = set(&folder) {
            tracing::warn!(
                path = %folder.display(), %error,
                "cannot set the SELinux label {FOLDER_LABEL}: plugins in containers may not reach the folder"
            );
        }
    }
}

/// Gives a folder its label.
pub(crate) fn set_label(folder: &Path) -> io::Result<()> {
    let flags = XattrFlags::empty();
    Ok(rustix::fs::lsetxattr(folder, c"security.selinux", FOLDER_LABEL.as_bytes(), flags)?)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn the_folders_of_plugins_are_labelled_where_selinux_is_on_and_one_that_fails_is_only_told() {
        for is_enabled in [true, false] {
            let labelled = RefCell::new(Vec::new());
            label_folders(Path::new("/r"), is_enabled, |folder| {
                labelled.borrow_mut().push(folder.to_owned());
                Err(io::ErrorKind::PermissionDenied.into())
            });
            let expected: &[&str] = if is_enabled { &["/r/plugins", "/r/plugins_registry"] } else { &[] };
            assert_eq!(labelled.into_inner(), expected.iter().map(Path::new).collect::<Vec<_>>());
        }
    }
}
