//! Probes and hooks.

use super::{Findings, names};
use crate::pod_ext::ContainerKind;
use crate::types::{Container, HttpGetAction, IntOrString, LifecycleHandler, PodOs, Probe};

pub(super) fn check_probes(found: &mut Findings, field: &str, kind: ContainerKind, container: &Container) {
    let probes = [
        ("livenessProbe", &container.liveness_probe),
        ("readinessProbe", &container.readiness_probe),
        ("startupProbe", &container.startup_probe),
    ];
    for (name, probe) in probes {
        let Some(probe) = probe else { continue };
        let field = format!("{field}.{name}");
        if kind == ContainerKind::Init {
            found.forbidden(field, "may not be set for init containers without restartPolicy=Always");
            continue;
        }
        check_probe(found, &field, probe);
        if name == "readinessProbe"
            && let Some(seconds) = probe.termination_grace_period_seconds
        {
            let at = format!("{field}.terminationGracePeriodSeconds");
            found.invalid(at, seconds, "must not be set for readinessProbes");
        }
        if name != "readinessProbe" && probe.success_threshold.is_some_and(|threshold| threshold != 1) {
            found.invalid(
                format!("{field}.successThreshold"),
                probe.success_threshold.unwrap_or(0),
                "must be 1",
            );
        }
    }
}

pub(super) fn check_hooks(
    found: &mut Findings,
    field: &str,
    kind: ContainerKind,
    container: &Container,
    grace: Option<i64>,
) {
    let Some(lifecycle) = &container.lifecycle else { return };
    for (name, handler) in [("postStart", &lifecycle.post_start), ("preStop", &lifecycle.pre_stop)] {
        let Some(handler) = handler else { continue };
        let field = format!("{field}.lifecycle.{name}");
        if kind == ContainerKind::Init {
            found.forbidden(field, "may not be set for init containers without restartPolicy=Always");
            continue;
        }
        check_hook(found, &field, handler, grace);
    }
}

/// The signals of Linux, without the real-time ones.
const SIGNALS: [&str; 34] = [
    "SIGABRT",
    "SIGALRM",
    "SIGBUS",
    "SIGCHLD",
    "SIGCLD",
    "SIGCONT",
    "SIGFPE",
    "SIGHUP",
    "SIGILL",
    "SIGINT",
    "SIGIO",
    "SIGIOT",
    "SIGKILL",
    "SIGPIPE",
    "SIGPOLL",
    "SIGPROF",
    "SIGPWR",
    "SIGQUIT",
    "SIGSEGV",
    "SIGSTKFLT",
    "SIGSTOP",
    "SIGSYS",
    "SIGTERM",
    "SIGTRAP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGUSR1",
    "SIGUSR2",
    "SIGVTALRM",
    "SIGWINCH",
    "SIGXCPU",
    "SIGXFSZ",
];

/// `SIGRTMIN` to `SIGRTMIN+15` and `SIGRTMAX-14` to `SIGRTMAX`.
fn is_real_time(signal: &str) -> bool {
    let offset = |text: &str, sign: char, most: u32| {
        text.is_empty()
            || text.strip_prefix(sign).is_some_and(|n| {
                !n.starts_with(['0', '+']) && n.parse::<u32>().is_ok_and(|n| (1..=most).contains(&n))
            })
    };
    signal.strip_prefix("SIGRTMIN").is_some_and(|text| offset(text, '+', 15))
        || signal.strip_prefix("SIGRTMAX").is_some_and(|text| offset(text, '-', 14))
}

/// The stop signal of a container. It requires that the pod names its operating system.
pub(super) fn check_stop_signal(
    found: &mut Findings,
    field: &str,
    container: &Container,
    os: Option<&PodOs>,
) {
    let Some(signal) = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.stop_signal.as_deref())
    else {
        return;
    };
    let field = format!("{field}.lifecycle.stopSignal");
    match os.map_or("", |os| os.name.as_str()) {
        "" => found.forbidden(field, "may not be set for containers with empty `spec.os.name`"),
        "windows" if !["SIGKILL", "SIGTERM"].contains(&signal) => {
            found.unsupported(field, signal, &["SIGKILL", "SIGTERM"]);
        }
        "windows" => {}
        _ if SIGNALS.contains(&signal) || is_real_time(signal) => {}
        _ => found.unsupported(field, signal, &SIGNALS),
    }
}

fn check_probe(found: &mut Findings, field: &str, probe: &Probe) {
    let handlers =
        [probe.exec.is_some(), probe.http_get.is_some(), probe.tcp_socket.is_some(), probe.grpc.is_some()];
    exactly_one_handler(found, field, &handlers);
    if probe.exec.as_ref().is_some_and(|exec| exec.command.is_empty()) {
        found.required(format!("{field}.exec.command"), "");
    }
    if let Some(http) = &probe.http_get {
        check_http(found, &format!("{field}.httpGet"), http);
    }
    let http = probe.http_get.as_ref().map(|http| ("httpGet", &http.port));
    let tcp = probe.tcp_socket.as_ref().map(|tcp| ("tcpSocket", &tcp.port));
    for (kind, port) in http.into_iter().chain(tcp) {
        check_port_reference(found, &format!("{field}.{kind}.port"), port);
    }
    if let Some(grpc) = &probe.grpc {
        check_port_reference(found, &format!("{field}.grpc.port"), &IntOrString::Int(grpc.port));
    }
    for (key, value) in [
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ] {
        found.not_negative(&format!("{field}.{key}"), value.map(i64::from));
    }
    if let Some(seconds) = probe.termination_grace_period_seconds.filter(|seconds| *seconds <= 0) {
        found.invalid(format!("{field}.terminationGracePeriodSeconds"), seconds, "must be greater than 0");
    }
}

fn check_hook(found: &mut Findings, field: &str, hook: &LifecycleHandler, grace: Option<i64>) {
    let handlers =
        [hook.exec.is_some(), hook.http_get.is_some(), hook.tcp_socket.is_some(), hook.sleep.is_some()];
    exactly_one_handler(found, field, &handlers);
    if hook.exec.as_ref().is_some_and(|exec| exec.command.is_empty()) {
        found.required(format!("{field}.exec.command"), "");
    }
    if let Some(http) = &hook.http_get {
        check_http(found, &format!("{field}.httpGet"), http);
        check_port_reference(found, &format!("{field}.httpGet.port"), &http.port);
    }
    if let Some(tcp) = &hook.tcp_socket {
        check_port_reference(found, &format!("{field}.tcpSocket.port"), &tcp.port);
    }
    if let Some(sleep) = &hook.sleep
        && let Some(grace) = grace
        && !(0..=grace).contains(&sleep.seconds)
    {
        let detail = format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
        found.invalid(format!("{field}.sleep"), sleep.seconds, &detail);
    }
}

/// The value of a header is checked, too: a line break would end the header.
fn check_http(found: &mut Findings, field: &str, http: &HttpGetAction) {
    if http.path.is_empty() {
        found.required(format!("{field}.path"), "");
    }
    const SCHEMES: [&str; 2] = ["HTTP", "HTTPS"];
    if !http.scheme.is_empty() && !SCHEMES.contains(&http.scheme.as_str()) {
        found.unsupported(format!("{field}.scheme"), &http.scheme, &SCHEMES);
    }
    for (index, header) in http.http_headers.iter().enumerate() {
        let field = format!("{field}.httpHeaders[{index}]");
        found.name(format!("{field}.name"), &header.name, names::header_name);
        if header.value.contains(['\r', '\n', '\0']) {
            found.invalid(format!("{field}.value"), &header.value, "must not contain line breaks");
        }
    }
}

fn exactly_one_handler(found: &mut Findings, field: &str, handlers: &[bool]) {
    match handlers.iter().filter(|set| **set).count() {
        0 => found.required(field, "must specify a handler type"),
        1 => {}
        _ => found.forbidden(field, "may not specify more than 1 handler type"),
    }
}

fn check_port_reference(found: &mut Findings, field: &str, port: &IntOrString) {
    match port {
        IntOrString::Int(1..=65535) => {}
        IntOrString::Int(other) => found.invalid(field, other, "must be between 1 and 65535, inclusive"),
        IntOrString::Str(name) => found.name(field, name, names::port_name),
    }
}
