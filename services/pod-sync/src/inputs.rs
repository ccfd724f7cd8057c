//! What sets pods in motion: the streams of pod-config, runtime-shim and resource-manager, and the requests of [`server`].

pub mod adoption;
pub mod evictions;
pub mod machine;
pub mod pod_cidr;
pub mod server;
pub mod sources;
pub mod streams;
