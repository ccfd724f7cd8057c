//! The pure decisions of pod-sync: no clock, no I/O, no runtime.
//!
//! Every function takes what it needs as arguments and returns a value, so a service that was killed and started
//! again reaches the same decision from the same pod, the same observation and the same moment.
//!
//! | module | what it answers |
//! |---|---|
//! | [`observation`] | what the runtime was seen to hold of a pod |
//! | [`admission`] | may the pod run on this node, as far as spec and Node say? |
//! | [`allocation`] | what was the pod admitted with? |
//! | [`actions`] | what must change so that the containers match the spec |
//! | [`backoff`] | which container waits, and until when, before it is started again |
//! | [`restart`] | may a container that ended start again? |
//! | [`termination`] | how long and in which order the containers of a pod are stopped |
//! | [`worker`], [`ordering`] | the life of one UID, and which static pod may start |
//! | [`probe`] | when a probe is due, and what its outcomes come to |
//! | [`status`], [`phase`], [`conditions`], [`accept`] | the status that follows, and whether it may be stored |
//! | [`measure`], [`start_time`], [`census`] | what is counted and measured of pods and workers |
//! | [`explain`] | what a pod waits for, since when, and who has to act |
//! | [`config`] | what CRI is asked for: sandbox and container as plain structs |

pub mod accept;
pub mod actions;
pub mod admission;
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
pub mod restart;
pub mod start_time;
pub mod status;
pub mod termination;
pub mod worker;

#[cfg(test)]
mod testing;

pub use moment::Moment;
pub use reason::Reason;

/// The hash that a record made from this container carries.
pub fn container_hash(container: &keelson_kube_model::Container) -> String {
    keelson_kube_model::hash::container_hash(&container.name, &container.image)
}
