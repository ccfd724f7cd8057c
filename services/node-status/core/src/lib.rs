//! The pure decisions of node-status: no clock, no I/O, no runtime.
//!
//! | module | what it decides |
//! |---|---|
//! | [`node`] | [`build_node`]: the Node object from what the neighbours say |
//! | [`addresses`] | the addresses of the Node |
//! | [`amounts`] | what an API server is told of capacity and allocatable |
//! | [`images`] | [`listed_images`]: which images the Node lists |
//! | [`certificates`] | when the node asks for a certificate, for which, and how often it tries |
//! | [`conditions`] | MemoryPressure, DiskPressure, PIDPressure and Ready, and the events of their changes |
//! | [`configuration`] | [`configuration_event`]: what is told of the configuration under the node's key |
//! | [`correlation`] | which events an API server is told of, and which of them as one |
//! | [`namesake`] | whether another agent has the node's name |
//! | [`health`] | whether a neighbour makes progress: [`Watchdog`] |
//! | [`patch`] | what an API server is sent: patches against what it has, mirrors of static pods |
//! | [`drift`] | whether the server still has what it was told of a pod |
//! | [`pods`] | which pod documents are news for the control plane: [`PodLedger`] |
//! | [`startup`] | how long the machine took until its Node was ready |
//! | [`events`] | where the drain of each event ring stands: [`Cursor`] |

pub mod addresses;
pub mod amounts;
pub mod certificates;
pub mod conditions;
pub mod configuration;
pub mod correlation;
pub mod drift;
pub mod events;
pub mod health;
pub mod images;
pub mod namesake;
pub mod node;
pub mod patch;
pub mod pods;
mod runtime_version;
pub mod startup;

pub use addresses::AddressInputs;
pub use conditions::{
    NodeEvent, ReadyInputs, condition_events, node_conditions, rebooted_event, returned_events,
    schedulable_event, starting_event,
};
pub use configuration::configuration_event;
pub use events::{Cursor, Page, Taken};
pub use health::{Answer, Watchdog};
pub use images::{RuntimeImage, listed_images};
pub use node::{
    Machine, NodeInputs, RuntimeHandler, RuntimeState, build_node, report_after_ms, worth_reporting,
};
pub use pods::{Ended, News, PodLedger, PodView};
