//! runtime-shim: the connection to the container runtime.
//!
//! It is the only process with a connection to CRI. On its socket it serves `keelson.runtime.v1` and, for uid 0 and
//! pod-sync, CRI itself, passed through as raw bytes ([`proxy`]). It
//!
//! - translates the runtime's objects into Keelson's types ([`cri_objects`]),
//! - observes pods by events and reads ([`observe`], [`runtime_state`]),
//! - counts the calls to the runtime ([`operations`]),
//! - pulls images ([`images`], [`credentials`], `credential_plugins`),
//! - reports the disk usage of images and containers ([`filesystem`]),
//! - writes the files that a container start needs ([`files`]),
//! - rotates and reads logs ([`rotate`], [`logs`]), and reads the logs of the node ([`node_logs`]),
//! - runs commands in containers ([`exec`]), and has the runtime write checkpoints of them ([`checkpoint`]),
//! - removes dead containers, sandboxes and unused images; nothing else does ([`container_gc`], [`image_gc`]).
//!
//! Its only persistent state is the record of which pods may use which image ([`pull_records`]). Everything else is
//! read from the runtime after a restart.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

pub mod checkpoint;
pub mod clock;
pub mod container_gc;
mod credential_plugins;
pub mod credentials;
pub mod cri;
pub mod cri_objects;
pub mod desired_pods;
mod disk_usage;
mod ensure_response;
mod event_metrics;
pub mod exec;
pub mod files;
pub mod filesystem;
mod heartbeat;
pub mod image_gc;
pub mod image_list;
pub mod images;
pub mod log_dir;
mod log_parts;
mod log_usage;
pub mod logs;
pub mod node_logs;
pub mod observe;
mod observe_metrics;
pub mod operations;
mod present_images;
pub mod proxy;
mod pull;
pub mod pull_records;
mod pull_watch;
mod read_metrics;
pub mod rotate;
mod runtime_config;
pub mod runtime_state;
pub mod server;
#[cfg(test)]
mod tests;

use std::time::Duration;

use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1::runtime_server;
use keelson_service_kit::{Context, ObjectRef};
use tonic::service::Routes;

/// Builds the service and starts its loops.
///
/// # Errors
/// The runtime endpoint is not a unix socket, or the configuration of credential providers is not valid. A missing
/// plugin binary is only a condition.
pub async fn build(context: Context) -> anyhow::Result<Routes> {
    let config = &context.config;
    let timeout = Duration::from_millis(config.runtime.request_timeout_ms);
    let cri = cri::Cri::new(&config.runtime.endpoint, timeout)?
        .with_image_endpoint(config.runtime.image_endpoint.as_deref())?;
    cri.register(&context.metrics);
    let files = files::Files::new(config.paths.clone());
    if let Err(error) = files.prepare() {
        // Creating a sandbox reports the same error: it creates its own folder there.
        tracing::warn!(
            error = keelson_service_kit::status::chain(&error),
            "cannot create the log folder; pods have no logs"
        );
    }
    let observer = observe::Observer::new(cri.clone(), files.clone());
    observe_metrics::register(&observer, &context.metrics);
    let pod_config = context.peer(ServiceName::PodConfig).channel();
    let plugins =
        credential_plugins::Plugins::load(&config.paths, &context.metrics, &context.progress).await?;
    let credentials =
        credentials::Credentials::new(pod_config, config.paths.root_dir.clone()).with_plugins(plugins);
    let images = images::Images::new(cri.clone(), context.events.clone(), config.runtime.max_parallel_pulls)
        .configured(config, credentials, &context.metrics);
    let (desired, events) = (desired_pods::DesiredPods::default(), context.events.clone());
    let image_collector =
        image_gc::ImageCollector::new(cri.clone(), observer.clone(), images.clone(), desired.clone(), events)
            .configured(config, &context.metrics);
    let rotator = rotate::Rotator::new(cri.clone(), observer.clone(), files.clone(), &config.container_logs);
    let collector = container_gc::Collector {
        cri: cri.clone(),
        observer: observer.clone(),
        files: files.clone(),
        images,
        desired,
        image_collector: image_collector.clone(),
        failed_removals: container_gc::FailedRemovals::default(),
        policy: container_gc::gc_policy(&config.container_collection),
        events: context.events.clone(),
        node: ObjectRef::node(&config.node_name),
        remove_timeout: container_gc::REMOVE_TIMEOUT,
    };
    context.spawn("runtime", runtime_state::run(context.clone(), cri.clone(), observer.clone()));
    context.spawn("collector", collector.clone().run(context.clone()));
    context.spawn("image-collector", image_collector.run(context.clone()));
    let filesystems = filesystem::Filesystems::new(cri.clone(), observer.clone(), files.clone());
    log_usage::register(&filesystems, &context.metrics);
    context.spawn("filesystems", filesystems.clone().run(context.clone()));
    context.spawn("log-rotation", rotator.clone().run(context.clone()));
    context.spawn("log-compression", rotator.run_cleanup(context.clone()));
    let execs = exec::Execs::new(cri.clone(), &context.metrics, context.progress.clone());
    let runtime: proxy::Proxy<proxy::RuntimeService> =
        proxy::Proxy::new(cri.channel(), observer.clone(), files.clone());
    let image: proxy::Proxy<proxy::ImageService> = proxy::Proxy::new(cri.image_channel(), observer, files);
    let server = server::RuntimeServer::new(collector, execs, filesystems);
    Ok(Routes::new(runtime_server::RuntimeServer::new(server)).add_service(runtime).add_service(image))
}
