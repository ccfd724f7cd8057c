//! The `keelson-resource-manager` binary.

use std::process::ExitCode;

use keelson_config::ServiceName;
use keelson_proto::descriptors;
use keelson_service_kit::ServiceSpec;

fn main() -> ExitCode {
    keelson_service_kit::run(
        ServiceSpec {
            name: ServiceName::ResourceManager,
            about: "Gives pods their share of the machine.",
            version: env!("CARGO_PKG_VERSION"),
            descriptor: Some(descriptors::RESOURCE_MANAGER),
            threads: 1,
        },
        |ctx| async move { keelson_resource_manager::build(ctx).await },
    )
}
