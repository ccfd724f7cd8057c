//! The `keelson-node-status` binary.

use std::process::ExitCode;

use keelson_config::ServiceName;
use keelson_proto::descriptors;
use keelson_service_kit::ServiceSpec;

fn main() -> ExitCode {
    keelson_service_kit::run(
        ServiceSpec {
            name: ServiceName::NodeStatus,
            about: "Reports this node to the control plane.",
            version: env!("CARGO_PKG_VERSION"),
            descriptor: Some(descriptors::NODE_STATUS),
            threads: 1,
        },
        |ctx| async move { keelson_node_status::build(ctx).await },
    )
}
