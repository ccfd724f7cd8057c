//! The `keelson-pod-config` binary.

use std::process::ExitCode;

use keelson_config::ServiceName;
use keelson_proto::descriptors;
use keelson_service_kit::ServiceSpec;

fn main() -> ExitCode {
    keelson_service_kit::run(
        ServiceSpec {
            name: ServiceName::PodConfig,
            about: "Reads manifests, merges sources, and serves the desired pods and objects.",
            version: env!("CARGO_PKG_VERSION"),
            descriptor: Some(descriptors::POD_CONFIG),
            threads: 1,
        },
        |ctx| async move { keelson_pod_config::build(ctx).await },
    )
}
