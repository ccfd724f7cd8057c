//! The events and metrics of operations.

use keelson_service_kit::{EventRing, ObjectRef};
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::expansion::failed_text;
use keelson_volume_manager_core::world::{Action, MountStep};

use crate::metrics::Operation;
use crate::plugins::{PluginError, VolumeSpec};

/// Records the error of an action that was done for a pod.
pub(super) fn record_failure(events: &EventRing, spec: &VolumeSpec, action: &Action, error: &PluginError) {
    let pod = ObjectRef::pod(&spec.pod.namespace, &spec.pod.name, &spec.pod.uid);
    let step = match action {
        Action::MountDevice { .. } => error.step.unwrap_or(MountStep::MountDevice),
        Action::SetUp { .. } => error.step.unwrap_or(MountStep::SetUp),
        Action::Resize { .. } => {
            let text = failed_text(&spec.inner_name, &error.message);
            return events.warning(pod, "VolumeResizeFailed", text);
        }
        _ => return,
    };
    let (reason, text) = match spec.mode {
        VolumeMode::Filesystem => ("FailedMount", step.failure(&spec.inner_name, &error.message)),
        VolumeMode::Block => step.map_failure(&spec.inner_name, &error.message),
    };
    if let Some(volume) = spec.persistent.as_deref().filter(|_| error.is_filesystem_mismatch) {
        let object = ObjectRef {
            kind: "PersistentVolume".to_owned(),
            name: volume.metadata.name.clone(),
            uid: volume.metadata.uid.clone(),
            ..ObjectRef::default()
        };
        events.warning(object, "FailedMountOnFilesystemMismatch", text.clone());
    }
    events.warning(pod, reason, text);
}

/// The operation as metrics name it; `None` for an action that is no operation.
pub(super) fn operation_of(action: &Action, is_block: bool) -> Option<Operation> {
    Some(match (action, is_block) {
        (Action::SetUp { .. } | Action::MountDevice { .. }, false) => Operation::Mount,
        (Action::SetUp { .. } | Action::MountDevice { .. }, true) => Operation::Map,
        (Action::TearDown { .. }, false) => Operation::Unmount,
        (Action::TearDown { .. }, true) => Operation::Unmap,
        (Action::UnmountDevice { .. }, false) => Operation::UnmountDevice,
        (Action::UnmountDevice { .. }, true) => Operation::UnmapDevice,
        (Action::VerifyAttached { .. }, _) => Operation::VerifyAttached,
        (Action::Attach { .. }, _) => Operation::Attach,
        (Action::Detach { .. }, _) => Operation::Detach,
        (Action::Resize { .. }, _) => Operation::Resize,
        (Action::MarkAttached { .. } | Action::Forget { .. }, _) => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use keelson_service_kit::Metrics;
    use keelson_volume_manager_core::world::MountLabel;

    use super::*;
    use crate::metrics::{OperationMetrics, PluginLabel};

    #[test]
    fn each_operation_has_the_name_of_the_kubelets_metric() {
        let (volume, pod, label) = (|| "v".into(), || "a".into(), MountLabel::Unlabelled);
        let actions = [
            (Action::MountDevice { volume: volume(), pod: pod(), label }, "volume_mount", "map_volume"),
            (Action::TearDown { volume: volume(), pod: pod() }, "volume_unmount", "unmap_volume"),
            (Action::UnmountDevice { volume: volume() }, "unmount_device", "unmap_device"),
            (
                Action::VerifyAttached { volume: volume(), pod: pod() },
                "verify_controller_attached_volume",
                "verify_controller_attached_volume",
            ),
            (Action::Attach { volume: volume(), pod: pod() }, "volume_attach", "volume_attach"),
            (Action::Detach { volume: volume() }, "volume_detach", "volume_detach"),
            (
                Action::Resize { volume: volume(), pod: pod(), size: 1 },
                "volume_fs_resize",
                "volume_fs_resize",
            ),
        ];
        for (action, filesystem, block) in actions {
            for (is_block, name) in [(false, filesystem), (true, block)] {
                let registry = Metrics::new();
                let metrics = OperationMetrics::register(&registry);
                let operation = operation_of(&action, is_block).unwrap();
                metrics.ended(PluginLabel::default(), operation, true, Duration::from_secs(1));
                let text = registry.text();
                assert!(text.contains(&format!("operation_name=\"{name}\"")), "{action:?}\n{text}");
            }
        }
        assert_eq!(operation_of(&Action::Forget { volume: volume() }, false), None);
    }
}
