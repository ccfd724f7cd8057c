//! Copies files that only root can read for services that run without root: the CA, certificate, key and password for etcd,
//! the kubeconfig with the files that it names, and the TLS certificates of the kubelet API. The request headers for
//! manifests are copied in the same way.
//!
//! Each service gets its own copy, and a new one when the file changes.

mod copy_set;
mod error;

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use keelson_config::{Config, ControlPlane, EtcdFile, ServiceName, UrlHeaders};
use keelson_files::remove_if_exists;
use keelson_service_kit::{Context, LoopHandle};

pub(crate) use self::copy_set::CONTROL_PLANE_CLIENTS;
use self::copy_set::{CopySet, CredentialCopy, replace};
pub(crate) use self::error::CopyError;
use crate::certificates;

/// How often the files are checked for changes.
const CHECK_INTERVAL: Duration = LoopHandle::HEARTBEAT;
/// The interval while a requested certificate is missing (node-and-api.md §6.5), or a kubeconfig is invalid.
const PENDING_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The condition that says whether the copies are up to date.
const CONDITION: &str = "credential copies";

/// Whether any file has to be copied.
pub(crate) fn any_needed(config: &Config) -> bool {
    let tls = config.api.tls.as_ref();
    tls.is_some()
        || match &config.control_plane {
            ControlPlane::None => false,
            ControlPlane::Etcd(etcd) => EtcdFile::ALL.into_iter().any(|file| file.of(etcd).is_some()),
            ControlPlane::Kubernetes(_) => true,
        }
}

/// The errors that prevent a start, as lines.
pub(crate) fn startup_errors(config: &Config) -> Vec<String> {
    let copies = CopySet::of(config, now_unix_seconds());
    let fatal = copies.errors.iter().filter(|error| error.prevents_start());
    fatal.map(|error| keelson_service_kit::status::chain(error)).collect()
}

/// A digest of the current content of the files to copy, and of their errors.
pub(crate) fn digest(config: &Config) -> u64 {
    let copies = CopySet::of(config, now_unix_seconds());
    let mut hasher = DefaultHasher::new();
    for CredentialCopy { service, name, content } in &copies.copies {
        (service.as_str(), name, content).hash(&mut hasher);
    }
    for error in &copies.errors {
        keelson_service_kit::status::chain(error).hash(&mut hasher);
    }
    hasher.finish()
}

fn now_unix_seconds() -> i64 {
    keelson_service_kit::now_unix_nanos() / 1_000_000_000
}

/// The result of an update of the copies.
#[derive(Debug)]
pub(crate) struct CopyReport {
    /// The errors; all other copies are up to date.
    pub(crate) errors: Vec<CopyError>,
    /// Whether something may become available at any time: a requested certificate, or a valid kubeconfig.
    pub(crate) is_pending: bool,
    /// Why a kubelet's own pair is not used; this is not an error.
    pub(crate) unused_pair: Option<String>,
}

impl CopyReport {
    /// A line for each error.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.errors.iter().map(|error| keelson_service_kit::status::chain(error)).collect()
    }

    /// Reports the errors as a condition.
    pub(crate) fn publish(&self, context: &Context) {
        let lines = self.lines();
        let condition = if lines.is_empty() {
            Ok(())
        } else {
            Err(format!("{}; the last valid copy, if there is one, stays in use", lines.join("; ")))
        };
        context.progress.condition(CONDITION, condition);
    }
}

/// Updates the copies, with new certificates if node-status left some, and removes unneeded copies.
pub(crate) fn update_copies(config: &Config) -> CopyReport {
    let now = now_unix_seconds();
    let (mut collected, mut errors) = (Vec::new(), Vec::new());
    if let ControlPlane::Kubernetes(api) = &config.control_plane {
        let (found, refused) = certificates::collect(config, api, now);
        collected = found;
        errors.extend(refused.into_iter().map(CopyError::Collect));
    }
    let mut copies = CopySet::of(config, now);
    if let (ControlPlane::Kubernetes(api), true) = (&config.control_plane, copies.uses_bootstrap) {
        match certificates::write_kubeconfig(api) {
            // It may refer to a pair that is stored already.
            Ok(()) => copies = CopySet::of(config, now),
            Err(error) => errors.push(error.into()),
        }
    }
    copies.write(config);
    if copies.errors.is_empty() {
        for collected in collected {
            let gone = collected.remove().map_err(|source| CopyError::RemoveCollected { source });
            errors.extend(gone.err());
        }
    }
    errors.append(&mut copies.errors);
    let is_pending = copies.is_pending || errors.iter().any(CopyError::is_kubeconfig_error);
    CopyReport { errors, is_pending, unused_pair: copies.unused_pair }
}

/// Updates pod-config's copy of the manifest URL's headers; without a URL there is none. Headers are not in a file of their
/// own, so they only change with the configuration.
pub(crate) fn copy_manifest_headers(config: &Config) -> Result<(), CopyError> {
    let path = config.paths.credentials(ServiceName::PodConfig).join(UrlHeaders::COPY);
    let headers = &config.sources.static_pod_url_headers;
    let done = if config.sources.static_pod_url.is_none() || headers.0.is_empty() {
        remove_if_exists(&path)
    } else {
        replace(&path, &headers.encode(), config.uid_of(ServiceName::PodConfig))
    };
    done.map_err(|source| CopyError::Write { path, source })
}

/// Keeps the copies up to date until the shutdown; `report` is the result of the update at the start.
pub(crate) async fn run(context: Context, report: CopyReport) {
    let CopyReport { mut is_pending, mut unused_pair, .. } = report;
    let heartbeat = context.progress.register("credential-copies");
    loop {
        heartbeat.tick();
        // Cancel-safe: it only sleeps.
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = tokio::time::sleep(if is_pending { PENDING_CHECK_INTERVAL } else { CHECK_INTERVAL }) => {}
        }
        let config = std::sync::Arc::clone(&context.config);
        let Ok(report) = tokio::task::spawn_blocking(move || update_copies(&config)).await else { return };
        report.publish(&context);
        is_pending = report.is_pending;
        if unused_pair != report.unused_pair {
            if let Some(why) = &report.unused_pair {
                tracing::warn!("{why}");
            }
            unused_pair = report.unused_pair;
        }
    }
}

#[cfg(test)]
mod tests;
