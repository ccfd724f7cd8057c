//! Containers, probes, hooks and environment.
// Fields are named and defined by the Kubernetes API reference.
#![allow(missing_docs)]

use serde_json::Value;

use super::{
    AppArmorProfile, IntOrString, LocalObjectReference, ResourceList, SeLinuxOptions, SeccompProfile,
};
use crate::quantity::Quantity;

api_types! {
    /// A container of any kind: init, sidecar, regular or ephemeral.
    Container {
        name: String,
        image: String,
        command: Vec<String>,
        args: Vec<String>,
        working_dir: String,
        ports: Vec<ContainerPort>,
        env_from: Vec<EnvFromSource>,
        env: Vec<EnvVar>,
        resources: ResourceRequirements,
        /// List of `{resourceName, restartPolicy}`.
        resize_policy: Option<Value>,
        restart_policy: Option<String>,
        restart_policy_rules: Vec<ContainerRestartRule>,
        volume_mounts: Vec<VolumeMount>,
        volume_devices: Vec<VolumeDevice>,
        liveness_probe: Option<Box<Probe>>,
        readiness_probe: Option<Box<Probe>>,
        startup_probe: Option<Box<Probe>>,
        lifecycle: Option<Box<Lifecycle>>,
        termination_message_path: String,
        termination_message_policy: String,
        /// See [`PullPolicy`].
        image_pull_policy: String,
        security_context: Option<Box<SecurityContext>>,
        stdin: Option<bool>,
        stdin_once: Option<bool>,
        tty: Option<bool>,
        /// Set on ephemeral containers only.
        target_container_name: Option<String>,
    }

    ContainerPort {
        name: String,
        host_port: Option<i32>,
        container_port: i32,
        protocol: String,
        host_ip = "hostIP": String,
    }

    ResourceRequirements {
        limits: ResourceList,
        requests: ResourceList,
        claims: Vec<ResourceClaim>,
    }

    ResourceClaim {
        name: String,
        request: String,
    }

    ContainerRestartRule {
        /// `Restart` or `RestartAllContainers`.
        action: String,
        exit_codes: Option<ContainerRestartRuleOnExitCodes>,
    }

    ContainerRestartRuleOnExitCodes {
        /// `In` or `NotIn`.
        operator: String,
        values: Vec<i32>,
    }

    VolumeMount {
        name: String,
        read_only: Option<bool>,
        recursive_read_only: Option<String>,
        mount_path: String,
        sub_path: String,
        mount_propagation: Option<String>,
        sub_path_expr: String,
    }

    VolumeDevice {
        name: String,
        device_path: String,
    }

    EnvFromSource {
        prefix: String,
        config_map_ref: Option<OptionalObjectReference>,
        secret_ref: Option<OptionalObjectReference>,
    }

    /// A ConfigMap or Secret by name that may be missing.
    OptionalObjectReference {
        name: String,
        optional: Option<bool>,
    }

    EnvVar {
        name: String,
        value: String,
        value_from: Option<EnvVarSource>,
    }

    EnvVarSource {
        field_ref: Option<ObjectFieldSelector>,
        resource_field_ref: Option<ResourceFieldSelector>,
        config_map_key_ref: Option<KeySelector>,
        secret_key_ref: Option<KeySelector>,
        file_key_ref: Option<FileKeySelector>,
    }

    ObjectFieldSelector {
        api_version: String,
        field_path: String,
    }

    ResourceFieldSelector {
        container_name: String,
        resource: String,
        divisor: Option<Quantity>,
    }

    /// A key of a ConfigMap or Secret.
    KeySelector {
        name: String,
        key: String,
        optional: Option<bool>,
    }

    FileKeySelector {
        volume_name: String,
        path: String,
        key: String,
        optional: Option<bool>,
    }

    /// A probe with its handler inline; exactly one of the first four is set.
    Probe {
        exec: Option<ExecAction>,
        http_get: Option<HttpGetAction>,
        tcp_socket: Option<TcpSocketAction>,
        grpc: Option<GrpcAction>,
        initial_delay_seconds: Option<i32>,
        timeout_seconds: Option<i32>,
        period_seconds: Option<i32>,
        success_threshold: Option<i32>,
        failure_threshold: Option<i32>,
        termination_grace_period_seconds: Option<i64>,
    }

    Lifecycle {
        post_start: Option<LifecycleHandler>,
        pre_stop: Option<LifecycleHandler>,
        stop_signal: Option<String>,
    }

    /// A hook; exactly one is set.
    LifecycleHandler {
        exec: Option<ExecAction>,
        http_get: Option<HttpGetAction>,
        tcp_socket: Option<TcpSocketAction>,
        sleep: Option<SleepAction>,
    }

    ExecAction {
        command: Vec<String>,
    }

    HttpGetAction {
        path: String,
        port: IntOrString,
        host: String,
        scheme: String,
        http_headers: Vec<HttpHeader>,
    }

    HttpHeader {
        name: String,
        value: String,
    }

    TcpSocketAction {
        port: IntOrString,
        host: String,
    }

    GrpcAction {
        port: i32,
        service: Option<String>,
    }

    SleepAction {
        seconds: i64,
    }

    SecurityContext {
        capabilities: Option<Capabilities>,
        privileged: Option<bool>,
        se_linux_options: Option<SeLinuxOptions>,
        run_as_user: Option<i64>,
        run_as_group: Option<i64>,
        run_as_non_root: Option<bool>,
        read_only_root_filesystem: Option<bool>,
        allow_privilege_escalation: Option<bool>,
        proc_mount: Option<String>,
        seccomp_profile: Option<SeccompProfile>,
        app_armor_profile: Option<AppArmorProfile>,
    }

    Capabilities {
        add: Vec<String>,
        drop: Vec<String>,
    }
}

/// An image pull secret is a local reference; the alias says what it is for.
pub type ImagePullSecret = LocalObjectReference;

/// When an image is pulled: `imagePullPolicy` of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PullPolicy {
    /// Before each start.
    Always,
    /// When the runtime does not have it.
    IfNotPresent,
    /// Never; a missing image is an error.
    Never,
}

impl PullPolicy {
    /// Reads the wire text; anything but the three known words is `None`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "Always" => Some(Self::Always),
            "IfNotPresent" => Some(Self::IfNotPresent),
            "Never" => Some(Self::Never),
            _ => None,
        }
    }

    /// The policy the API server fills in for an image without one: `Always` for the tag `latest` and for an image
    /// with neither tag nor digest, else `IfNotPresent`.
    pub fn default_for(image: &str) -> Self {
        let (name, digest) =
            image.split_once('@').map_or((image, None), |(name, digest)| (name, Some(digest)));
        let last = name.rsplit('/').next().unwrap_or(name);
        match last.split_once(':') {
            Some((_, "latest")) => Self::Always,
            Some(_) => Self::IfNotPresent,
            None if digest.is_some() => Self::IfNotPresent,
            None => Self::Always,
        }
    }

    /// The wire text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

impl super::Unset for Quantity {}
