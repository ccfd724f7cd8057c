//! The pure decision functions of pod-sync: no clock, no I/O, no runtime.
//!
//! Every function takes what it needs as arguments and returns a value, so a service that was killed and started
//! again reaches the same decision from the same pod, the same observation and the same moment.
//!
//! | module | what it decides or computes |
//! |---|---|
//! | [`observation`] | the sandboxes and containers that the runtime has for a pod (input) |
//! | [`admission`] | whether the node may run the pod, from the pod's spec and the Node object |
//! | [`allocation`] | the resources that the pod was admitted with |
//! | [`actions`] | what must change so that the containers match the spec |
//! | [`backoff`] | crash-loop back-off: until when a container waits before it is restarted |
//! | [`restart`] | whether a terminated container may restart |
//! | [`termination`] | the grace periods of containers and the order in which they stop |
//! | [`worker`], [`ordering`] | the state machine of one UID's worker; which static pod may start |
//! | [`probe`] | when a probe is due, and the result after each outcome |
//! | [`status`], [`phase`], [`conditions`], [`accept`] | the pod status, and whether it may be stored |
//! | [`measure`], [`start_time`], [`census`] | metrics of pods and workers |
//! | [`explain`] | what a pod waits for, since when, and who has to act |
//! | [`adoption`] | whether a static pod runs already under the UID of a kubelet |
//! | [`runtime_version`] | what a runtime supports according to its name and version |
//! | [`config`] | the CRI requests for sandboxes and containers, as plain structs |

pub mod accept;
pub mod actions;
pub mod admission;
pub mod adoption;
pub mod allocation;
pub mod backoff;
pub mod census;
pub mod conditions;
pub mod config;
pub mod created_ids;
pub mod explain;
pub mod measure;
pub mod moment;
pub mod observation;
pub mod ordering;
pub mod phase;
pub mod probe;
pub mod reason;
pub mod resize;
pub mod restart;
pub mod runtime_version;
pub mod start_time;
pub mod status;
pub mod termination;
pub mod worker;

#[cfg(test)]
mod testing;

pub use moment::Moment;
pub use reason::Reason;

/// The container hash, as it is stored in the annotations of a container record.
pub fn container_hash(container: &keelson_kube_model::Container) -> String {
    keelson_kube_model::hash::container_hash(&container.name, &container.image)
}
