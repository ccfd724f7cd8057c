//! What each gate does on this node, one row per gate that can be set (node-and-api.md §3, pod-lifecycle.md §21).

use crate::outcome::Level;

/// What a gate does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// The agent acts on it both ways; what changes when it is on.
    Acts(&'static str),
    /// It decides which fields of the KubeletConfiguration may be set; the table of fields names them.
    Fields,
    /// It has one way only: this value has no effect.
    OneWay(OneWay),
    /// No part of a node decides on it; who does.
    Elsewhere(&'static str),
}

/// A gate with one way only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OneWay {
    /// The value without effect.
    pub(super) ignored: bool,
    /// `Error`: a gate that is set to this value by name is refused, since the node would be less safe, or pods would not run as
    /// the gate promises. `Warn`: it is reported.
    pub(super) level: Level,
    /// What happens instead, and why.
    pub(super) instead: &'static str,
}

/// The behaviour is always there.
const fn always(instead: &'static str) -> Effect {
    Effect::OneWay(OneWay { ignored: false, level: Level::Warn, instead })
}

/// The behaviour does not exist.
const fn absent(instead: &'static str) -> Effect {
    Effect::OneWay(OneWay { ignored: true, level: Level::Warn, instead })
}

/// This value is refused.
const fn refused(ignored: bool, instead: &'static str) -> Effect {
    Effect::OneWay(OneWay { ignored, level: Level::Error, instead })
}

const NO_CLAIMS: &str = "the agent allocates no dynamic resources, and no driver of them can register";
const NO_EXCLUSIVE_CPUS: &str = "no container has exclusive CPUs; all containers share all of them";
const NO_CPU_POLICY: &str = "the CPU manager has no policy yet, so its options have no effect";
const NO_TOPOLOGY_POLICY: &str = "the topology manager has no policy yet, so its options have no effect";
const NO_DEVICES: &str = "the agent allocates no devices, so there is no health of them to report";

/// All rows, sorted by name.
pub(super) const EFFECTS: &[(&str, Effect)] = &[
    (
        "AllowDNSOnlyNodeCSR",
        Effect::Acts("A serving certificate is requested for a node that has names and no IP address."),
    ),
    (
        "AllowInsecureKubeletCertificateSigningRequests",
        Effect::Elsewhere("The API server admits requests for certificates."),
    ),
    (
        "AllowParsingUserUIDFromCertAuth",
        refused(
            false,
            "the UID in a client certificate is always read and passed to the authorizer; a CA that must not vouch for UIDs \
             must not sign them",
        ),
    ),
    ("CPUManagerPolicyAlphaOptions", absent(NO_CPU_POLICY)),
    ("CPUManagerPolicyBetaOptions", absent(NO_CPU_POLICY)),
    (
        "CRIListStreaming",
        absent("pods, containers and images are listed with one answer of the runtime each"),
    ),
    ("CSIVolumeHealth", Effect::Acts("The health of volumes is reported, as their CSI drivers measure it.")),
    (
        "ChangeContainerStatusOnKubeletRestart",
        absent("containers stay ready and started across restarts of the agent"),
    ),
    (
        "ClusterTrustBundle",
        Effect::Acts("ClusterTrustBundleProjection may be on; by itself the gate changes nothing."),
    ),
    (
        "ClusterTrustBundleProjection",
        Effect::Acts("Projected volumes may have the trust anchors of ClusterTrustBundles."),
    ),
    ("ComponentFlagz", always("/flagz is served to clients that are authorized for it")),
    ("ComponentStatusz", always("/statusz is served to clients that are authorized for it")),
    (
        "ContainerCheckpoint",
        Effect::Acts(
            "/checkpoint has the container runtime write archives of containers; off, it answers 404.",
        ),
    ),
    ("ContainerRestartRules", always("containers are restarted by the rules in their pod")),
    (
        "ContainerStopSignals",
        refused(
            true,
            "lifecycle.stopSignal would be ignored, and containers would be stopped with the signal of their image",
        ),
    ),
    ("ContextualLogging", always("log lines name the pod, the container and the request they are about")),
    ("CustomCPUCFSQuotaPeriod", Effect::Fields),
    ("DRAConsumableCapacity", absent(NO_CLAIMS)),
    ("DRADeviceBindingConditions", absent(NO_CLAIMS)),
    ("DRADeviceTaintRules", absent(NO_CLAIMS)),
    ("DRADeviceTaints", absent(NO_CLAIMS)),
    ("DRAExtendedResource", absent(NO_CLAIMS)),
    ("DRANodeAllocatableResources", absent(NO_CLAIMS)),
    ("DRAPartitionableDevices", absent(NO_CLAIMS)),
    ("DRAPrioritizedList", absent(NO_CLAIMS)),
    ("DRAResourceClaimDeviceStatus", absent(NO_CLAIMS)),
    ("DisableCPUQuotaWithExclusiveCPUs", absent(NO_EXCLUSIVE_CPUS)),
    ("EnvFiles", always("variables of containers may come from files (fileKeyRef)")),
    (
        "EventedPLEG",
        always("the agent follows the runtime's events where it offers them, and lists containers as well"),
    ),
    (
        "ExtendWebSocketsToKubelet",
        Effect::Acts(
            "The Node declares the feature, so the API server passes WebSockets through. Clients that speak WebSocket to the \
             node are answered either way.",
        ),
    ),
    ("GracefulNodeShutdown", Effect::Fields),
    ("GracefulNodeShutdownBasedOnPodPriority", Effect::Fields),
    ("HostnameOverride", always("spec.hostnameOverride sets the host name of a pod")),
    ("ImageVolumeWithDigest", absent("the digests of image volumes are not in the status of a pod")),
    ("InPlacePodLevelResourcesVerticalScaling", always("resources of a whole pod can be resized")),
    ("InPlacePodVerticalScalingExclusiveCPUs", absent(NO_EXCLUSIVE_CPUS)),
    ("InPlacePodVerticalScalingExclusiveMemory", absent("no container has memory of its own NUMA node")),
    ("InPlacePodVerticalScalingInitContainers", always("init containers can be resized")),
    ("KubeletCrashLoopBackOffMax", Effect::Fields),
    (
        "KubeletEnsureSecretPulledImages",
        Effect::Acts(
            "A pod that needs credentials for an image has to have them also if the image is on the node. If it is off, no \
             credentials are verified for images that are present.",
        ),
    ),
    (
        "KubeletInUserNamespace",
        always(
            "kernel tunables that cannot be set and a kernel log that cannot be read are warnings, also outside a user \
             namespace",
        ),
    ),
    (
        "KubeletPodResourcesListUseActivePods",
        absent("the API of pod resources does not exist, since the agent allocates no devices"),
    ),
    (
        "KubeletRegistrationGetOnExistsOnly",
        absent("the agent reads the Node before it creates it, and again after a refused creation"),
    ),
    (
        "KubeletSeparateDiskGC",
        always("the filesystems of images and of writable layers are measured and freed separately"),
    ),
    (
        "KubeletServiceAccountTokenForCredentialProviders",
        absent("credential providers get no service account tokens; those that require one are skipped"),
    ),
    (
        "LocalStorageCapacityIsolationFSQuotaMonitoring",
        absent("the usage of emptyDir volumes is measured by walking their folders, not by project quotas"),
    ),
    ("LoggingAlphaOptions", Effect::Fields),
    ("LoggingBetaOptions", Effect::Fields),
    (
        "MemoryQoS",
        refused(
            true,
            "the agent sets neither memory.high nor memory.min nor memory.low, so the memory of pods would not be protected",
        ),
    ),
    (
        "NodeDeclaredFeatures",
        Effect::Acts("The Node declares the features that pods may need (status.declaredFeatures)."),
    ),
    (
        "PLEGOnDemandRelist",
        always("a pod is read again after each of its changes, since nothing waits for a list of all pods"),
    ),
    (
        "PodAndContainerStatsFromCRI",
        absent("statistics of pods and containers are read from their cgroups, not from the runtime"),
    ),
    ("PodCertificateRequest", Effect::Acts("Projected volumes may have certificates of their pod.")),
    ("PodLevelResourceManagers", absent(NO_EXCLUSIVE_CPUS)),
    ("PodLevelResources", always("pods with resources of the whole pod are accepted")),
    (
        "PodLogsQuerySplitStreams",
        absent("a request for one stream of a log is refused; both streams are in one answer"),
    ),
    (
        "PodReadyToStartContainersCondition",
        Effect::Acts("The status of a pod has the condition PodReadyToStartContainers."),
    ),
    ("PodsAPI", absent("the agent has no socket pods-api.sock; keelson and the kubelet API list pods")),
    (
        "PreventStaticPodAPIReferences",
        always(
            "with an API server, static pods that refer to API objects are refused, since it would refuse their mirrors",
        ),
    ),
    (
        "QOSReserved",
        refused(
            true,
            "qosReserved would have no effect, so no memory would be reserved for pods of a QoS class",
        ),
    ),
    (
        "ReduceDefaultCrashLoopBackOffDecay",
        Effect::Acts(
            "The crash-loop back-off of a container begins at 1 s and ends at 60 s, unless crashLoopBackOff sets its maximum, \
             not at 10 s and 300 s.",
        ),
    ),
    ("ReloadKubeletClientCAFile", always("a changed file of client CAs is read again within 10 s")),
    (
        "ReloadKubeletServerCertificateFile",
        always("a changed file with the serving certificate is read again within 10 s"),
    ),
    ("ResourceHealthStatus", absent(NO_DEVICES)),
    ("ResourceHealthStatusMessage", absent(NO_DEVICES)),
    (
        "RestartAllContainersOnContainerExits",
        always(
            "pods whose rules restart all containers are run by these rules; the Node only does not declare the feature",
        ),
    ),
    ("RotateKubeletServerCertificate", Effect::Fields),
    (
        "RuntimeClassInImageCriApi",
        absent("only images that are mounted as volumes are pulled for the runtime handler of their pod"),
    ),
    (
        "SELinuxMount",
        Effect::Acts(
            "Volumes of every access mode are mounted with the SELinux label of their pod, not only those for one pod.",
        ),
    ),
    ("TopologyManagerPolicyAlphaOptions", absent(NO_TOPOLOGY_POLICY)),
    ("TopologyManagerPolicyBetaOptions", absent(NO_TOPOLOGY_POLICY)),
    (
        "UserNamespacesHostNetworkSupport",
        absent("pods with hostNetwork and hostUsers: false are refused with PodFeatureUnsupported"),
    ),
    ("VolumeLimitScaling", Effect::Elsewhere("The scheduler counts the volumes of a node.")),
];

/// What a gate does on this node; `None` for a locked gate and for one of another component.
pub(super) fn effect_of(name: &str) -> Option<Effect> {
    EFFECTS.iter().find(|(of, _)| *of == name).map(|(_, effect)| *effect)
}
