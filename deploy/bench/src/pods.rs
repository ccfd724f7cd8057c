//! The pods of the benchmarks. They are small and equal, and the arguments of their processes identify them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use keelson_testkit::BUSYBOX_IMAGE;

/// The namespace of the pods.
pub const NAMESPACE: &str = "default";

/// The lowest marker. All markers are below 2^32, the most seconds that busybox can sleep.
const LOWEST_MARKER: u64 = 1_000_000_000;

/// One pod of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// The name in the manifest.
    pub name: String,
    /// The number of seconds that its process sleeps. No other process has it as an argument.
    pub marker: String,
    /// The kind of the pod.
    pub kind: Kind,
}

/// The kind of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It sleeps and has an emptyDir.
    Plain,
    /// It writes its log until it is killed, instead of sleeping.
    FloodsLog,
    /// It has [`PROJECTED`] projected volumes, each with [`OBJECTS`] and a field of the pod.
    Projected,
    /// It has a volume of a claim with the pod's name.
    Claim,
}

/// The number of projected volumes of a [`Kind::Projected`] pod.
pub const PROJECTED: usize = 5;
/// The name of the ConfigMap and of the Secret in projected volumes.
pub const OBJECTS: &str = "bench-objects";

/// A new pod that writes its log as fast as it can.
pub fn flooding_pod() -> Pod {
    let mut pods = new_pods(1);
    Pod { kind: Kind::FloodsLog, ..pods.remove(0) }
}

/// Pods of one kind with names that no other pod of this run has.
pub fn new_pods_of(kind: Kind, count: usize) -> Vec<Pod> {
    new_pods(count).into_iter().map(|pod| Pod { kind, ..pod }).collect()
}

/// Plain pods with names that no other pod of this run has.
pub fn new_pods(count: usize) -> Vec<Pod> {
    let first = LOWEST_MARKER + fastrand::u64(..2_000_000) * 1_000;
    numbered(first, count)
}

fn numbered(first: u64, count: usize) -> Vec<Pod> {
    (first..)
        .take(count)
        .map(|number| Pod { name: format!("bench-{number}"), marker: number.to_string(), kind: Kind::Plain })
        .collect()
}

/// The markers of `pods`.
pub fn markers(pods: &[Pod]) -> Vec<String> {
    pods.iter().map(|pod| pod.marker.clone()).collect()
}

impl Pod {
    /// The name of its manifest file.
    pub fn file(&self) -> String {
        format!("{}.yaml", self.name)
    }

    /// The manifest. The grace period is zero, because the process, as PID 1, ignores SIGTERM.
    pub fn manifest(&self) -> String {
        let Self { name, marker, kind } = self;
        let (mounts, volumes) = self.more_volumes();
        let command = if *kind == Kind::FloodsLog {
            // Lines of 4000 zeros and the marker.
            format!(r#"["/bin/sh", "-c", "exec yes \"$(printf %04000d 0)\" \"$0\"", "{marker}"]"#)
        } else {
            format!(r#"["/bin/sleep", "{marker}"]"#)
        };
        format!(
            r#"apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: {NAMESPACE}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: main
    image: {BUSYBOX_IMAGE}
    imagePullPolicy: IfNotPresent
    command: {command}
    volumeMounts:
    - name: data
      mountPath: /data
{mounts}  volumes:
  - name: data
    emptyDir: {{}}
{volumes}"#
        )
    }

    /// The lines of the mounts and of the volumes, without those of the emptyDir.
    fn more_volumes(&self) -> (String, String) {
        let volumes: Vec<(String, String)> = match self.kind {
            Kind::Plain | Kind::FloodsLog => Vec::new(),
            Kind::Claim => {
                vec![("claim".to_owned(), format!("persistentVolumeClaim: {{claimName: {}}}", self.name))]
            }
            Kind::Projected => (0..PROJECTED).map(|at| (format!("projected-{at}"), projected())).collect(),
        };
        let mount = |(name, _): &(String, String)| format!("    - {{name: {name}, mountPath: /{name}}}\n");
        let volume = |(name, source): &(String, String)| format!("  - name: {name}\n    {source}\n");
        (volumes.iter().map(mount).collect(), volumes.iter().map(volume).collect())
    }
}

/// The source of a projected volume.
fn projected() -> String {
    let field = "{path: name, fieldRef: {fieldPath: metadata.name}}";
    format!(
        "projected: {{sources: [{{configMap: {{name: {OBJECTS}}}}}, {{secret: {{name: {OBJECTS}}}}}, \
         {{downwardAPI: {{items: [{field}]}}}}]}}"
    )
}

/// Manifests in a folder on the same filesystem as the manifest folder, ready to be moved there.
#[derive(Debug)]
pub struct Staged {
    moves: Vec<(PathBuf, PathBuf)>,
}

impl Staged {
    /// Writes the manifests of `pods` into the folder `staging`.
    pub fn write(pods: &[Pod], staging: &Path, manifest_dir: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(staging).with_context(|| format!("cannot create {}", staging.display()))?;
        let mut moves = Vec::new();
        for pod in pods {
            let from = staging.join(pod.file());
            fs::write(&from, pod.manifest()).with_context(|| format!("cannot write {}", from.display()))?;
            moves.push((from, manifest_dir.join(pod.file())));
        }
        Ok(Self { moves })
    }

    /// Moves the manifests into the manifest folder, one after the other.
    pub fn put_in_place(self) -> anyhow::Result<()> {
        for (from, to) in self.moves {
            fs::rename(&from, &to).with_context(|| format!("cannot move a manifest to {}", to.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn markers_are_different_and_fit_into_32_bits() {
        let pods = new_pods(1_000);
        let different: BTreeSet<String> = markers(&pods).into_iter().collect();
        assert_eq!(different.len(), 1_000);
        let highest = numbered(LOWEST_MARKER + 1_999_999 * 1_000, 1_000).pop().unwrap();
        assert!(highest.marker.parse::<u32>().is_ok(), "{}", highest.marker);
    }

    #[test]
    fn a_manifest_has_the_name_and_the_marker_of_its_pod() {
        let text = numbered(7, 1)[0].manifest();
        assert!(text.contains("  name: bench-7\n") && text.contains(r#"["/bin/sleep", "7"]"#), "{text}");
    }

    #[test]
    fn manifests_have_the_claim_or_the_projected_volumes_of_their_kind() {
        let manifest = |kind| Pod { kind, ..numbered(7, 1).remove(0) }.manifest();
        let text = manifest(Kind::Claim);
        assert!(text.contains("persistentVolumeClaim: {claimName: bench-7}"), "{text}");
        assert!(text.contains("- {name: claim, mountPath: /claim}"), "{text}");
        let text = manifest(Kind::Projected);
        assert_eq!(
            (text.matches("projected: {").count(), text.matches("mountPath: /projected-").count()),
            (5, 5)
        );
    }

    #[test]
    fn the_marker_is_the_last_argument_of_a_flooding_pod() {
        let flood = flooding_pod();
        let wanted = format!(r#"\"$0\"", "{}"]"#, flood.marker);
        assert!(flood.manifest().contains(&wanted), "{}", flood.manifest());
    }

    #[test]
    fn staged_manifests_appear_when_they_are_put_in_place() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let folder = scratch.path().join("manifests");
        fs::create_dir(&folder).unwrap();
        let staged = Staged::write(&numbered(1, 3), &scratch.path().join("staging"), &folder).unwrap();
        let count = || fs::read_dir(&folder).unwrap().count();
        assert_eq!(count(), 0);
        staged.put_in_place().unwrap();
        assert_eq!(count(), 3);
    }
}
