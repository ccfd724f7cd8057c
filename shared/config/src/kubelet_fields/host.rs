//! The machine, the processes of the agent, and telemetry.

use super::FieldKind::{
    Bool, Choice, DurationOrNanos, Gates, Int, Long, Object, Quantity, ShutdownPeriods, SignedDuration, Text,
    VModule,
};
use super::GateCondition::{NotEmpty, NotZero, On, TextIs};
use super::{KubeletField, MAX_I32, MILLION, field};
use crate::ServiceName::ResourceManager;
use crate::takes::EVERYBODY;

pub(super) const FIELDS: &[KubeletField] = &[
    field("enableContentionProfiling", Bool, "Without effect: lock profiling of a kubelet written in Go.")
        .flag("contention-profiling")
        .default_bool(false)
        .checked_by_type(),
    field("failCgroupV1", Bool, "Refuse to start on a machine with cgroup v1.")
        .current_flag("fail-cgroupv1")
        .default_bool(true),
    field("failSwapOn", Bool, "Refuse to start on a machine with swap.")
        .flag("fail-swap-on")
        .default_bool(true),
    field("featureGates", Gates, "Feature gates to switch on or off.").flag("feature-gates"),
    field("iptablesDropBit", Int(0, 31), "The bit of the packet mark that drops a packet.")
        .default_int(15)
        .checked_by_type(),
    field("iptablesMasqueradeBit", Int(0, 31), "The bit of the packet mark that masquerades a packet.")
        .default_int(14)
        .checked_by_type(),
    field("logging", Object, "Log output."),
    field("logging.format", Choice(&["text", "json"]), "text or json.")
        .current_flag("logging-format")
        .default_text("text")
        .empty_is_default()
        .gate("LoggingBetaOptions", TextIs("json"))
        .sets(&["logging.format"])
        .restarts_agent()
        .shows_resolved(),
    field("logging.flushFrequency", DurationOrNanos, "How long a line stays in an infoBufferSize at most.")
        .current_flag("log-flush-frequency")
        .default_text("5s")
        .empty_is_default()
        .sets(&["logging.output.flushMs"]),
    field(
        "logging.verbosity",
        Int(0, MAX_I32),
        "The log verbosity: 0 for operators, from 4 on details, from 6 on every step.",
    )
    .current_flag("v")
    .default_int(0)
    .sets(&["logging.level"])
    .live(EVERYBODY),
    field("logging.vmodule", VModule, "Log verbosity per source file of Keelson, such as worker=4.")
        .current_flag("vmodule")
        .sets(&["logging.vmodule"])
        .live(EVERYBODY),
    field("logging.options", Object, "Options of the log formats."),
    field("logging.options.text", Object, "Options of the text format."),
    field(
        "logging.options.text.splitStream",
        Bool,
        "In text format, write messages that are not errors to the standard output.",
    )
    .current_flag("log-text-split-stream")
    .gate("LoggingAlphaOptions", On)
    .sets(&["logging.output.splitStream"]),
    field("logging.options.text.infoBufferSize", Quantity, "The buffer size of --log-text-split-stream.")
        .current_flag("log-text-info-buffer-size")
        .gate("LoggingAlphaOptions", NotZero)
        .sets(&["logging.output.infoBufferBytes"]),
    field("logging.options.json", Object, "Options of the JSON format."),
    field(
        "logging.options.json.splitStream",
        Bool,
        "In JSON format, write messages that are not errors to the standard output.",
    )
    .current_flag("log-json-split-stream")
    .gate("LoggingAlphaOptions", On)
    .sets(&["logging.output.splitStream"]),
    field("logging.options.json.infoBufferSize", Quantity, "The buffer size of --log-json-split-stream.")
        .current_flag("log-json-info-buffer-size")
        .gate("LoggingAlphaOptions", NotZero)
        .sets(&["logging.output.infoBufferBytes"]),
    field("makeIPTablesUtilChains", Bool, "Create the iptables utility chains.")
        .flag("make-iptables-util-chains")
        .default_bool(true)
        .sets(&["iptablesUtilChains"])
        .restarts(&[ResourceManager]),
    field("maxOpenFiles", Long(0, i64::MAX), "How many files a process of the agent may have open.")
        .flag("max-open-files")
        .default_int(1_000_000)
        .empty_is_default()
        .sets(&["ownProcesses.maxOpenFiles"]),
    field("oomScoreAdj", Int(-1000, 1000), "The oom_score_adj of the agent, from -1000 to 1000.")
        .flag("oom-score-adj")
        .default_int(-999)
        .sets(&["ownProcesses.oomScoreAdj"]),
    field(
        "protectKernelDefaults",
        Bool,
        "Refuse to start if kernel tunables differ, instead of changing them.",
    )
    .flag("protect-kernel-defaults")
    .default_bool(false)
    .sets(&["resources.nodeAllocatable.protectKernelDefaults"]),
    field(
        "showHiddenMetricsForVersion",
        Text,
        "The previous release, to show metrics that are hidden since then.",
    )
    .checked_by_group(),
    field(
        "shutdownGracePeriod",
        SignedDuration,
        "The total grace period of pods when the machine shuts down.",
    )
    .default_text("0s")
    .gate("GracefulNodeShutdown", NotZero)
    .sets(&["resources.nodeShutdown.totalNanos"]),
    field(
        "shutdownGracePeriodByPodPriority",
        ShutdownPeriods,
        "The grace period of pods by priority when the machine shuts down.",
    )
    .gate("GracefulNodeShutdownBasedOnPodPriority", NotEmpty)
    .sets(&["resources.nodeShutdown.byPriority"]),
    field(
        "shutdownGracePeriodCriticalPods",
        SignedDuration,
        "The part of shutdownGracePeriod that is for critical pods.",
    )
    .default_text("0s")
    .gate("GracefulNodeShutdown", NotZero)
    .sets(&["resources.nodeShutdown.criticalNanos"]),
    field("tracing", Object, "Traces over OTLP.").sets(&["tracing"]),
    field("tracing.endpoint", Text, "The address of the collector of traces; unset: localhost:4317.")
        .empty_is_unset()
        .sets(&["tracing.endpoint"]),
    field(
        "tracing.samplingRatePerMillion",
        Int(0, MILLION),
        "How many of a million traces are recorded; unset: those that the caller records.",
    )
    .sets(&["tracing.samplingRatePerMillion"]),
];
