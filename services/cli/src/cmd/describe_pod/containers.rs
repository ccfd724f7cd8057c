//! The containers of a pod: spec and status.

use keelson_kube_model::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, EnvVar, IntOrString, Pod, Probe,
    ResourceList,
};

use crate::describer::{Describer, or_none};

/// Describes all containers, grouped by kind.
pub(super) fn describe(out: &mut Describer, pod: &Pod) {
    let (spec, status) = (&pod.spec, &pod.status);
    let groups = [
        ("Init Containers", &spec.init_containers, &status.init_container_statuses),
        ("Containers", &spec.containers, &status.container_statuses),
        ("Ephemeral Containers", &spec.ephemeral_containers, &status.ephemeral_container_statuses),
    ];
    for (heading, containers, statuses) in groups {
        if containers.is_empty() {
            continue;
        }
        out.line(0, &format!("{heading}:"));
        for container in containers {
            let status = statuses.iter().find(|s| s.name == container.name);
            one(out, container, status);
        }
    }
}

fn one(out: &mut Describer, container: &Container, status: Option<&ContainerStatus>) {
    out.line(2, &format!("{}:", container.name));
    let of_status = |pick: fn(&ContainerStatus) -> &String| or_none(status.map_or("", |s| pick(s)));
    let ports: Vec<String> = container
        .ports
        .iter()
        .map(|p| format!("{}/{}", p.container_port, if p.protocol.is_empty() { "TCP" } else { &p.protocol }))
        .collect();
    let mut pairs = vec![
        ("Container ID", of_status(|s| &s.container_id)),
        ("Image", container.image.clone()),
        ("Image ID", of_status(|s| &s.image_id)),
        ("Ports", or_none(&ports.join(", "))),
    ];
    if !container.command.is_empty() {
        pairs.push(("Command", container.command.join("\n")));
    }
    if !container.args.is_empty() {
        pairs.push(("Args", container.args.join("\n")));
    }
    pairs.push(("State", status.map_or_else(|| "<none>".into(), |s| state(&s.state))));
    if let Some(last) = status.map(|s| &s.last_state).filter(|s| **s != ContainerState::default()) {
        pairs.push(("Last State", state(last)));
    }
    if let Some(status) = status {
        pairs.push(("Ready", status.ready.to_string()));
        pairs.push(("Restart Count", status.restart_count.to_string()));
    }
    pairs.extend(requirements(container));
    out.pairs(4, &pairs);
    let environment: Vec<String> =
        container.env.iter().map(variable).chain(environment_from(container)).collect();
    out.list(4, "Environment", &environment);
    let mounts: Vec<String> = container
        .volume_mounts
        .iter()
        .map(|m| {
            let mode = if m.read_only == Some(true) { "ro" } else { "rw" };
            let below =
                if m.sub_path.is_empty() { String::new() } else { format!(", path {:?}", m.sub_path) };
            format!("{} from {} ({mode}{below})", m.mount_path, m.name)
        })
        .collect();
    out.list(4, "Mounts", &mounts);
}

fn requirements(container: &Container) -> Vec<(&'static str, String)> {
    let amounts = |list: &ResourceList| {
        list.iter().map(|(name, amount)| format!("{name}: {amount}")).collect::<Vec<_>>().join("\n")
    };
    let mut pairs = Vec::new();
    for (key, list) in [("Limits", &container.resources.limits), ("Requests", &container.resources.requests)]
    {
        if !list.is_empty() {
            pairs.push((key, amounts(list)));
        }
    }
    let probes = [
        ("Liveness", &container.liveness_probe),
        ("Readiness", &container.readiness_probe),
        ("Startup", &container.startup_probe),
    ];
    for (key, probe) in probes {
        if let Some(probe) = probe {
            pairs.push((key, probe_text(probe)));
        }
    }
    pairs
}

fn state(state: &ContainerState) -> String {
    let lines = |head: &str, rest: &[(&str, &str)]| {
        let rest =
            rest.iter().filter(|(_, v)| !v.is_empty()).map(|(k, v)| format!("  {k}: {}", v.trim_end()));
        std::iter::once(head.to_owned()).chain(rest).collect::<Vec<_>>().join("\n")
    };
    if let Some(running) = &state.running {
        return lines("Running", &[("Started", running.started_at.as_deref().unwrap_or_default())]);
    }
    if let Some(ended) = &state.terminated {
        return terminated(ended, lines);
    }
    match &state.waiting {
        Some(waiting) => {
            lines("Waiting", &[("Reason", &waiting.reason), ("Message", &one_line(&waiting.message))])
        }
        None => "Waiting".into(),
    }
}

fn terminated(ended: &ContainerStateTerminated, lines: impl Fn(&str, &[(&str, &str)]) -> String) -> String {
    let signal = ended.signal.filter(|s| *s != 0).map(|s| s.to_string()).unwrap_or_default();
    lines(
        "Terminated",
        &[
            ("Reason", &ended.reason),
            ("Message", &one_line(&ended.message)),
            ("Exit Code", &ended.exit_code.to_string()),
            ("Signal", &signal),
            ("Started", ended.started_at.as_deref().unwrap_or_default()),
            ("Finished", ended.finished_at.as_deref().unwrap_or_default()),
        ],
    )
}

/// A message reduced to one line.
fn one_line(text: &str) -> String {
    crate::table::printable(text)
}

fn variable(env: &EnvVar) -> String {
    let Some(from) = &env.value_from else { return format!("{}: {}", env.name, env.value) };
    let source = if let Some(field) = &from.field_ref {
        format!("the field {}", field.field_path)
    } else if let Some(resource) = &from.resource_field_ref {
        format!("the resource {}", resource.resource)
    } else if let Some(key) = &from.config_map_key_ref {
        format!("the key {:?} of the ConfigMap {:?}", key.key, key.name)
    } else if let Some(key) = &from.secret_key_ref {
        format!("the key {:?} of the Secret {:?}", key.key, key.name)
    } else if let Some(key) = &from.file_key_ref {
        format!("the key {:?} of the file {:?} in the volume {:?}", key.key, key.path, key.volume_name)
    } else {
        "an unknown source".into()
    };
    format!("{}: <{source}>", env.name)
}

fn environment_from(container: &Container) -> impl Iterator<Item = String> {
    container.env_from.iter().map(|from| {
        let source = match (&from.config_map_ref, &from.secret_ref) {
            (Some(map), _) => format!("the ConfigMap {:?}", map.name),
            (None, Some(secret)) => format!("the Secret {:?}", secret.name),
            (None, None) => "an unknown source".into(),
        };
        format!("<all of {source}>")
    })
}

fn probe_text(probe: &Probe) -> String {
    let port = |port: &IntOrString| port.to_string();
    let how = if let Some(exec) = &probe.exec {
        format!("exec {:?}", exec.command)
    } else if let Some(http) = &probe.http_get {
        let scheme = if http.scheme.is_empty() { "http".into() } else { http.scheme.to_lowercase() };
        format!("http-get {scheme}://{}:{}{}", http.host, port(&http.port), http.path)
    } else if let Some(tcp) = &probe.tcp_socket {
        format!("tcp-socket {}:{}", tcp.host, port(&tcp.port))
    } else if let Some(grpc) = &probe.grpc {
        format!("grpc :{} {}", grpc.port, grpc.service.as_deref().unwrap_or_default())
    } else {
        "nothing".into()
    };
    format!(
        "{} delay={}s timeout={}s period={}s success={} failure={}",
        how.trim_end(),
        probe.initial_delay_seconds.unwrap_or(0),
        probe.timeout_seconds.unwrap_or(1),
        probe.period_seconds.unwrap_or(10),
        probe.success_threshold.unwrap_or(1),
        probe.failure_threshold.unwrap_or(3)
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(spec: serde_json::Value, status: serde_json::Value) -> String {
        let pod = serde_json::from_value(json!({
            "spec": {"containers": [spec]}, "status": {"containerStatuses": [status]}
        }))
        .unwrap();
        let mut out = Describer::default();
        describe(&mut out, &pod);
        out.finish()
    }

    #[test]
    fn described_container_shows_state_and_last_state() {
        let text = text(
            json!({"name": "app", "image": "busybox", "command": ["sh", "-c"], "resources": {"limits": {"cpu": "1"}},
                   "env": [{"name": "A", "value": "b"}, {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                   "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": true}],
                   "readinessProbe": {"httpGet": {"path": "/", "port": 80}}}),
            json!({"name": "app", "ready": false, "restartCount": 2, "containerID": "containerd://1",
                   "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off\n10s"}},
                   "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}}}),
        );
        assert_eq!(
            text,
            "Containers:\n\
             \u{20} app:\n\
             \u{20}   Container ID:   containerd://1\n\
             \u{20}   Image:          busybox\n\
             \u{20}   Image ID:       <none>\n\
             \u{20}   Ports:          <none>\n\
             \u{20}   Command:        sh\n\
             \u{20}                   -c\n\
             \u{20}   State:          Waiting\n\
             \u{20}                     Reason: CrashLoopBackOff\n\
             \u{20}                     Message: back-off 10s\n\
             \u{20}   Last State:     Terminated\n\
             \u{20}                     Reason: Error\n\
             \u{20}                     Exit Code: 1\n\
             \u{20}   Ready:          false\n\
             \u{20}   Restart Count:  2\n\
             \u{20}   Limits:         cpu: 1\n\
             \u{20}   Readiness:      http-get http://:80/ delay=0s timeout=1s period=10s success=1 failure=3\n\
             \u{20}   Environment:\n\
             \u{20}     A: b\n\
             \u{20}     S: <the key \"k\" of the Secret \"s\">\n\
             \u{20}   Mounts:\n\
             \u{20}     /data from data (ro)\n"
        );
    }
}
