//! Pod and its specification.
// Fields are named and defined by the Kubernetes API reference.
#![allow(missing_docs)]

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    Container, LocalObjectReference, ObjectMeta, PodStatus, ResourceList, ResourceRequirements, Volume,
};

api_types! {
    /// A v1 Pod, reduced to what a node agent decides about.
    Pod {
        api_version: String,
        kind: String,
        metadata: ObjectMeta,
        spec: PodSpec,
        status: PodStatus,
    }

    PodSpec {
        volumes: Vec<Volume>,
        init_containers: Vec<Container>,
        containers: Vec<Container>,
        ephemeral_containers: Vec<Container>,
        /// See [`RestartPolicy`].
        restart_policy: String,
        termination_grace_period_seconds: Option<i64>,
        active_deadline_seconds: Option<i64>,
        dns_policy: String,
        dns_config: Option<PodDnsConfig>,
        node_selector: BTreeMap<String, String>,
        service_account_name: String,
        automount_service_account_token: Option<bool>,
        node_name: String,
        host_network: Option<bool>,
        host_pid = "hostPID": Option<bool>,
        host_ipc = "hostIPC": Option<bool>,
        host_users: Option<bool>,
        share_process_namespace: Option<bool>,
        security_context: Option<PodSecurityContext>,
        image_pull_secrets: Vec<LocalObjectReference>,
        hostname: String,
        subdomain: String,
        set_hostname_as_fqdn = "setHostnameAsFQDN": Option<bool>,
        hostname_override: Option<String>,
        affinity: Option<Value>,
        scheduler_name: String,
        tolerations: Vec<Toleration>,
        host_aliases: Vec<HostAlias>,
        priority_class_name: String,
        priority: Option<i32>,
        readiness_gates: Vec<PodReadinessGate>,
        runtime_class_name: Option<String>,
        enable_service_links: Option<bool>,
        preemption_policy: Option<String>,
        overhead: ResourceList,
        topology_spread_constraints: Option<Value>,
        os: Option<PodOs>,
        scheduling_gates: Vec<PodSchedulingGate>,
        resource_claims: Vec<PodResourceClaim>,
        resources: Option<ResourceRequirements>,
    }

    PodDnsConfig {
        nameservers: Vec<String>,
        searches: Vec<String>,
        options: Vec<PodDnsConfigOption>,
    }

    PodDnsConfigOption {
        name: String,
        value: Option<String>,
    }

    HostAlias {
        ip: String,
        hostnames: Vec<String>,
    }

    PodReadinessGate {
        condition_type: String,
    }

    PodSchedulingGate {
        name: String,
    }

    PodResourceClaim {
        name: String,
        resource_claim_name: Option<String>,
        resource_claim_template_name: Option<String>,
    }

    PodOs {
        name: String,
    }

    Toleration {
        key: String,
        operator: String,
        value: String,
        effect: String,
        toleration_seconds: Option<i64>,
    }

    PodSecurityContext {
        se_linux_options: Option<SeLinuxOptions>,
        run_as_user: Option<i64>,
        run_as_group: Option<i64>,
        run_as_non_root: Option<bool>,
        supplemental_groups: Vec<i64>,
        supplemental_groups_policy: Option<String>,
        fs_group: Option<i64>,
        fs_group_change_policy: Option<String>,
        sysctls: Vec<Sysctl>,
        seccomp_profile: Option<SeccompProfile>,
        app_armor_profile: Option<AppArmorProfile>,
        se_linux_change_policy: Option<String>,
    }

    Sysctl {
        name: String,
        value: String,
    }

    SeLinuxOptions {
        user: String,
        role: String,
        type_ = "type": String,
        level: String,
    }

    SeccompProfile {
        type_ = "type": String,
        localhost_profile: Option<String>,
    }

    AppArmorProfile {
        type_ = "type": String,
        localhost_profile: Option<String>,
    }
}

/// When a container that ended is started again: `spec.restartPolicy`, and for init and regular containers their
/// own `restartPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RestartPolicy {
    /// Whatever the exit code was.
    #[default]
    Always,
    /// When the exit code was not zero.
    OnFailure,
    /// Not at all.
    Never,
}

impl RestartPolicy {
    /// Reads the wire text; empty means the API default `Always`, unknown text is `None`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "" | "Always" => Some(Self::Always),
            "OnFailure" => Some(Self::OnFailure),
            "Never" => Some(Self::Never),
            _ => None,
        }
    }

    /// The wire text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::OnFailure => "OnFailure",
            Self::Never => "Never",
        }
    }
}
