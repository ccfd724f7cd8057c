//! runtime-shim speaks to the container runtime.
//!
//! It is the only process that holds a connection to CRI. On its socket it answers `keelson.runtime.v1` and,
//! for uid 0 and pod-sync, CRI itself, passed through as raw bytes ([`proxy`]). It observes pods by events and
//! reads ([`observe`], [`runtime_state`]), makes images present ([`images`]), writes the files that a container
//! start needs ([`files`]), rotates and reads logs ([`rotate`], [`logs`]), and is the only deleter of containers,
//! sandboxes and images ([`collect`], [`unused`]).
//!
//! It keeps no state of its own: after a restart it reads the runtime.

pub mod clock;
pub mod collect;
pub mod cri;
#[cfg(test)]
mod fake;
pub mod files;
pub mod images;
mod labels;
pub mod log_dir;
mod log_parts;
pub mod logs;
pub mod observe;
pub mod proxy;
pub mod rotate;
pub mod runtime_state;
pub mod server;
mod ticking;
pub mod unused;

use std::time::Duration;

use keelson_proto::keelson::runtime::v1::runtime_server;
use keelson_service_kit::Context;
use tonic::service::Routes;

/// Builds the service and starts its loops.
///
/// # Errors
/// The runtime endpoint is no unix socket.
pub async fn build(context: Context) -> anyhow::Result<Routes> {
    let config = &context.config;
    let timeout = Duration::from_millis(config.runtime.request_timeout_ms);
    let cri = cri::Cri::new(&config.runtime.endpoint, timeout)?;
    let files = files::Files::new(config.paths.clone());
    let observer = observe::Observer::new(cri.clone(), files.clone());
    let images = images::Images::new(cri.clone(), context.events.clone(), config.runtime.max_parallel_pulls);
    let (desires, events) = (collect::Desires::default(), context.events.clone());
    let unused =
        unused::UnusedImages::new(cri.clone(), observer.clone(), images.clone(), desires.clone(), events)
            .configured(config, &context.metrics);
    let rotator = rotate::Rotator::new(cri.clone(), observer.clone(), files.clone(), &config.container_logs);
    let collector = collect::Collector {
        cri: cri.clone(),
        observer: observer.clone(),
        files: files.clone(),
        images,
        desires,
        unused: unused.clone(),
        failures: collect::Failures::default(),
        remove_within: collect::REMOVE_WITHIN,
    };
    context.spawn("runtime", runtime_state::run(context.clone(), cri.clone(), observer.clone()));
    context.spawn("collector", collector.clone().run(context.clone()));
    context.spawn("image-collector", unused.run(context.clone()));
    context.spawn("log-rotation", rotator.clone().run(context.clone()));
    context.spawn("log-compression", rotator.run_tidying(context.clone()));
    let runtime: proxy::Proxy<proxy::RuntimeService> =
        proxy::Proxy::new(cri.channel(), observer.clone(), files.clone());
    let image: proxy::Proxy<proxy::ImageService> = proxy::Proxy::new(cri.channel(), observer, files);
    Ok(Routes::new(runtime_server::RuntimeServer::new(server::RuntimeServer { collector }))
        .add_service(runtime)
        .add_service(image))
}
