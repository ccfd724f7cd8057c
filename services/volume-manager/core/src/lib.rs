//! The pure decisions of volume-manager: no clock, no I/O, no runtime.
//!
//! | module | answers |
//! |---|---|
//! | [`desire`] | which volumes pod-sync wants for a pod, without wire types |
//! | [`plan`] | which actions come next for one pod |
//! | [`payload`] | which files a configMap, secret, downwardAPI or projected volume contains |
//! | [`token`] | how service account tokens are named, and when they are renewed |
//! | [`names`] | how plugins and volumes are named on disk, and which names are safe there |
//! | [`tmpfs`] | how large a memory-backed volume may grow and with which options it is mounted |
//! | [`hugepages`] | which page size a huge page volume has |
//! | [`measurement`] | which volumes are measured, how, and when |
//! | [`mount_latency`] | how long a pod waited for each volume |
//! | [`ownership`] | which events report a slow fsGroup ownership change |
//! | [`envfile`] | which value a key has in an environment file |
//! | [`hostpath`] | whether the file at a hostPath has the type that the volume asks for |

pub mod desire;
pub mod envfile;
pub mod hostpath;
pub mod hugepages;
pub mod measurement;
pub mod mount_latency;
pub mod names;
pub mod ownership;
pub mod payload;
pub mod plan;
pub mod tmpfs;
pub mod token;
