//! The gRPC APIs of the Keelson services, generated from `proto/keelson/<service>/v1`.
//!
//! - Kubernetes objects cross a socket as JSON bytes in `*_json` fields.
//! - Times are `*_unix_nanos`: nanoseconds since 1970-01-01 UTC, 0 for "never" or "unknown".
//! - [`CALLERS`] says who may call which method; it is read from the method options.
//! - [`REPEATABLE`] lists the reads (`idempotency_level = NO_SIDE_EFFECTS`) that a client may repeat by itself. Watches
//!   are not among them, as their readers reconnect anyway; nor is what asks for health, which must fail fast.
//! - [`containerd`], [`csi`] and [`pluginregistration`] are APIs of others, as far as they are used here. They have no
//!   callers.

#![allow(missing_docs, clippy::doc_lazy_continuation, clippy::large_enum_variant, clippy::too_many_lines)]

mod redacted;

include!(concat!(env!("OUT_DIR"), "/keelson.rs"));
include!(concat!(env!("OUT_DIR"), "/callers.rs"));
include!(concat!(env!("OUT_DIR"), "/repeatable.rs"));

/// Bytes that a message may have, for every client and server unless it says otherwise. An object of a control plane, or
/// of a manifest, comes whole in one.
pub const LONGEST_MESSAGE: usize = 64 << 20;

/// The encoded descriptor set of one API, for reflection.
pub mod descriptors {
    macro_rules! descriptor {
        ($($name:ident = $package:literal),* $(,)?) => {
            $(pub const $name: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/", $package, ".bin"));)*
        };
    }
    descriptor! {
        ADMIN = "keelson.admin.v1",
        EVENTS = "keelson.events.v1",
        SUPERVISOR = "keelson.supervisor.v1",
        POD_CONFIG = "keelson.pod_config.v1",
        RUNTIME = "keelson.runtime.v1",
        VOLUME_MANAGER = "keelson.volume_manager.v1",
        RESOURCE_MANAGER = "keelson.resource_manager.v1",
        POD_SYNC = "keelson.pod_sync.v1",
        NODE_STATUS = "keelson.node_status.v1",
    }
}
