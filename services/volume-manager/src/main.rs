//! The `keelson-volume-manager` binary.

use std::process::ExitCode;

use keelson_config::ServiceName;
use keelson_proto::descriptors;
use keelson_service_kit::ServiceSpec;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == keelson_volume_manager::HELPER_ARGUMENT)
    {
        return keelson_volume_manager::run_helper();
    }
    keelson_service_kit::run(
        ServiceSpec {
            name: ServiceName::VolumeManager,
            about: "Gives pods their volumes.",
            version: env!("CARGO_PKG_VERSION"),
            descriptor: Some(descriptors::VOLUME_MANAGER),
            threads: 1,
        },
        |ctx| async move { keelson_volume_manager::build(ctx).await },
    )
}
