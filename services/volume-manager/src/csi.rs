//! CSI drivers: how they register, and how they are called (volumes.md §11).
//!
//! | module | does |
//! |---|---|
//! | `client` | one call of a driver: deadline, error class, metrics |
//! | `drivers` | the registered drivers |
//! | `node_info` | the CSINode of this node |
//! | `limits` | asks drivers again how many volumes the node can have |
//! | `registration` | registers and unregisters drivers |
//! | `silent` | the volumes that a driver has not measured in time |

pub(crate) mod client;
pub(crate) mod drivers;
pub(crate) mod limits;
pub(crate) mod node_info;
pub(crate) mod registration;
mod silent;

#[cfg(test)]
mod fake_api;
