//! The state of pod-sync: one [`pod_state::PodState`] per UID in the [`registry::PodRegistry`], what the other services are to hold of
//! each pod, and the records that outlive the process. Nothing here makes a call: the `Sync` streams of
//! [`sync_streams`] get theirs from the caller.

pub mod admission_record;
pub mod adopted_uids;
pub mod desired_state;
pub mod eviction_inputs;
pub mod inbox;
pub mod observed;
pub mod pending_trigger;
pub mod pod_state;
pub mod probe_tasks;
pub mod published;
pub mod registry;
pub mod resize_queue;
pub mod runtime_records;
pub mod start_record;
pub mod store;
pub mod sync_streams;
pub mod volume_messages;
