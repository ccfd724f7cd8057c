//! The volumes of a node that its pods share (volumes.md §3.5 to §3.16): what is desired, what exists, and what to do
//! next.
//!
//! The caller keeps three values and works in a loop: [`DesiredWorld`], [`ActualWorld`] and
//! [`Operations`](crate::operations::Operations). It asks [`plan_world`] for the next actions, records with
//! [`ActualWorld::record_start`] that one starts and with [`ActualWorld::record_success`] or
//! [`ActualWorld::record_failure`] how it ended, and asks again. The specs of volumes and pods stay with the caller,
//! under the names that an [`Action`] carries.

mod action;
mod actual;
mod desired;
mod in_use;
mod outcome;
mod planner;
#[cfg(test)]
mod tests;
mod unknown;

pub use action::{Action, Learned};
pub use actual::{ActualPod, ActualVolume, ActualWorld, Attachability, FoundVolume, Lookup};
pub use desired::{DesiredPod, DesiredVolume, DesiredWorld, LabelConflict, MountLabel, Shape, WantedVolume};
pub use in_use::volumes_in_use;
pub use outcome::{
    DeviceState, FailureClass, MountStep, PodState, device_after_failure, mapped_texts, pod_after_failure,
};
pub use planner::{AttachedBy, Situation, Wait, WaitReason, WorldPlan, plan_world};
pub use unknown::{UnknownFolder, UnknownFolders};
