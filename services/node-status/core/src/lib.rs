//! The pure decisions of node-status: no clock, no I/O, no runtime.
//!
//! | module | what it decides or holds |
//! |---|---|
//! | [`node`] | [`build_node`]: the Node object from the reports of the other services |
//! | [`reports`] | what other services report: [`Machine`], [`RuntimeState`] |
//! | [`addresses`] | the addresses of the Node |
//! | [`capacity`] | which changes of capacity and allocatable an API server is sent |
//! | [`images`] | [`listed_images`]: which images the Node lists |
//! | [`certificates`] | when the node requests a certificate, with which subject, and how often it retries |
//! | [`conditions`] | MemoryPressure, DiskPressure, PIDPressure and Ready, and the events of their changes |
//! | [`configuration`] | [`configuration_event`]: the event of a changed node configuration |
//! | [`csi_drivers`] | what the Node shows of CSI drivers: node IDs and topology |
//! | [`correlation`] | which events an API server gets, and which of them as one |
//! | [`name_conflict`] | whether another agent uses the node's name |
//! | [`health`] | whether a service makes progress: [`Watchdog`] |
//! | [`patch`] | what an API server is sent: patches against its objects, and mirror pods |
//! | `merge_patch` | the merge patch from one value of the API to another |
//! | [`drift`] | whether the server's pod differs from the last report |
//! | [`pods`] | which pods have changed since the last report: [`ReportedPods`] |
//! | [`report`] | what is reported of a pod: [`PodReport`] |
//! | `runtime_version` | the version of the container runtime in the Node |
//! | [`startup`] | how long the machine took until its Node was ready |
//! | [`events`] | the position in each event ring: [`Cursor`] |

pub mod addresses;
pub mod capacity;
pub mod certificates;
pub mod conditions;
pub mod configuration;
pub mod correlation;
pub mod csi_drivers;
pub mod drift;
pub mod events;
pub mod health;
pub mod images;
mod merge_patch;
pub mod name_conflict;
pub mod node;
pub mod patch;
pub mod pods;
pub mod report;
pub mod reports;
mod runtime_version;
pub mod startup;

pub use addresses::AddressInputs;
pub use conditions::{
    NodeEvent, ReadyInputs, condition_events, node_conditions, rebooted_event, recovery_events,
    schedulable_event, starting_event,
};
pub use configuration::configuration_event;
pub use csi_drivers::{CsiDriver, CsiDrivers};
pub use events::{Cursor, CursorUpdate, Page};
pub use health::{Progress, Watchdog};
pub use images::{RuntimeImage, listed_images};
pub use node::{NodeInputs, NodeReport, build_node, report_after_ms, worth_reporting};
pub use pods::{PodDocument, PodUpdate, ReportedPods};
pub use report::{Deletion, NotAPod, PodReport, ReportedPod, ReportedStatus, Termination};
pub use reports::{Machine, RuntimeHandler, RuntimeState};
