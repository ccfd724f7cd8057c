//! The pure decisions of volume-manager: no clock, no I/O, no runtime.
//!
//! | module | answers |
//! |---|---|
//! | [`desire`] | which volumes pod-sync wants for a pod, without wire types |
//! | [`plan`] | which actions come next for one pod |
//! | [`payload`] | which files a configMap, secret, downwardAPI or projected volume contains |
//! | [`pod_certificate`] | when certificates of pods are requested, used, refreshed and given up |
//! | [`token`] | how service account tokens are named, and when they are renewed |
//! | [`names`] | how plugins and volumes are named on disk, and which names are safe there |
//! | [`tmpfs`] | how large a memory-backed volume may grow and with which options it is mounted |
//! | [`hugepages`] | which page size a huge page volume has |
//! | [`measurement`] | which volumes are measured, how, and when |
//! | [`mount_latency`] | how long a pod waited for each volume |
//! | [`ownership`] | which events report a slow fsGroup ownership change |
//! | [`envfile`] | which value a key has in an environment file |
//! | [`hostpath`] | whether the file at a hostPath has the type that the volume asks for |
//! | [`filesystem`] | whether a device is formatted, checked or only mounted, and how its file system grows |
//! | [`mount_options`] | how mount options are read, merged and shown, and how a bind mount gets them |
//! | [`expansion`] | when a volume is expanded on the node, and how its claim's status changes |
//! | [`selinux`] | which SELinux label a volume is mounted with, and when a difference is an error |
//! | [`legacy`] | which CSI volume serves a legacy in-tree source |
//! | [`csi`] | how CSI drivers register and which calls, paths and files their volumes need |
//! | [`claims`] | which PersistentVolume a volume has through its claim, and whether the pod may mount it here |
//! | [`claims_in_use`] | which claims are in use on this node, and by what |
//! | [`node_selector`] | whether a node matches a selector |
//! | [`operations`] | which operations on volumes may run together, and when a failed one is retried |
//! | [`wait_owner`] | who has to act before a volume can advance |
//! | [`user_namespaces`] | which IDs of the node a pod with a user namespace has |
//! | [`world`] | which actions come next for the volumes that the pods of the node share |
//! | [`sources`] | what the sources of nfs, iscsi, fc, local and flexVolume volumes say |
//! | [`nfs`] | what is mounted for an nfs volume, and what a failed mount says |
//! | [`iscsi`] | how iscsi disks are named, logged in to, chosen and logged out of |
//! | [`fc`] | how fc disks are named, found and detached |
//! | [`global_folder`] | which trees the global folders of disks are in, and how files next to them are called |
//! | [`multipath`] | which multipath device is over a disk, and how a disk is removed |
//! | [`local_volume`] | how the path of a local volume is used, and who owns its files |
//! | [`flexvolume`] | where flexVolume drivers are, how they are called, and what they answer |

pub mod claims;
pub mod claims_in_use;
pub mod csi;
pub mod desire;
pub mod envfile;
pub mod expansion;
pub mod fc;
pub mod filesystem;
pub mod flexvolume;
pub mod global_folder;
pub mod hostpath;
pub mod hugepages;
pub mod iscsi;
pub mod legacy;
pub mod local_volume;
pub mod measurement;
pub mod mount_latency;
pub mod mount_options;
pub mod multipath;
pub mod names;
pub mod nfs;
pub mod node_selector;
pub mod objects;
pub mod operations;
pub mod ownership;
pub mod payload;
mod pem;
pub mod plan;
pub mod pod_certificate;
pub mod selinux;
pub mod sources;
pub mod tmpfs;
pub mod token;
pub mod user_namespaces;
pub mod wait_owner;
pub mod world;
