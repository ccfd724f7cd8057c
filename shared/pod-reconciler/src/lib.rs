//! Shared code of the services that receive pod-sync's `Sync` stream and reconcile each pod with it.
//!
//! | module | does |
//! |---|---|
//! | `manager_handle` | the gRPC side: reads `Sync` streams, sends requests to the manager, waits for pods |
//! | `pods` | the manager's side: the desired set, and a slot and a worker per pod |
//! | `assignment` | the worker's side: its current assignment and when its next turn starts |
//! | `runtime` | asks runtime-shim whether anything of a pod still runs |
//! | `wire` | converts the parts of a desire that are the same for every callee |
//!
//! A callee has one manager task, which owns a [`Pods`]. The manager receives [`Command`]s from the gRPC side and from
//! the workers, and handles the resulting [`PodEvent`]s. A worker publishes the state of its pod in the pod's view;
//! callers wait on that view.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

mod assignment;
mod manager_handle;
mod pods;
mod runtime;
pub mod wire;

pub use assignment::{Assignment, Assignments, Next, Turn, running_pod_backoff};
pub use manager_handle::{Acks, DESIRED_TIMEOUT, Item, ManagerHandle, not_desired_error, wait_until};
pub use pods::{Command, PodEvent, Pods, QUEUE, Slot, View};
pub use runtime::Runtime;
