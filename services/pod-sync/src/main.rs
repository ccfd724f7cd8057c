//! The `keelson-pod-sync` binary.

use std::process::ExitCode;

use keelson_config::ServiceName;
use keelson_proto::descriptors;
use keelson_service_kit::{ServiceSpec, run};

fn main() -> ExitCode {
    let spec = ServiceSpec {
        name: ServiceName::PodSync,
        about: "Runs the desired pods.",
        version: env!("CARGO_PKG_VERSION"),
        descriptor: Some(descriptors::POD_SYNC),
        threads: 2,
    };
    run(spec, |context| async move { keelson_pod_sync::build(context).await })
}
