//! runtime-shim speaks to the container runtime.
//!
//! It is the only process that holds a connection to CRI. On its socket it answers `keelson.runtime.v1` and,
//! for uid 0 and pod-sync, CRI itself, passed through as raw bytes ([`proxy`]). It observes pods by events and
//! reads ([`observe`], [`runtime_state`]), counts what is asked of the runtime ([`operations`]), makes images present
//! ([`images`], [`credentials`], `credential_plugins`), says what they and containers take of the disk ([`filesystem`]),
//! writes the files that a container start needs ([`files`]), rotates and reads logs ([`rotate`], [`logs`]), runs
//! commands in containers ([`exec`]), and is the only deleter of containers, sandboxes and images ([`collect`],
//! [`unused`]).
//!
//! Its only state is the record of who may use which image ([`pull_records`]): after a restart it reads the runtime.

pub mod clock;
pub mod collect;
mod credential_plugins;
pub mod credentials;
pub mod cri;
mod disk_use;
mod event_metrics;
pub mod exec;
#[cfg(test)]
mod fake;
pub mod files;
pub mod filesystem;
pub mod image_list;
pub mod images;
mod labels;
pub mod log_dir;
mod log_parts;
mod log_usage;
pub mod logs;
pub mod observe;
mod observe_metrics;
pub mod operations;
pub mod proxy;
mod pull;
pub mod pull_records;
mod pull_watch;
pub mod rotate;
mod runtime_config;
pub mod runtime_state;
pub mod server;
mod ticking;
pub mod unused;
mod whole;

use std::time::Duration;

use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1::runtime_server;
use keelson_service_kit::{Context, ObjectRef};
use tonic::service::Routes;

/// Builds the service and starts its loops.
///
/// # Errors
/// The runtime endpoint is no unix socket, or the credential providers cannot be used as they are configured; one whose
/// binary is missing is a condition only.
pub async fn build(context: Context) -> anyhow::Result<Routes> {
    let config = &context.config;
    let timeout = Duration::from_millis(config.runtime.request_timeout_ms);
    let cri = cri::Cri::new(&config.runtime.endpoint, timeout)?
        .with_images_at(config.runtime.image_endpoint.as_deref())?;
    cri.register(&context.metrics);
    let files = files::Files::new(config.paths.clone());
    if let Err(error) = files.prepare() {
        // Each sandbox says so, too: it makes its own folder there.
        tracing::warn!(error = keelson_service_kit::status::chain(&error), "pods cannot have logs");
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
        limits: collect::limits_of(&config.container_collection),
        events: context.events.clone(),
        node: ObjectRef::node(&config.node_name),
        remove_within: collect::REMOVE_WITHIN,
    };
    context.spawn("runtime", runtime_state::run(context.clone(), cri.clone(), observer.clone()));
    context.spawn("collector", collector.clone().run(context.clone()));
    context.spawn("image-collector", unused.run(context.clone()));
    let filesystems = filesystem::Filesystems::new(cri.clone(), observer.clone(), files.clone());
    log_usage::register(&filesystems, &context.metrics);
    context.spawn("filesystems", filesystems.clone().run(context.clone()));
    context.spawn("log-rotation", rotator.clone().run(context.clone()));
    context.spawn("log-compression", rotator.run_tidying(context.clone()));
    let execs = exec::Execs::new(cri.clone(), &context.metrics, context.progress.clone());
    let runtime: proxy::Proxy<proxy::RuntimeService> =
        proxy::Proxy::new(cri.channel(), observer.clone(), files.clone());
    let image: proxy::Proxy<proxy::ImageService> = proxy::Proxy::new(cri.image_channel(), observer, files);
    Ok(Routes::new(runtime_server::RuntimeServer::new(server::RuntimeServer {
        collector,
        execs,
        filesystems,
    }))
    .add_service(runtime)
    .add_service(image))
}
