//! The pure decisions of volume-manager: no clock, no I/O, no runtime.
//!
//! | module | what it answers |
//! |---|---|
//! | [`desire`] | what pod-sync wants of a pod, without wire types |
//! | [`plan`] | what to do next for one pod |
//! | [`payload`] | which files a configMap, secret, downwardAPI or projected volume has |
//! | [`token`] | which tokens of service accounts are wanted, and when they are made anew |
//! | [`names`] | how plugins and volumes are named on disk, and which names are safe there |
//! | [`tmpfs`] | how large a memory-backed volume may grow and with which options it is mounted |
//! | [`hugepages`] | which pages a volume of huge pages has |
//! | [`figures`] | which volumes have figures, and when they are measured |
//! | [`requests`] | since when each volume of a pod is waited for |
//! | [`ownership`] | what is said of a volume whose files go to the pod's group for long |
//! | [`envfile`] | which value a key has in a file of variables |
//! | [`hostpath`] | whether what is at a hostPath is what the volume asks for |
//! | [`mountinfo`] | what a mountinfo text says about a path |

pub mod desire;
pub mod envfile;
pub mod figures;
pub mod hostpath;
pub mod hugepages;
pub mod mountinfo;
pub mod names;
pub mod ownership;
pub mod payload;
pub mod plan;
pub mod requests;
pub mod tmpfs;
pub mod token;
