//! Volumes that pods want with different SELinux labels (volumes.md §6).

use keelson_volume_manager_core::selinux::{self, ChangePolicy, Finding, VolumeUse};
use keelson_volume_manager_core::world::DesiredWorld;

use super::records::ResolvedSpec;
use crate::plugins::PluginError;
use crate::selinux::SeLinuxMetrics;

/// Compares the label of a volume with the one for which the first pod has it, and counts what was found.
///
/// # Errors
/// The pod cannot have the volume as long as the others have it.
pub(super) fn check(
    desired: &DesiredWorld,
    resolved: &ResolvedSpec,
    metrics: &SeLinuxMetrics,
) -> Result<(), PluginError> {
    let (name, pod, spec) = (resolved.name(), resolved.pod(), &resolved.spec);
    let access_modes = spec.persistent.as_ref().map(|volume| volume.spec.access_modes.as_slice());
    let driver = spec.source["driver"].as_str().unwrap_or_default();
    let plugin = selinux::plugin_label(&resolved.plugin.plugin_name(spec), driver);
    let wanted = resolved.labels.labels.wanted.as_ref();
    let Some(existing) = desired.volume(&name) else {
        if wanted.is_some() {
            metrics.admitted(access_modes, &plugin);
        }
        return Ok(());
    };
    if desired.has(&name, &pod, &spec.outer_name) {
        return Ok(());
    }
    let volume = VolumeUse {
        name: &spec.inner_name,
        access_modes,
        supports_label: resolved.identity.supports_label,
        policy: ChangePolicy::MountOption,
    };
    let first = existing.wanted_label.as_ref();
    let Err(finding) = selinux::check_second_pod(resolved.labels.node, &volume, first, wanted) else {
        return Ok(());
    };
    metrics.found(&finding, access_modes, &plugin, (pod.as_str(), &spec.outer_name));
    match finding {
        Finding::Warning(_) => Ok(()),
        Finding::Refusal(error) => Err(PluginError::new(error.to_string()).for_you()),
    }
}
