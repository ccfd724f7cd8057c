//! One module per command.

pub(crate) mod apply;
pub(crate) mod completion;
pub(crate) mod config;
pub(crate) mod delete;
pub(crate) mod describe_node;
pub(crate) mod describe_pod;
pub(crate) mod exec;
pub(crate) mod explain;
pub(crate) mod get_events;
pub(crate) mod get_images;
pub(crate) mod get_node;
pub(crate) mod get_pods;
pub(crate) mod get_services;
pub(crate) mod get_sources;
pub(crate) mod get_volumes;
pub(crate) mod grpc;
pub(crate) mod logs;
pub(crate) mod man;
pub(crate) mod manifests;
pub(crate) mod retry;
pub(crate) mod run_once;
pub(crate) mod services;
pub(crate) mod top;
pub(crate) mod trace;
pub(crate) mod up;
pub(crate) mod version;
