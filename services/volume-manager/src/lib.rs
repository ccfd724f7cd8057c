//! Gives pods their volumes.
//!
//! pod-sync says what it wants of each pod on a `Sync` stream; this service works towards it on its own and
//! answers `MountPod` and `UnmountPod` when it is there, and `PrepareContainer` beside that, never while volumes
//! go. Truth is the disk and mountinfo: what is found below `<root>/pods` at the start is held until a complete
//! set of pods says otherwise.
//!
//! | module | does |
//! |---|---|
//! | `server` | the gRPC API; wire types end here and in `wire` |
//! | `manager` | one task that owns the set of wanted pods and a slot per pod |
//! | `worker` | one task per pod: plan, carry out, publish; never two operations at once for a pod |
//! | `steps` | carries out the steps of a plan |
//! | `objects` | the ConfigMaps and Secrets that pods refer to, as pod-config tells them |
//! | `tokens` | the tokens of service accounts, kept fresh |
//! | `atomic` | the files of a volume, replaced all at once |
//! | `store` | the pod folders and volumes on disk |
//! | `prepare` | what one container needs: parts of volumes, values of files |
//! | `subpath` | parts of volumes, opened beneath their volume and bound for a container |
//! | `stats`, `measure` | how full volumes are, measured in the background |
//! | `metrics`, `totals` | gauges of the pods whose folders go, how long operations take, how many volumes there are |
//! | `walks`, `slow` | walks that give files to the pod's group, and what is said of a step that takes long |
//! | `selinux` | the labels of folders where SELinux is on |
//! | `remove` | removal that never crosses a mount and never follows a link |
//! | `mounts` | mount points, tmpfs, and the shared root |
//!
//! The decisions are in `keelson-volume-manager-core`; what every receiver of a `Sync` stream does is in
//! `keelson-sync-callee`.

mod atomic;
mod fsgroup;
mod manager;
mod measure;
mod metrics;
mod mounts;
mod objects;
mod prepare;
mod remove;
mod selinux;
mod server;
mod slow;
mod stats;
mod steps;
mod store;
mod subpath;
mod tokens;
mod totals;
mod view;
mod walks;
mod wire;
mod worker;

pub use server::build;
