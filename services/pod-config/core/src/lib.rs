//! The pure decisions of pod-config: no clock, no I/O, no runtime.
//!
//! | module | what it decides |
//! |---|---|
//! | [`manifest`] | which objects stand in the bytes of a manifest, and where |
//! | [`static_pod`] | what a Pod of a manifest becomes on this node (pod-lifecycle.md §2.1) |
//! | [`object`] | what a Secret or ConfigMap beside the pods becomes |
//! | [`stored`] | what a key of a store says (architecture §6) |
//! | [`files`] | what the files of one source add up to: duplicates, last good versions, problems |
//! | [`merge`] | what a new set of a source changes (pod-lifecycle.md §2.5) |
//! | [`sight`] | what is kept of a pod over a restart, so that a restart changes nothing |
//! | [`scan`] | which files of a folder are to be read, and when a folder that is away counts as empty |
//! | [`offline`] | what starts after a reboot without the control plane (architecture §5) |
//! | [`service_env`] | the variables by which containers find services (runtime-and-resources.md §3.4) |
//! | [`token`] | what is asked and answered for a token of a service account (volumes.md §9.6) |
//! | [`redirect`] | where an answer sends a request for manifests |
//! | [`mutation`] | which service may change what at the API server |
//! | [`node`] | the Node object while no control plane has one |
//!
//! [`parse_file`] is the way through the first three.

pub mod api_pod;
mod bounds;
pub mod error;
pub mod files;
mod locate;
pub mod manifest;
pub mod merge;
pub mod mutation;
pub mod node;
pub mod object;
mod object_rules;
pub mod offline;
mod parse;
pub mod redirect;
pub mod scan;
pub mod service_env;
pub mod sight;
pub mod static_pod;
pub mod stored;
pub mod token;
mod yaml;

pub use error::{ManifestError, Why};
pub use parse::{FileContent, ManifestWarning, parse_file};
