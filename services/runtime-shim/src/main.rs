//! The `keelson-runtime-shim` binary.

use std::process::ExitCode;

use keelson_config::ServiceName;
use keelson_proto::descriptors;
use keelson_service_kit::{ServiceSpec, run};

fn main() -> ExitCode {
    let spec = ServiceSpec {
        name: ServiceName::RuntimeShim,
        about: "Speaks to the container runtime.",
        version: env!("CARGO_PKG_VERSION"),
        descriptor: Some(descriptors::RUNTIME),
        threads: 2,
    };
    run(spec, |context| async move { keelson_runtime_shim::build(context).await })
}
