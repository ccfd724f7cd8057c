//! SELinux labels of the plugin folders (volumes.md §2).

use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;

/// The folders below the root folder through which plugins and the agent communicate.
const FOLDERS: [&str; 2] = ["plugins", "plugins_registry"];
/// The label of these folders; it allows containers to use their content.
const FOLDER_LABEL: &str = "system_u:object_r:container_file_t:s0";

/// Labels the plugin folders below `root` with `set` if SELinux is enabled. An error is only logged, because only
/// plugins that run in containers need the label.
pub(crate) fn label_folders(root: &Path, is_enabled: bool, set: impl Fn(&Path) -> io::Result<()>) {
    if !is_enabled {
        return;
    }
    for folder in FOLDERS.map(|name| root.join(name)) {
        if let Err(error) = set(&folder) {
            tracing::warn!(
                path = %folder.display(), %error,
                "cannot set the SELinux label {FOLDER_LABEL}; plugins in containers may not be able to access the folder"
            );
        }
    }
}

/// Sets the label of a folder.
pub(crate) fn set_label(folder: &Path) -> io::Result<()> {
    let flags = XattrFlags::empty();
    Ok(rustix::fs::lsetxattr(folder, c"security.selinux", FOLDER_LABEL.as_bytes(), flags)?)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn plugin_folders_get_selinux_labels_and_a_failure_is_only_logged() {
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
