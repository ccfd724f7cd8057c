//! The supported part of the `KubeletConfiguration` (node-and-api.md §2).

use std::time::Duration;

use keelson_config::{KUBELET_API_VERSION, KUBELET_KIND, Taint};
use keelson_kube_model::parse_go_duration;

use crate::api_access::ApiAccessFile;
use crate::api_handlers::ApiHandlersFile;
use crate::document::{ConfigError, Document, Reader, Sourced, YEAR};
use crate::eviction::EvictionFile;
use crate::gates;
use crate::log_and_image_gc::{ContainerLogsFile, ImageGcFile, ImagePullsFile};
use crate::manifest_url::ManifestUrlFile;
use crate::node_status::NodeStatusFile;
use crate::own_processes::OwnProcessesFile;
use crate::pod_settings::PodSettingsFile;
use crate::reserved::{Capacity, Reservations, read_reserved};
use crate::strict;
use crate::system_cgroups::SystemCgroupsFile;
use crate::taints;
use crate::telemetry::TracingFile;
use crate::unsupported_fields::requests_nothing;

const MILLI: Duration = Duration::from_millis(1);

/// The supported fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct KubeletFile {
    pub(crate) static_pod_path: Option<Sourced<String>>,
    pub(crate) endpoint: Option<Sourced<String>>,
    pub(crate) file_check: Option<Sourced<Duration>>,
    pub(crate) manifest_url: ManifestUrlFile,
    pub(crate) enable_server: Option<Sourced<bool>>,
    pub(crate) api_access: ApiAccessFile,
    pub(crate) api_handlers: ApiHandlersFile,
    pub(crate) address: Option<Sourced<String>>,
    pub(crate) port: Option<Sourced<u16>>,
    pub(crate) healthz_address: Option<Sourced<String>>,
    pub(crate) read_only_port: Option<Sourced<u16>>,
    pub(crate) healthz_port: Option<Sourced<u16>>,
    pub(crate) max_pods: Option<Sourced<u32>>,
    pub(crate) max_images: Option<Sourced<i64>>,
    pub(crate) node_status: NodeStatusFile,
    pub(crate) own_processes: OwnProcessesFile,
    pub(crate) lease_seconds: Option<Sourced<u32>>,
    pub(crate) objects_by: Option<Sourced<String>>,
    pub(crate) register_node: Option<Sourced<bool>>,
    pub(crate) taints: Option<Sourced<Vec<Taint>>>,
    pub(crate) provider_id: Option<Sourced<String>>,
    pub(crate) rotate_certificates: Option<Sourced<bool>>,
    pub(crate) serving_certificate: Option<Sourced<bool>>,
    pub(crate) cgroup_driver: Option<Sourced<String>>,
    pub(crate) cgroup_root: Option<Sourced<String>>,
    pub(crate) pod_logs_dir: Option<Sourced<String>>,
    pub(crate) cluster_dns: Option<Sourced<Vec<String>>>,
    pub(crate) cluster_domain: Option<Sourced<String>>,
    pub(crate) resolv_conf: Option<Sourced<String>>,
    pub(crate) request_timeout: Option<Sourced<Duration>>,
    pub(crate) pod_pids_limit: Option<Sourced<i64>>,
    pub(crate) cpu_cfs_quota: Option<Sourced<bool>>,
    pub(crate) cpu_cfs_period: Option<Sourced<Duration>>,
    pub(crate) max_parallel_pulls: Option<Sourced<u32>>,
    pub(crate) serialize_pulls: Option<Sourced<bool>>,
    pub(crate) reserved: Option<Reservations>,
    pub(crate) eviction: EvictionFile,
    pub(crate) iptables_util_chains: Option<Sourced<bool>>,
    pub(crate) fail_cgroup_v1: Option<Sourced<bool>>,
    pub(crate) fail_swap_on: Option<Sourced<bool>>,
    pub(crate) log_format: Option<Sourced<String>>,
    pub(crate) verbosity: Option<Sourced<u32>>,
    pub(crate) tracing: TracingFile,
    pub(crate) container_logs: ContainerLogsFile,
    pub(crate) image_collection: ImageGcFile,
    pub(crate) image_pulls: ImagePullsFile,
    pub(crate) pod_settings: PodSettingsFile,
    pub(crate) system_cgroups: SystemCgroupsFile,
    pub(crate) gates: gates::Given,
    pub(crate) image_endpoint: Option<Sourced<String>>,
    /// Zero turns the measurement off.
    pub(crate) volume_stats_period: Option<Sourced<Duration>>,
    /// Fields of the KubeletConfiguration that are set but not supported.
    pub(crate) unsupported: Vec<String>,
    /// Warnings about fields that only strict decoding refuses.
    pub(crate) ignored: Vec<String>,
}

/// Reads the fields of a KubeletConfiguration.
pub(crate) fn read(document: &Document, capacity: Capacity, errors: &mut Vec<ConfigError>) -> KubeletFile {
    if !is_kind(document, KUBELET_API_VERSION, KUBELET_KIND, errors) {
        return KubeletFile::default();
    }
    let mut reader = Reader::new(document, errors);
    let _ = (reader.string("apiVersion"), reader.string("kind"));
    let path = |path: Option<Sourced<String>>| path.map(|p| p.map(|p| absolute(&document.folder, &p)));
    let mut file = KubeletFile {
        static_pod_path: path(reader.string("staticPodPath")),
        endpoint: reader.string("containerRuntimeEndpoint").filter(|text| !is_default(text)),
        file_check: period(&mut reader, "fileCheckFrequency"),
        manifest_url: ManifestUrlFile::read(&mut reader),
        enable_server: reader.boolean("enableServer"),
        api_access: ApiAccessFile::read(&mut reader, &document.folder),
        api_handlers: ApiHandlersFile::read(&mut reader),
        address: reader.string("address").filter(|text| !is_default(text)),
        port: port(&mut reader),
        healthz_address: reader.string("healthzBindAddress").filter(|text| !is_default(text)),
        read_only_port: reader.port("readOnlyPort"),
        healthz_port: reader.port("healthzPort"),
        max_pods: reader.u32("maxPods", 0..=1_000_000),
        max_images: reader.integer("nodeStatusMaxImages", -1..=i64::from(i32::MAX)),
        node_status: NodeStatusFile::read(&mut reader),
        own_processes: OwnProcessesFile::read(&mut reader),
        lease_seconds: lease_seconds(&mut reader),
        objects_by: reader
            .choice_or_default("configMapAndSecretChangeDetectionStrategy", &["Get", "Cache", "Watch"]),
        register_node: reader.boolean("registerNode"),
        taints: taints::read(&mut reader),
        provider_id: reader.string("providerID").filter(|id| !id.value.is_empty()),
        rotate_certificates: reader.boolean("rotateCertificates"),
        serving_certificate: reader.boolean("serverTLSBootstrap"),
        cgroup_driver: reader.choice_or_default("cgroupDriver", &["cgroupfs", "systemd"]),
        cgroup_root: reader.string("cgroupRoot"),
        pod_logs_dir: path(reader.string("podLogsDir").filter(|text| !is_default(text))),
        cluster_dns: reader.strings("clusterDNS"),
        cluster_domain: reader.string("clusterDomain"),
        resolv_conf: path(reader.string("resolvConf")),
        request_timeout: period(&mut reader, "runtimeRequestTimeout"),
        pod_pids_limit: reader.integer("podPidsLimit", i64::MIN..=i64::MAX),
        cpu_cfs_quota: reader.boolean("cpuCFSQuota"),
        cpu_cfs_period: reader.duration("cpuCFSQuotaPeriod", MILLI..=Duration::from_secs(1)),
        max_parallel_pulls: reader.u32("maxParallelImagePulls", 1..=1_000_000),
        serialize_pulls: reader.boolean("serializeImagePulls"),
        reserved: Some(read_reserved(&mut reader, capacity)),
        eviction: EvictionFile::read(&mut reader),
        iptables_util_chains: reader.boolean("makeIPTablesUtilChains"),
        fail_cgroup_v1: reader.boolean("failCgroupV1"),
        fail_swap_on: reader.boolean("failSwapOn"),
        container_logs: ContainerLogsFile::read(&mut reader),
        image_collection: ImageGcFile::read(&mut reader),
        image_pulls: ImagePullsFile::read(&mut reader),
        pod_settings: PodSettingsFile::read(&mut reader),
        system_cgroups: SystemCgroupsFile::read(&mut reader),
        tracing: TracingFile::read(&mut reader),
        gates: reader.booleans(gates::FIELD),
        image_endpoint: reader.string("imageServiceEndpoint"),
        volume_stats_period: volume_stats_period(&mut reader),
        ..KubeletFile::default()
    };
    if reader.object("logging") {
        file.log_format = reader.choice_or_default("logging.format", &["text", "json"]);
        file.verbosity = reader.u32("logging.verbosity", 0..=i32::MAX.cast_unsigned());
    }
    let unknown = strict::unknown(document);
    let is_unknown = |field: &str| unknown.iter().any(|unknown| unknown.field == field);
    let is_unsupported = |field: &String| {
        let is_requested = reader.peek(field).is_some_and(|value| !requests_nothing(field, value));
        is_requested && !is_unknown(field)
    };
    file.unsupported = reader.unread_fields().into_iter().filter(is_unsupported).collect();
    file.ignored = unknown.iter().map(Sourced::warning).collect();
    file.ignored.extend(document.duplicates.iter().map(strict::duplicate_warning));
    file
}

/// Whether a file leaves this field at its default, as a file written by a program does; an empty flag counts as set.
fn is_default(text: &Sourced<String>) -> bool {
    text.value.is_empty() && !text.origin.starts_with("--")
}

/// A duration above zero; zero means the default (node-and-api.md §2.5).
pub(crate) fn period(reader: &mut Reader<'_>, path: &str) -> Option<Sourced<Duration>> {
    let period = reader.duration(path, Duration::ZERO..=YEAR).filter(|period| !period.value.is_zero())?;
    if period.value < MILLI {
        reader.refuse(&period, format!("this must be from {MILLI:?} to {YEAR:?}"));
        return None;
    }
    Some(period)
}

/// `port`; zero means the default in a file and is refused in a flag: `enableServer` turns the server off.
fn port(reader: &mut Reader<'_>) -> Option<Sourced<u16>> {
    const FIELD: &str = "port";
    let is_zero = reader.peek(FIELD).is_some_and(|value| value.as_i64() == Some(0));
    if is_zero && !reader.origin(FIELD).starts_with("--") {
        let _ = reader.port(FIELD);
        return None;
    }
    let number = reader.integer(FIELD, 1..=65_535)?;
    Some(number.map(|number| u16::try_from(number).unwrap_or(u16::MAX)))
}

/// Zero means the default, as in the kubelet; a negative value is refused (node-and-api.md §2.5).
fn lease_seconds(reader: &mut Reader<'_>) -> Option<Sourced<u32>> {
    const MOST: u32 = i32::MAX.cast_unsigned();
    reader.u32("nodeLeaseDurationSeconds", 0..=MOST).filter(|seconds| seconds.value > 0)
}

/// A negative value turns the measurement off, and zero means the default (node-and-api.md §2.5).
fn volume_stats_period(reader: &mut Reader<'_>) -> Option<Sourced<Duration>> {
    const FIELD: &str = "volumeStatsAggPeriod";
    let text = reader.string(FIELD)?;
    let (is_off, amount) = match text.value.strip_prefix('-') {
        Some(amount) => (true, amount),
        None => (false, text.value.as_str()),
    };
    let Some(period) = parse_go_duration(amount).filter(|period| *period <= YEAR) else {
        reader.refuse(
            &text,
            "this is not a duration of at most a year; write one such as 1m, or -1s to turn it off",
        );
        return None;
    };
    (!period.is_zero()).then(|| text.map(|_| if is_off { Duration::ZERO } else { period }))
}

/// Whether the document is of the expected kind; if not, reports it, and nothing else is read.
pub(crate) fn is_kind(document: &Document, version: &str, kind: &str, errors: &mut Vec<ConfigError>) -> bool {
    let mut good = true;
    for (field, expected) in [("apiVersion", version), ("kind", kind)] {
        let found = document.root.get(field);
        if found.and_then(|v| v.as_str()) != Some(expected) {
            good = false;
            errors.push(ConfigError {
                field: field.to_owned(),
                value: found.map_or_else(|| "nothing".to_owned(), ToString::to_string),
                origin: document.origin(field),
                remedy: format!("this must be {expected}; is this the right file?"),
                undecodable: true,
            });
        }
    }
    good
}

/// A path in a file, made absolute with the folder of the file.
pub(crate) fn absolute(folder: &str, path: &str) -> String {
    if path.is_empty() || path.starts_with('/') || folder.is_empty() {
        return path.to_owned();
    }
    let path = path.trim_start_matches("./");
    format!("{}/{path}", folder.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_start_from_the_folder_of_the_file() {
        for (path, result) in
            [("manifests", "/etc/k/manifests"), ("./m", "/etc/k/m"), ("/abs", "/abs"), ("", "")]
        {
            assert_eq!(absolute("/etc/k/", path), result);
        }
    }
}
