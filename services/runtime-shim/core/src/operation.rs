//! The names of CRI calls in the kubelet's metrics (runtime-and-resources.md §1.4).

/// A CRI call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operation(&'static str);

/// The one call whose response stream never ends by itself.
const EVENTS: &str = "get_container_events";

/// Methods of `runtime.v1.RuntimeService`, sorted by method. A streamed list has the name of the list.
const RUNTIME: [(&str, &str); 35] = [
    ("Attach", "attach"),
    ("CheckpointContainer", "checkpoint_container"),
    ("ContainerStats", "container_stats"),
    ("ContainerStatus", "container_status"),
    ("CreateContainer", "create_container"),
    ("Exec", "exec"),
    ("ExecSync", "exec_sync"),
    ("GetContainerEvents", EVENTS),
    ("ListContainerStats", "list_container_stats"),
    ("ListContainers", "list_containers"),
    ("ListMetricDescriptors", "list_metric_descriptors"),
    ("ListPodSandbox", "list_podsandbox"),
    ("ListPodSandboxMetrics", "list_podsandbox_metrics"),
    ("ListPodSandboxStats", "list_podsandbox_stats"),
    ("PodSandboxStats", "podsandbox_stats"),
    ("PodSandboxStatus", "podsandbox_status"),
    ("PortForward", "port_forward"),
    ("RemoveContainer", "remove_container"),
    ("RemovePodSandbox", "remove_podsandbox"),
    ("ReopenContainerLog", "reopen_container_log"),
    ("RunPodSandbox", "run_podsandbox"),
    ("RuntimeConfig", "runtime_config"),
    ("StartContainer", "start_container"),
    ("Status", "status"),
    ("StopContainer", "stop_container"),
    ("StopPodSandbox", "stop_podsandbox"),
    ("StreamContainerStats", "list_container_stats"),
    ("StreamContainers", "list_containers"),
    ("StreamPodSandboxMetrics", "list_podsandbox_metrics"),
    ("StreamPodSandboxStats", "list_podsandbox_stats"),
    ("StreamPodSandboxes", "list_podsandbox"),
    ("UpdateContainerResources", "update_container"),
    ("UpdatePodSandboxResources", "update_podsandbox_resources"),
    ("UpdateRuntimeConfig", "update_runtime_config"),
    ("Version", "version"),
];

/// Methods of `runtime.v1.ImageService`, sorted by method.
const IMAGE: [(&str, &str); 6] = [
    ("ImageFsInfo", "image_fs_info"),
    ("ImageStatus", "image_status"),
    ("ListImages", "list_images"),
    ("PullImage", "pull_image"),
    ("RemoveImage", "remove_image"),
    ("StreamImages", "list_images"),
];

impl Operation {
    /// The call with this path, `/package.Service/Method`; `None` if it is not a known call of CRI v1.
    pub fn from_path(path: &str) -> Option<Self> {
        let (service, method) = path.strip_prefix("/runtime.v1.")?.split_once('/')?;
        let methods: &[(&str, &str)] = match service {
            "RuntimeService" => &RUNTIME,
            "ImageService" => &IMAGE,
            _ => return None,
        };
        let at = methods.binary_search_by_key(&method, |(name, _)| *name).ok()?;
        Some(Self(methods[at].1))
    }

    /// The value of the label `operation_type`.
    pub const fn name(self) -> &'static str {
        self.0
    }

    /// Whether its response is a stream that lasts until the caller leaves, so that its duration means nothing.
    pub fn is_endless(self) -> bool {
        self.0 == EVENTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every value of the label that the kubelet uses.
    const NAMES: &str = "version status runtime_config update_runtime_config run_podsandbox stop_podsandbox \
        remove_podsandbox podsandbox_status list_podsandbox create_container start_container stop_container \
        remove_container list_containers container_status update_container update_podsandbox_resources \
        reopen_container_log exec_sync exec attach port_forward container_stats list_container_stats \
        podsandbox_stats list_podsandbox_stats list_images image_status pull_image remove_image image_fs_info \
        checkpoint_container get_container_events list_metric_descriptors list_podsandbox_metrics";

    fn every() -> impl Iterator<Item = (String, &'static str, &'static str)> {
        let path = |service: &'static str| {
            move |(method, name)| (format!("/runtime.v1.{service}/{method}"), method, name)
        };
        RUNTIME.into_iter().map(path("RuntimeService")).chain(IMAGE.into_iter().map(path("ImageService")))
    }

    /// `RunPodSandbox` as `run_podsandbox`.
    fn as_a_label(method: &str) -> String {
        let mut name = String::new();
        for letter in method.chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.push(letter.to_ascii_lowercase());
        }
        name.replace("pod_sandbox", "podsandbox")
    }

    #[test]
    fn every_cri_method_has_the_kubelets_operation_type() {
        for (path, method, name) in every() {
            assert_eq!(Operation::from_path(&path).map(Operation::name), Some(name), "{path}");
            let expected = match method {
                "UpdateContainerResources" => "update_container".to_owned(),
                "StreamPodSandboxes" => "list_podsandbox".to_owned(),
                _ => as_a_label(method).replace("stream_", "list_"),
            };
            assert_eq!(name, expected, "{path}");
        }
    }

    #[test]
    fn operation_types_are_exactly_those_of_the_kubelet() {
        let sorted = |mut names: Vec<&'static str>| {
            names.sort_unstable();
            names.dedup();
            names
        };
        let found = sorted(every().map(|(_, _, name)| name).collect());
        assert_eq!(found, sorted(NAMES.split_whitespace().collect()));
    }

    #[test]
    fn methods_outside_cri_have_no_operation_type() {
        for path in [
            "",
            "/",
            "/runtime.v1.RuntimeService",
            "/runtime.v1.RuntimeService/",
            "/runtime.v1.RuntimeService/Unheard",
            "/runtime.v1.RuntimeService/PullImage",
            "/runtime.v1.ImageService/RunPodSandbox",
            "/runtime.v1alpha2.RuntimeService/Version",
            "/containerd.services.events.v1.Events/Subscribe",
        ] {
            assert_eq!(Operation::from_path(path), None, "{path}");
        }
    }

    #[test]
    fn only_get_container_events_is_endless() {
        let endless = |path: &String| Operation::from_path(path).is_some_and(Operation::is_endless);
        let found: Vec<String> = every().map(|(path, ..)| path).filter(endless).collect();
        assert_eq!(found, ["/runtime.v1.RuntimeService/GetContainerEvents"]);
    }
}
