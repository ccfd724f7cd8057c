//! The `keelson-node-api` binary.

use std::process::ExitCode;

use keelson_config::ServiceName;
use keelson_service_kit::ServiceSpec;

fn main() -> ExitCode {
    keelson_service_kit::run(
        ServiceSpec {
            name: ServiceName::NodeApi,
            about: "Serves the kubelet API: health, pods, logs, metrics and streams into containers.",
            version: env!("CARGO_PKG_VERSION"),
            descriptor: None,
            threads: 1,
        },
        |ctx| async move { keelson_node_api::build(ctx).await },
    )
}
