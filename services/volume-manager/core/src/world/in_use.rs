//! `volumesInUse` of the node's status: the volumes that the controller must not detach (volumes.md §3.15).

use std::collections::BTreeSet;

use crate::operations::{OperationKind, Operations, VolumeName};
use crate::world::actual::{ActualWorld, Attachability};
use crate::world::desired::DesiredWorld;

/// The names of the attachable volumes that are desired, attached or just being found attached, sorted. `None` as long as
/// the volumes found at startup are not known completely: the list in the API object stays as it is until then.
///
/// A volume found at startup of which nobody knows whether it is attachable counts as attachable.
///
/// Parity: kubelet 1.36 does not count a volume whose attachment is being checked. If its pod ends meanwhile and another
/// one wants it, the volume can be mounted while the controller detaches it.
pub fn volumes_in_use(
    desired: &DesiredWorld,
    actual: &ActualWorld,
    operations: &Operations,
) -> Option<Vec<VolumeName>> {
    if !actual.is_synced() {
        return None;
    }
    let desired = desired.volumes().filter(|(_, volume)| volume.shape.is_attachable()).map(|(name, _)| name);
    let may_be_attached = |attachability| match attachability {
        Attachability::True | Attachability::Uncertain => true,
        Attachability::False => false,
    };
    let actual = actual.volumes().filter(|(_, v)| may_be_attached(v.attachability)).map(|(name, _)| name);
    let checked = operations.volumes_with(OperationKind::VerifyAttached);
    let attaching = operations.volumes_with(OperationKind::Attach);
    let names: BTreeSet<_> = desired.chain(actual).chain(checked).chain(attaching).cloned().collect();
    Some(names.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::operations::OperationKey;
    use crate::world::action::{Action, Learned};
    use crate::world::actual::FoundVolume;
    use crate::world::desired::{Shape, WantedVolume};

    fn wanted(volume: &str, shape: Shape) -> WantedVolume {
        WantedVolume::inline(volume.into(), "a".into(), volume, shape)
    }

    fn synced() -> ActualWorld {
        let mut actual = ActualWorld::default();
        actual.finish_reading();
        actual
    }

    fn in_use(desired: &DesiredWorld, actual: &ActualWorld) -> Option<Vec<VolumeName>> {
        volumes_in_use(desired, actual, &Operations::default())
    }

    #[test]
    fn a_volume_whose_attachment_is_being_checked_stays_in_use_without_its_pod() {
        for (kind, is_in_use) in [
            (OperationKind::VerifyAttached, true),
            (OperationKind::Attach, true),
            (OperationKind::SetUp, false),
        ] {
            let (key, mut operations) = (OperationKey::whole("v".into(), None), Operations::default());
            operations.start(&key, kind, 0).unwrap();
            let names = volumes_in_use(&DesiredWorld::default(), &synced(), &operations).unwrap();
            assert_eq!(names == ["v".into()], is_in_use, "{kind:?}");
            operations.finish(&key, Err("no".into()), 0);
            assert_eq!(volumes_in_use(&DesiredWorld::default(), &synced(), &operations), Some(vec![]));
        }
    }

    #[test]
    fn attachable_volumes_are_in_use_from_wanted_until_forgotten_sorted_and_once() {
        let (mut desired, mut actual) = (DesiredWorld::default(), synced());
        desired.add(wanted("z", Shape::AttachableDevice)).unwrap();
        desired.add(wanted("device", Shape::Device)).unwrap();
        desired.add(wanted("plain", Shape::PerPod)).unwrap();
        for volume in ["z", "b"] {
            let action = Action::VerifyAttached { volume: volume.into(), pod: "a".into() };
            actual.record_success(&action, Learned::default());
        }
        for volume in ["device", "plain"] {
            actual.record_success(&Action::MarkAttached { volume: volume.into() }, Learned::default());
        }
        assert_eq!(in_use(&desired, &actual), Some(vec!["b".into(), "z".into()]));
        actual.record_success(&Action::Forget { volume: "b".into() }, Learned::default());
        assert_eq!(in_use(&desired, &actual), Some(vec!["z".into()]));
        assert_eq!(in_use(&DesiredWorld::default(), &synced()), Some(vec![]));
    }

    #[test]
    fn volumes_in_use_are_not_reported_before_the_state_is_synced() {
        let desired = DesiredWorld::default();
        let found = FoundVolume {
            volume: "v".into(),
            pod: "a".into(),
            has_device: true,
            device_mount_path: None,
            label: None,
        };
        for is_listed in [true, false] {
            let mut actual = ActualWorld::default();
            actual.add_found(found.clone());
            assert_eq!(in_use(&desired, &actual), None);
            actual.finish_reading();
            assert_eq!(in_use(&desired, &actual), None);
            let attached: BTreeMap<_, _> =
                is_listed.then(|| ("v".into(), String::new())).into_iter().collect();
            actual.apply_node_status(&attached);
            let names = if is_listed { vec!["v".into()] } else { vec![] };
            assert_eq!(in_use(&desired, &actual), Some(names));
        }
        let mut actual = ActualWorld::default();
        actual.add_found(found);
        actual.finish_reading();
        actual.skip_node_status();
        assert_eq!(in_use(&desired, &actual), Some(vec!["v".into()]));
    }
}
