//! The cgroups of pods in every hierarchy (cgroups(7)).

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use keelson_testkit::cgroup_hierarchies;

/// The folders of all pod cgroups (`pod<uid>`) below the cgroup `root` (such as `/keelson-x`), in every hierarchy.
pub fn pod_cgroups(root: &str) -> Vec<PathBuf> {
    cgroup_hierarchies().iter().flat_map(|point| pod_cgroups_below(&point.join(relative(root)))).collect()
}

fn pod_cgroups_below(top: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![top.to_owned()];
    while let Some(folder) = open.pop() {
        for child in folders(&folder) {
            let name = child.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with("pod") { found.push(child) } else { open.push(child) }
        }
    }
    found
}

/// Removes the cgroups of pods below `root`. They must have no processes.
pub fn remove_pods(root: &str) -> anyhow::Result<()> {
    for pod in pod_cgroups(root) {
        for group in folders(&pod).into_iter().chain([pod]) {
            match fs::remove_dir(&group) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("cannot remove the cgroup {}", group.display()));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Creates the parent of a pod's cgroup. The agent creates it once for all pods.
pub fn create_parent(pod_cgroup: &str) -> anyhow::Result<()> {
    let Some(parent) = relative(pod_cgroup).parent() else { return Ok(()) };
    for folder in cgroup_hierarchies().iter().map(|point| point.join(parent)) {
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create the cgroup {}", folder.display()))?;
    }
    Ok(())
}

fn relative(cgroup: &str) -> &Path {
    Path::new(cgroup.trim_matches('/'))
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_cgroups_are_found_at_every_level_without_their_children() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        for folder in ["kubepods/besteffort/podb/pody", "kubepods/poda/c", "kubepods/burstable"] {
            fs::create_dir_all(scratch.path().join(folder)).unwrap();
        }
        let mut found = pod_cgroups_below(scratch.path());
        found.sort();
        let expected = ["kubepods/besteffort/podb", "kubepods/poda"].map(|path| scratch.path().join(path));
        assert_eq!(found, expected);
        assert_eq!(pod_cgroups_below(&scratch.path().join("nothing")), Vec::<PathBuf>::new());
    }
}
