//! The environment of the agent, for the tests and for `cargo xtask`: a private containerd with its own
//! network and images, a whole agent in folders of its own, control planes, a trace collector, and the clean-up of it
//! all.
//!
//! Nothing here touches what it did not make: every folder, socket, bridge, subnet and cgroup belongs to
//! one [`Scratch`] folder or one name, and [`Remains`] removes by these names only. What a killed test
//! left behind is removed by the next [`Scratch::new`].
//!
//! A missing component is an error that names the Debian package which has it; no test passes because
//! something is absent. [`Reached`] asks the same of the cases that a property test makes.
//!
//! The feature `grpc` (on by default) adds what speaks gRPC: [`Agent`], [`TraceCollector`] and the CRI
//! clients of [`PrivateContainerd`]. The feature `kube` (on by default) adds a Kubernetes API server with an authority
//! of its own, [`KubeApiServer`], and `node-server` (on by default) one in memory, [`NodeServer`]. The feature `websocket` (on by default) adds a client of streams,
//! [`WebSocket`]. The feature `logind` adds a fake systemd-logind on a private message bus. The feature `fakes` adds a scriptable fake of each gRPC service, in `fakes`, and runs the service that is
//! tested among them, in `service`.

#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod build_cache;
mod cleanup;
mod cni;
mod containerd;
mod containerd_config;
mod docker;
mod etcd;
mod fuse;
mod hung;
mod image;
mod json_log;
mod leak;
mod newer_containerd;
mod packages;
pub mod process;
mod reached;
mod registry;
mod relay;
mod scratch;
mod spec;
mod system;
mod systemd;
mod vm;

#[cfg(feature = "grpc")]
mod agent;
#[cfg(feature = "grpc")]
mod cri;
#[cfg(feature = "fakes")]
pub mod fakes;
#[cfg(feature = "kube")]
mod kube;
#[cfg(feature = "logind")]
pub mod logind;
#[cfg(feature = "node-server")]
mod node_server;
#[cfg(feature = "grpc")]
mod otlp;
#[cfg(feature = "grpc")]
mod poll;
#[cfg(feature = "fakes")]
pub mod service;
#[cfg(feature = "websocket")]
mod websocket;

pub use cleanup::Remains;
pub use cni::{Network, Subnet};
pub use containerd::{Options, PrivateContainerd, containerd_remains, detach};
pub use docker::PrivateDocker;
pub use etcd::{EtcdCluster, EtcdTls};
pub use fuse::FuseServer;
pub use hung::HungMount;
pub use image::{BUSYBOX_IMAGE, Image, PAUSE_IMAGE, standard_images, write_archive};
pub use json_log::{json_lines, lines_with_event};
pub use leak::Snapshot;
pub use newer_containerd::newer_containerd;
pub use packages::{Component, find_file};
pub use reached::Reached;
pub use registry::Registry;
pub use relay::Relay;
pub use scratch::Scratch;
pub use spec::{AgentSpec, binary_names, built_binaries, copy_binaries, reachable_binaries};
pub use system::{cgroup_hierarchies, has_cap_sys_resource, mounts_below};
pub use systemd::Systemd;
pub use vm::{Said, Vm};

#[cfg(feature = "grpc")]
pub use agent::{Agent, AgentBuilder};
#[cfg(feature = "kube")]
pub use kube::{ApiServerBinary, KubeApiServer, KubeOptions, KubeProxy};
#[cfg(all(feature = "kube", feature = "node-server"))]
pub use node_server::NodeFilter;
#[cfg(feature = "node-server")]
pub use node_server::{NodeServer, Refusal};
#[cfg(feature = "grpc")]
pub use otlp::{Span, TraceCollector};
#[cfg(feature = "grpc")]
pub use poll::eventually;
#[cfg(feature = "websocket")]
pub use websocket::{CommandOutput, WebSocket, websocket_headers};
