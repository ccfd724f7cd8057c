//! The container runtime, cgroups, images and container logs.

use std::time::Duration;

use super::FieldKind::{Bool, Choice, Int, Period, Quantity, Strings, Text};
use super::GateCondition::NotEmpty;
use super::{CENTURY, FieldKind, KubeletField, MAX_I32, MILLION, field};
use crate::ServiceName::{PodSync, RuntimeShim};

pub(super) const FIELDS: &[KubeletField] = &[
    field(
        "cgroupDriver",
        Choice(&["cgroupfs", "systemd"]),
        "How cgroups are created: cgroupfs or systemd. The runtime's answer has precedence.",
    )
    .flag("cgroup-driver")
    .default_text("cgroupfs")
    .empty_is_default()
    .sets(&["runtime.cgroupDriver"])
    .restarts_agent()
    .shows_resolved(),
    field("cgroupRoot", Text, "The parent cgroup of the pods' cgroups.")
        .flag("cgroup-root")
        .default_text("/")
        .empty_is_default()
        .sets(&["runtime.cgroupRoot"])
        .restarts_agent()
        .shows_resolved(),
    field("cgroupsPerQOS", Bool, "Create cgroups for the QoS classes and for each pod.")
        .flag("cgroups-per-qos")
        .default_bool(true)
        .checked_by_type(),
    field(
        "containerLogMaxFiles",
        Int(2, MILLION),
        "The limit of log files per container, including the current one.",
    )
    .flag("container-log-max-files")
    .default_int(5)
    .sets(&["containerLogs.maxFiles"]),
    field("containerLogMaxSize", Quantity, "A log file is rotated at this size.")
        .flag("container-log-max-size")
        .default_text("10Mi")
        .empty_is_default()
        .sets(&["containerLogs.maxSizeBytes"]),
    field("containerLogMaxWorkers", Int(1, MILLION), "How many log files are rotated at the same time.")
        .default_int(1)
        .sets(&["containerLogs.maxWorkers"]),
    field(
        "containerLogMonitorInterval",
        FieldKind::Duration(Duration::from_secs(3), CENTURY),
        "How often the size of the log files is checked.",
    )
    .default_text("10s")
    .sets(&["containerLogs.monitorIntervalMs"]),
    field("containerRuntimeEndpoint", Text, "The socket of the container runtime.")
        .flag("container-runtime-endpoint")
        .default_text("unix:///run/containerd/containerd.sock")
        .empty_is_default_in_files()
        .sets(&["runtime.endpoint"])
        .restarts_agent()
        .shows_resolved(),
    field(
        "imageGCHighThresholdPercent",
        Int(0, 100),
        "Image garbage collection starts at this percentage of disk usage.",
    )
    .flag("image-gc-high-threshold")
    .default_int(85)
    .sets(&["imageCollection.highThresholdPercent"]),
    field(
        "imageGCLowThresholdPercent",
        Int(0, 100),
        "Image garbage collection stops at this percentage of disk usage.",
    )
    .flag("image-gc-low-threshold")
    .default_int(80)
    .sets(&["imageCollection.lowThresholdPercent"]),
    field(
        "imageMaximumGCAge",
        FieldKind::Duration(Duration::ZERO, CENTURY),
        "The maximum time that an unused image is kept; 0s: no limit.",
    )
    .default_text("0s")
    .sets(&["imageCollection.maximumAgeMs"]),
    field(
        "imageMinimumGCAge",
        FieldKind::Duration(Duration::ZERO, CENTURY),
        "The minimum time that an unused image is kept.",
    )
    .flag("minimum-image-ttl-duration")
    .default_text("2m0s")
    .empty_is_default()
    .sets(&["imageCollection.minimumAgeMs"]),
    field(
        "imagePullCredentialsVerificationPolicy",
        Choice(&[
            "NeverVerify",
            "NeverVerifyPreloadedImages",
            "NeverVerifyAllowlistedImages",
            "AlwaysVerify",
        ]),
        "For which images the pull credentials of a pod are verified.",
    )
    .default_text("NeverVerifyPreloadedImages")
    .empty_is_default()
    .sets(&["imagePulls.credentialsVerification"])
    .gate("KubeletEnsureSecretPulledImages", NotEmpty),
    field("imageServiceEndpoint", Text, "The socket of the image service, if it differs from the runtime's.")
        .flag("image-service-endpoint")
        .empty_is_unset()
        .sets(&["runtime.imageEndpoint"])
        .restarts_agent(),
    field("kubeletCgroups", Text, "The cgroup that the agent runs in.")
        .flag("kubelet-cgroups")
        .empty_is_unset()
        .sets(&["resources.systemCgroups.kubelet"]),
    field(
        "maxParallelImagePulls",
        Int(1, MILLION),
        "How many images are pulled at the same time; more than 1 needs serializeImagePulls: false.",
    )
    .sets(&["runtime.maxParallelPulls"]),
    field("preloadedImagesVerificationAllowlist", Strings, "Images whose pull credentials are not verified.")
        .sets(&["imagePulls.preloadedAllowlist"])
        .gate("KubeletEnsureSecretPulledImages", NotEmpty),
    field("registryBurst", Int(0, MAX_I32), "Image pulls in a burst above --registry-qps.")
        .flag("registry-burst")
        .default_int(10)
        .sets(&["imagePulls.registryBurst"]),
    field("registryPullQPS", Int(0, MAX_I32), "Image pulls per second; 0: no limit.")
        .flag("registry-qps")
        .default_int(5)
        .sets(&["imagePulls.registryQps"]),
    field(
        "runtimeRequestTimeout",
        Period,
        "The timeout of a runtime call, except those that wait by design.",
    )
    .flag("runtime-request-timeout")
    .default_text("2m0s")
    .empty_is_default()
    .sets(&["runtime.requestTimeoutMs"])
    .restarts(&[RuntimeShim, PodSync]),
    field("serializeImagePulls", Bool, "Pull one image at a time.")
        .flag("serialize-image-pulls")
        .default_bool(true)
        .sets(&["runtime.maxParallelPulls"]),
    field("systemCgroups", Text, "The cgroup for processes outside any cgroup; needs --cgroup-root.")
        .flag("system-cgroups")
        .empty_is_unset()
        .sets(&["resources.systemCgroups.misc"]),
];
