//! Expansion of volumes on the node (volumes.md §4): when a volume is expanded and to which size, what the result
//! means, and how the claim's status changes.
//!
//! Sizes come from the caller in bytes, next to their text, so that `1Gi` and `1024Mi` are equal. Each patch is a
//! strategic merge patch of the claim's `status` subresource.

use serde_json::{Map, Value, json};

use crate::objects::{ClaimStatus, PersistentVolumeClaim};

/// The annotation of a claim whose nodes need not expand anything.
pub const NOT_REQUIRED_ANNOTATION: &str = "volume.kubernetes.io/node-expansion-not-required";

/// The resource whose quantities are sizes of volumes.
const STORAGE: &str = "storage";
const READ_WRITE_MANY: &str = "ReadWriteMany";
/// `allocatedResourceStatuses`: the control plane is done, the node is not.
const PENDING: &str = "NodeResizePending";
/// `allocatedResourceStatuses`: the node expands the volume.
const IN_PROGRESS: &str = "NodeResizeInProgress";
/// `allocatedResourceStatuses`: the node cannot expand the volume to this size.
const INFEASIBLE: &str = "NodeResizeInfeasible";
/// The condition of a claim that reports an error of the node.
const NODE_ERROR: &str = "NodeResizeError";
/// Conditions that end with an expansion.
const RESIZE_CONDITIONS: [&str; 4] =
    ["Resizing", "FileSystemResizePending", "ControllerResizeError", NODE_ERROR];

/// What a volume comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A PersistentVolume, translated from a legacy source or not.
    PersistentVolume,
    /// The pod.
    Inline,
    /// The pod, translated from a legacy source into a PersistentVolume.
    InlineMigrated,
}

/// Whether a node ever expands a volume. `plugin_can_expand`: the plugin has a way to do it on the node.
pub fn is_expandable(origin: Origin, plugin_can_expand: bool) -> bool {
    match origin {
        Origin::PersistentVolume => plugin_can_expand,
        Origin::Inline | Origin::InlineMigrated => false,
    }
}

/// A quantity and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Size {
    /// The value in bytes, rounded up.
    pub bytes: u64,
    /// The quantity as written, such as `10Gi`.
    pub text: String,
}

/// When a volume is expanded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// After the volume was set up or mapped for a pod.
    AtMount,
    /// While pods use it. `recorded` is the size in the actual state, in bytes.
    Online {
        /// The recorded size.
        recorded: u64,
    },
}

/// What is known about a volume and its claim, which was read just now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes<'a> {
    /// `spec.capacity.storage` of the PersistentVolume.
    pub volume: &'a Size,
    /// `spec.resources.requests.storage` of the claim in bytes, 0 if missing.
    pub requested: u64,
    /// `status.capacity.storage` of the claim in bytes, 0 if missing.
    pub capacity: u64,
    /// `status.allocatedResources.storage` of the claim.
    pub allocated: Option<&'a Size>,
}

/// How an expansion changes its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The resizer keeps track of the expansion in the claim's status.
    Tracked,
    /// The claim has the size already; only the mount of this node grows. A success leaves the claim alone.
    ClaimDone,
    /// The resizer is old and tracks nothing.
    Untracked,
}

/// An expansion to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expansion {
    /// The size before, in bytes.
    pub from: u64,
    /// The size to reach.
    pub to: Size,
    /// How the claim changes.
    pub mode: Mode,
    /// If present, this patch has to succeed before the driver is called. The claim that it returns is the one to pass
    /// to [`finish`].
    pub before: Option<Value>,
}

/// What to do for a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing; the actual state records this size, in bytes.
    Done {
        /// The size.
        recorded: u64,
    },
    /// Nothing but the event `FileSystemResizeFailed` with [`read_only_text`] on pod and claim. The mount continues.
    /// The actual state records the size that the claim has, because another pod may still grow the volume. A pod that
    /// only reads never asks for an online expansion, so the event is not repeated.
    ReadOnly {
        /// The size in bytes.
        recorded: u64,
    },
    /// Nothing for now, and no error: the claim's `allocatedResourceStatuses.storage` is this text, so the resizer has
    /// to act first. Decide again at the next pod sync; until then the claim need not be read.
    Later {
        /// The status; empty: none.
        status: String,
    },
    /// Call the driver.
    Expand(Expansion),
}

/// Decides what to do for an expandable volume. `is_read_only`: the pod uses the claim read-only.
pub fn decide(claim: &PersistentVolumeClaim, sizes: &Sizes<'_>, moment: Moment, is_read_only: bool) -> Step {
    let from = match moment {
        Moment::AtMount => sizes.capacity,
        Moment::Online { recorded } => recorded,
    };
    if from >= sizes.volume.bytes {
        return Step::Done { recorded: from };
    }
    if is_read_only {
        return Step::ReadOnly { recorded: from };
    }
    let expand = |to: &Size, mode, before| Step::Expand(Expansion { from, to: to.clone(), mode, before });
    let status = storage_status(&claim.status);
    if status.is_empty() && sizes.allocated.is_none() {
        return expand(sizes.volume, Mode::Untracked, None);
    }
    let target = sizes.allocated.unwrap_or(sizes.volume);
    let has_size = sizes.capacity >= target.bytes;
    match status {
        PENDING => expand(target, Mode::Tracked, Some(with_version(claim, status_patch(IN_PROGRESS)))),
        IN_PROGRESS => expand(target, Mode::Tracked, None),
        "" if has_size && each_node_expands(claim) => expand(target, Mode::ClaimDone, None),
        "" if has_size => Step::Done { recorded: target.bytes },
        // The controller still works, the size is infeasible, or a status that this version does not know.
        other => Step::Later { status: other.to_owned() },
    }
}

/// Whether every node has to grow its own mount after one node has finished the claim.
fn each_node_expands(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.access_modes.iter().any(|mode| mode == READ_WRITE_MANY)
        && !claim.metadata.annotations.contains_key(NOT_REQUIRED_ANNOTATION)
}

/// What an error of a driver or command says about the expansion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// The driver cannot expand volumes on the node.
    NotSupported,
    /// The driver does not expand the volume while it is in use.
    InUse,
    /// The size cannot be reached.
    Infeasible,
    /// Nothing is left in progress.
    Final,
    /// The expansion may still be in progress, or did not begin. A timeout is one of these.
    Unfinished,
}

impl ErrorClass {
    /// The class of the gRPC status code `code`; `None` is an error that is not a gRPC status.
    pub const fn of_code(code: Option<u32>) -> Self {
        match code {
            // FailedPrecondition.
            Some(9) => Self::InUse,
            // InvalidArgument, NotFound, OutOfRange.
            Some(3 | 5 | 11) => Self::Infeasible,
            // Cancelled, DeadlineExceeded, ResourceExhausted, Aborted, Unavailable.
            None | Some(1 | 4 | 8 | 10 | 14) => Self::Unfinished,
            Some(_) => Self::Final,
        }
    }
}

/// An error of a driver or command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpandError<'a> {
    /// Its class.
    pub class: ErrorClass,
    /// Its text.
    pub text: &'a str,
    /// The current time in RFC 3339, such as `2026-01-02T03:04:05Z`.
    pub now: &'a str,
}

/// What follows from the result of an expansion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The volume has the size.
    Expanded {
        /// The size in bytes, for the actual state.
        recorded: u64,
        /// The patch of the claim, if it changes. If it fails, so does the operation.
        patch: Option<Value>,
    },
    /// Nothing is to be expanded on this node: record the size, without an event.
    NotNeeded {
        /// The size in bytes, for the actual state.
        recorded: u64,
    },
    /// Set the flag that keeps the volume from being expanded while it is in use. The operation does not count as
    /// failed, and the mount continues.
    Refused {
        /// The size in bytes for the actual state, if it changes.
        recorded: Option<u64>,
        /// Remember the volume as one whose expansion ended with a final error.
        is_final: bool,
        /// The patch of the claim. Its errors are only logged.
        patch: Option<Value>,
    },
    /// The operation failed: retry with back-off; at a mount, the mount fails and its state is Uncertain.
    Failed {
        /// Remember the volume as one whose expansion ended with a final error.
        is_final: bool,
        /// The patch of the claim. Its errors are only logged.
        patch: Option<Value>,
    },
}

/// Decides what follows from the result of an expansion. `claim` is the latest version of the claim, `sizes` are those
/// of [`decide`]. `had_final_error`: an earlier expansion of this volume ended with a final error.
pub fn finish(
    expansion: &Expansion,
    claim: &PersistentVolumeClaim,
    sizes: &Sizes<'_>,
    had_final_error: bool,
    result: Result<(), ExpandError<'_>>,
) -> Outcome {
    let recorded = expansion.to.bytes;
    let Err(error) = result else {
        return Outcome::Expanded { recorded, patch: finished_patch(expansion, claim, sizes) };
    };
    match (expansion.mode, error.class) {
        (Mode::ClaimDone | Mode::Untracked, ErrorClass::NotSupported) => Outcome::NotNeeded { recorded },
        (Mode::Untracked, ErrorClass::InUse) => {
            Outcome::Refused { recorded: Some(recorded), is_final: false, patch: None }
        }
        (Mode::Untracked, _) | (_, ErrorClass::Unfinished) => {
            Outcome::Failed { is_final: false, patch: None }
        }
        (Mode::Tracked | Mode::ClaimDone, class) => {
            // The user asks for another size: let the resizer give up this one.
            let has_changed = had_final_error && sizes.requested != recorded;
            let is_infeasible = class == ErrorClass::Infeasible || has_changed;
            let patch = error_patch(&claim.status, is_infeasible, &error);
            match class {
                ErrorClass::InUse => Outcome::Refused { recorded: None, is_final: true, patch },
                _ => Outcome::Failed { is_final: true, patch },
            }
        }
    }
}

fn finished_patch(expansion: &Expansion, claim: &PersistentVolumeClaim, sizes: &Sizes<'_>) -> Option<Value> {
    let is_done = match expansion.mode {
        Mode::Tracked => false,
        Mode::ClaimDone => true,
        Mode::Untracked => sizes.capacity >= expansion.to.bytes,
    };
    if is_done {
        return None;
    }
    let mut status = Map::new();
    status.insert("capacity".to_owned(), json!({ STORAGE: expansion.to.text }));
    if claim.status.allocated_resource_statuses.contains_key(STORAGE) {
        status.insert("allocatedResourceStatuses".to_owned(), json!({ STORAGE: null }));
    }
    let dropped: Vec<Value> = RESIZE_CONDITIONS
        .iter()
        .filter(|kind| condition(&claim.status, kind).is_some())
        .map(|kind| json!({ "$patch": "delete", "type": kind }))
        .collect();
    if !dropped.is_empty() {
        status.insert("conditions".to_owned(), Value::Array(dropped));
    }
    Some(with_version(claim, json!({ "status": status })))
}

/// The patch that reports an error: without a resourceVersion, because it must not get lost to a change by the resizer.
/// `None` if the claim already says the same.
fn error_patch(claim: &ClaimStatus, is_infeasible: bool, error: &ExpandError<'_>) -> Option<Value> {
    let mut patch = json!({});
    if is_infeasible && storage_status(claim) != INFEASIBLE {
        patch = status_patch(INFEASIBLE);
    }
    let message = format!("failed to expand pvc with {}", error.text);
    let old = condition(claim, NODE_ERROR).filter(|old| old["status"] == "True");
    if old.is_none_or(|old| old["message"] != message.as_str()) {
        let mut new = json!({ "type": NODE_ERROR, "status": "True", "message": message });
        if old.is_none() {
            new["lastTransitionTime"] = error.now.into();
        }
        patch["status"]["conditions"] = json!([new]);
    }
    (patch != json!({})).then_some(patch)
}

fn status_patch(storage: &str) -> Value {
    json!({ "status": { "allocatedResourceStatuses": { STORAGE: storage } } })
}

/// Makes the API server refuse the patch if the claim has changed meanwhile.
fn with_version(claim: &PersistentVolumeClaim, mut patch: Value) -> Value {
    patch["metadata"] = json!({ "resourceVersion": claim.metadata.resource_version });
    patch
}

fn storage_status(claim: &ClaimStatus) -> &str {
    claim.allocated_resource_statuses.get(STORAGE).map_or("", String::as_str)
}

fn condition<'a>(claim: &'a ClaimStatus, kind: &str) -> Option<&'a Value> {
    claim.conditions.iter().find(|condition| condition["type"] == kind)
}

/// The text of the event `FileSystemResizeSuccessful` on pod and claim. `volume` is the inner name.
pub fn expanded_text(volume: &str, node: &str) -> String {
    format!("MountVolume.NodeExpandVolume succeeded for volume {volume:?} {node}")
}

/// The text of the event `VolumeResizeFailed` on the pod. `volume` is the inner name.
pub fn failed_text(volume: &str, cause: &str) -> String {
    format!("NodeExpandVolume.NodeExpandVolume failed for volume {volume:?} : {cause}")
}

/// The text of the event `FileSystemResizeFailed` on pod and claim. `volume` is the inner name.
pub fn read_only_text(volume: &str) -> String {
    format!(
        "MountVolume.NodeExpandVolume failed for volume {volume:?} requested read-only file system; \
         mount it read-write to expand it"
    )
}

#[cfg(test)]
mod tests;
