//! Builds a pod from choices. Each field has a list of valid and invalid values, with a valid one first.

use serde_json::{Map, Value, json};

use super::MAX_ID;

/// A sequence of choices, one for each byte.
pub(super) struct Choices<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Choices<'a> {
    /// The choices in `bytes`.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Selects one of `values`: the first one at the end of the bytes.
    fn pick(&mut self, values: &[Value]) -> Value {
        let byte = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        values[usize::from(byte) % values.len()].clone()
    }

    /// Selects a number from 0 to `most`.
    fn count(&mut self, most: usize) -> usize {
        let byte = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        usize::from(byte) % (most + 1)
    }

    /// Sets a field to one of `values`; null leaves the field out.
    fn set(&mut self, object: &mut Map<String, Value>, field: &str, values: &[Value]) {
        let value = self.pick(values);
        if !value.is_null() {
            object.insert(field.to_owned(), value);
        }
    }
}

/// Valid and invalid names.
fn names() -> Vec<Value> {
    let long = "x".repeat(64);
    let mut all: Vec<Value> =
        ["a", "b", "web-1", "", "A", "a_b", "a/b", "..", "a b", "a\nb", "-a", "a.b", "0", "a-", "ä"]
            .map(|name| json!(name))
            .into();
    all.extend([json!(long), json!("x".repeat(63)), json!("x".repeat(254))]);
    all
}

/// Null and all of [`names`].
fn optional_names() -> Vec<Value> {
    [Value::Null].into_iter().chain(names()).collect()
}

fn optional_bools() -> [Value; 3] {
    [Value::Null, json!(true), json!(false)]
}

fn ids() -> [Value; 7] {
    [Value::Null, json!(0), json!(1000), json!(-1), json!(MAX_ID), json!(MAX_ID + 1), json!(i64::MIN)]
}

fn profile(choices: &mut Choices<'_>) -> Value {
    let mut profile = Map::new();
    let kinds = ["RuntimeDefault", "Unconfined", "Localhost", "runtimeDefault", "", "localhost/x"];
    choices.set(&mut profile, "type", &kinds.map(|kind| json!(kind)));
    let paths = [
        Value::Null,
        json!("p.json"),
        json!("../p.json"),
        json!("/p.json"),
        json!(""),
        json!("a/../b"),
        json!(" "),
    ];
    choices.set(&mut profile, "localhostProfile", &paths);
    profile.into()
}

/// The security context of a pod (`of_pod`) or of a container.
fn security(choices: &mut Choices<'_>, of_pod: bool) -> Value {
    let mut context = Map::new();
    for field in ["runAsUser", "runAsGroup"] {
        choices.set(&mut context, field, &ids());
    }
    choices.set(&mut context, "runAsNonRoot", &optional_bools());
    for field in ["seccompProfile", "appArmorProfile"] {
        if choices.count(3) == 1 {
            context.insert(field.to_owned(), profile(choices));
        }
    }
    if of_pod {
        choices.set(&mut context, "fsGroup", &ids());
        let groups = [Value::Null, json!([]), json!([1, 2]), json!([-1]), json!([MAX_ID + 1]), json!([null])];
        choices.set(&mut context, "supplementalGroups", &groups);
        for (field, values) in [
            ("fsGroupChangePolicy", ["Always", "OnRootMismatch", "always", ""]),
            ("supplementalGroupsPolicy", ["Merge", "Strict", "strict", ""]),
        ] {
            let values: Vec<Value> =
                [Value::Null].into_iter().chain(values.map(|value| json!(value))).collect();
            choices.set(&mut context, field, &values);
        }
        let sysctls = [
            Value::Null,
            json!([{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]),
            json!([{"name": "kernel/shm_rmid_forced", "value": "1"}]),
            json!([{"name": "../a", "value": "1"}]),
            json!([{"name": "a..b", "value": "1"}]),
            json!([{"name": "kernel.shm_rmid_forced", "value": "1"}, {"name": "kernel/shm_rmid_forced", "value": "2"}]),
            json!([{"name": "net.ipv4.tcp_syncookies\n", "value": "1"}]),
            json!([{}]),
        ];
        choices.set(&mut context, "sysctls", &sysctls);
        return context.into();
    }
    for field in ["privileged", "allowPrivilegeEscalation", "readOnlyRootFilesystem"] {
        choices.set(&mut context, field, &optional_bools());
    }
    let mounts = [Value::Null, json!("Default"), json!("Unmasked"), json!("unmasked"), json!("")];
    choices.set(&mut context, "procMount", &mounts);
    let capabilities = [
        Value::Null,
        json!({"add": ["NET_ADMIN"], "drop": ["ALL"]}),
        json!({"add": [""]}),
        json!({"add": ["SYS_ADMIN"]}),
        json!({"drop": [null]}),
    ];
    choices.set(&mut context, "capabilities", &capabilities);
    context.into()
}

fn amounts() -> [Value; 12] {
    [
        Value::Null,
        json!({"cpu": "100m", "memory": "64Mi"}),
        json!({"cpu": 1}),
        json!({"memory": "128Mi"}),
        json!({"memroy": "64Mi"}),
        json!({"cpu": "-1"}),
        json!({"memory": "64MiB"}),
        json!({"ephemeral-storage": "1Gi"}),
        json!({"hugepages-2Mi": "4Mi"}),
        json!({"hugepages-2Mi": "3Mi", "cpu": "1"}),
        json!({"example.com/gpu": "1.5"}),
        json!({"cpu": null, "memory": "9223372036854775807Ki"}),
    ]
}

fn resources(choices: &mut Choices<'_>) -> Value {
    let mut resources = Map::new();
    for field in ["requests", "limits"] {
        choices.set(&mut resources, field, &amounts());
    }
    resources.into()
}

fn ports() -> [Value; 9] {
    [
        json!(80),
        json!("http"),
        json!(0),
        json!(65536),
        json!(-1),
        json!("HTTP"),
        json!(""),
        json!("80"),
        json!("a--b"),
    ]
}

/// The action of a probe or a hook.
fn action(choices: &mut Choices<'_>) -> Map<String, Value> {
    let mut action = Map::new();
    match choices.count(6) {
        0 => drop(action.insert("exec".into(), json!({"command": ["true"]}))),
        1 => {
            let mut get = Map::new();
            choices.set(&mut get, "port", &ports());
            choices.set(&mut get, "path", &[Value::Null, json!("/"), json!("a"), json!("/ b"), json!("")]);
            let schemes = [Value::Null, json!("HTTP"), json!("HTTPS"), json!("http"), json!("ftp")];
            choices.set(&mut get, "scheme", &schemes);
            let headers = [
                Value::Null,
                json!([{"name": "X-A", "value": "b"}]),
                json!([{"name": "X A", "value": "b"}]),
                json!([{"name": "", "value": ""}]),
                json!([null]),
            ];
            choices.set(&mut get, "httpHeaders", &headers);
            action.insert("httpGet".into(), get.into());
        }
        2 => {
            let port = choices.pick(&ports());
            action.insert("tcpSocket".into(), json!({"port": port}));
        }
        3 => {
            let port = choices.pick(&[json!(80), json!(0), json!(65536)]);
            action.insert("grpc".into(), json!({"port": port}));
        }
        4 => drop(action.insert("exec".into(), json!({"command": []}))),
        5 => {
            let seconds = choices.pick(&[json!(1), json!(0), json!(-1), json!(1000)]);
            action.insert("sleep".into(), json!({"seconds": seconds}));
        }
        _ => {}
    }
    action
}

fn probe(choices: &mut Choices<'_>) -> Value {
    let mut probe = action(choices);
    for field in [
        "periodSeconds",
        "timeoutSeconds",
        "successThreshold",
        "failureThreshold",
        "initialDelaySeconds",
        "terminationGracePeriodSeconds",
    ] {
        choices.set(&mut probe, field, &[Value::Null, json!(1), json!(3), json!(0), json!(-1)]);
    }
    probe.into()
}

fn env(choices: &mut Choices<'_>) -> Value {
    let mut env = Map::new();
    let names = [
        json!("A"),
        json!("B"),
        json!("a.b"),
        json!("A=B"),
        json!(""),
        json!("1"),
        json!("A B"),
        json!("A\0"),
    ];
    choices.set(&mut env, "name", &names);
    let field = |path: &str| json!({"fieldRef": {"fieldPath": path}});
    let resource = |fields: Value| json!({"resourceFieldRef": fields});
    let sources = [
        Value::Null,
        field("metadata.name"),
        field("metadata.labels['a']"),
        field("status.podIP"),
        field("status.hostIPs"),
        field("metadata.uid"),
        field("spec.nodeName"),
        field("spec.containers"),
        field(""),
        json!({"fieldRef": {"fieldPath": "metadata.name", "apiVersion": "v2"}}),
        resource(json!({"resource": "limits.cpu"})),
        resource(json!({"resource": "limits.memory", "divisor": "1Mi"})),
        resource(json!({"resource": "limits.memory", "divisor": "1m"})),
        resource(json!({"resource": "limits.memory", "divisor": null})),
        resource(json!({"resource": "limits.memory", "divisor": "-1"})),
        resource(json!({"resource": "requests.gpu"})),
        resource(json!({"resource": "requests.cpu", "containerName": "nobody"})),
        resource(json!({"resource": "limits.hugepages-2Mi"})),
        json!({"configMapKeyRef": {"name": "c", "key": "key"}}),
        json!({"configMapKeyRef": {"name": "c", "key": "a/b"}}),
        json!({"secretKeyRef": {"name": "", "key": "key"}}),
        json!({"secretKeyRef": {"name": "s", "key": "a.b", "optional": true}}),
        json!({"fileKeyRef": {"volumeName": "a", "path": "f", "key": "K_1"}}),
        json!({"fileKeyRef": {"volumeName": "a", "path": "../f", "key": "K_1"}}),
        json!({}),
    ];
    choices.set(&mut env, "valueFrom", &sources);
    if !env.contains_key("valueFrom") {
        choices.set(&mut env, "value", &[Value::Null, json!("v"), json!("$(A)"), json!("a\nb")]);
    }
    env.into()
}

fn mount(choices: &mut Choices<'_>) -> Value {
    let mut mount = Map::new();
    choices.set(&mut mount, "name", &names());
    choices.set(
        &mut mount,
        "mountPath",
        &["/a", "/b", "", "c", "/a:b", "/a/../b", "/etc/hosts"].map(|path| json!(path)),
    );
    let paths =
        [Value::Null, json!("x"), json!("../x"), json!("/x"), json!("a/../b"), json!("x/y"), json!("..data")];
    choices.set(&mut mount, "subPath", &paths);
    choices.set(
        &mut mount,
        "subPathExpr",
        &[Value::Null, json!("$(A)"), json!("$(A)/../b"), json!("/$(A)"), json!("x")],
    );
    choices.set(&mut mount, "readOnly", &optional_bools());
    let recursive =
        [Value::Null, json!("Disabled"), json!("IfPossible"), json!("Enabled"), json!("enabled"), json!("")];
    choices.set(&mut mount, "recursiveReadOnly", &recursive);
    let propagation = [
        Value::Null,
        json!("None"),
        json!("HostToContainer"),
        json!("Bidirectional"),
        json!("none"),
        json!(""),
    ];
    choices.set(&mut mount, "mountPropagation", &propagation);
    mount.into()
}

fn port(choices: &mut Choices<'_>) -> Value {
    let mut port = Map::new();
    choices.set(&mut port, "containerPort", &[80, 8080, 0, 65_536, -1].map(|port| json!(port)));
    choices.set(&mut port, "hostPort", &[Value::Null, json!(80), json!(0), json!(65_536)]);
    choices.set(
        &mut port,
        "name",
        &[Value::Null, json!("http"), json!("HTTP"), json!("a-very-long-name-of-a-port")],
    );
    choices.set(&mut port, "protocol", &[Value::Null, json!("UDP"), json!("SCTP"), json!("udp"), json!("")]);
    choices.set(
        &mut port,
        "hostIP",
        &[Value::Null, json!("127.0.0.1"), json!("::1"), json!("localhost"), json!("1.2.3")],
    );
    port.into()
}

fn container(choices: &mut Choices<'_>, index: usize, is_init: bool) -> Value {
    let mut container = Map::new();
    container.insert("name".into(), json!(format!("c{index}{}", if is_init { "i" } else { "" })));
    if choices.count(7) == 1 {
        choices.set(&mut container, "name", &names());
    }
    choices.set(&mut container, "image", &["i:1", "", " i", "UPPER", "i i"].map(|image| json!(image)));
    let policies = [Value::Null, json!("Never"), json!("IfNotPresent"), json!("never"), json!("")];
    choices.set(&mut container, "imagePullPolicy", &policies);
    let commands = [Value::Null, json!(["sh", "$(A)"]), json!([null]), json!([])];
    for field in ["command", "args"] {
        choices.set(&mut container, field, &commands);
    }
    if choices.count(2) == 1 {
        container.insert("securityContext".into(), security(choices, false));
    }
    if choices.count(2) == 1 {
        container.insert("resources".into(), resources(choices));
    }
    for field in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if choices.count(3) == 1 {
            container.insert(field.into(), probe(choices));
        }
    }
    for hook in ["postStart", "preStop"] {
        if choices.count(5) == 1 {
            let action = action(choices);
            let lifecycle = container.entry("lifecycle").or_insert_with(|| json!({}));
            lifecycle[hook] = action.into();
        }
    }
    let envs: Vec<Value> = (0..choices.count(3)).map(|_| env(choices)).collect();
    container.insert("env".into(), envs.into());
    let mounts: Vec<Value> = (0..choices.count(2)).map(|_| mount(choices)).collect();
    container.insert("volumeMounts".into(), mounts.into());
    let ports: Vec<Value> = (0..choices.count(2)).map(|_| port(choices)).collect();
    container.insert("ports".into(), ports.into());
    if is_init {
        choices.set(
            &mut container,
            "restartPolicy",
            &[Value::Null, json!("Always"), json!("Never"), json!("always")],
        );
    }
    choices.set(&mut container, "terminationMessagePath", &[Value::Null, json!("/t"), json!("t"), json!("")]);
    let policies = [Value::Null, json!("FallbackToLogsOnError"), json!("file"), json!("")];
    choices.set(&mut container, "terminationMessagePolicy", &policies);
    container.into()
}

fn volume(choices: &mut Choices<'_>) -> Value {
    let sources = [
        json!({"emptyDir": {}}),
        json!({"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}),
        json!({"emptyDir": {"medium": "memory"}}),
        json!({"emptyDir": {"sizeLimit": "-1"}}),
        json!({"hostPath": {"path": "/tmp"}}),
        json!({"hostPath": {"path": "/tmp/../etc", "type": "Directory"}}),
        json!({"hostPath": {"path": "tmp", "type": "directory"}}),
        json!({"configMap": {"name": "c", "items": [{"key": "key", "path": "p"}]}}),
        json!({"configMap": {"name": "c", "items": [{"key": "key", "path": "../p"}]}}),
        json!({"configMap": {"name": "", "defaultMode": 511}}),
        json!({"secret": {"secretName": "s", "defaultMode": 512}}),
        json!({"secret": {"secretName": "s", "defaultMode": 256}}),
        json!({"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}}),
        json!({"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "status.podIP"}}]}}),
        json!({"projected": {"sources": [{"secret": {"name": "s"}}, {"configMap": {"name": "c"}}]}}),
        json!({"projected": {"sources": [{}]}}),
        json!({"image": {"reference": "i:1", "pullPolicy": "Never"}}),
        json!({"image": {"reference": "", "pullPolicy": "never"}}),
        json!({"emptyDir": {}, "hostPath": {"path": "/"}}),
        json!({}),
    ];
    let mut volume = choices.pick(&sources).as_object().cloned().unwrap_or_default();
    choices.set(&mut volume, "name", &names());
    volume.into()
}

/// `dnsPolicy`, `dnsConfig` and `hostAliases`.
fn resolver(choices: &mut Choices<'_>, spec: &mut Map<String, Value>) {
    let policies = [
        Value::Null,
        json!("Default"),
        json!("None"),
        json!("ClusterFirstWithHostNet"),
        json!("default"),
        json!(""),
    ];
    choices.set(spec, "dnsPolicy", &policies);
    let dns = [
        Value::Null,
        json!({"nameservers": ["1.1.1.1"], "searches": ["a.b"], "options": [{"name": "ndots", "value": "2"}]}),
        json!({"nameservers": ["1.1.1.1\n"]}),
        json!({"nameservers": ["dns"]}),
        json!({"nameservers": ["1.1.1.1"], "searches": ["a b"]}),
        json!({"nameservers": ["1.1.1.1"], "searches": ["a\nnameserver 6.6.6.6"]}),
        json!({"nameservers": ["1.1.1.1"], "searches": ["."]}),
        json!({"options": [{"value": "2"}]}),
        json!({"options": [{"name": "ndots:1\nnameserver", "value": "6.6.6.6"}]}),
        json!({"nameservers": ["1.1.1.1"], "options": [{"name": "edns0", "value": "a b"}]}),
        json!({"nameservers": [null]}),
    ];
    choices.set(spec, "dnsConfig", &dns);
    let aliases = [
        Value::Null,
        json!([{"ip": "1.2.3.4", "hostnames": ["a"]}]),
        json!([{"ip": "1.2.3.4", "hostnames": ["a\n6.6.6.6 b"]}]),
        json!([{"ip": "1.2.3", "hostnames": ["a"]}]),
        json!([{"ip": "1.2.3.4 b", "hostnames": ["a b"]}]),
        json!([null]),
    ];
    choices.set(spec, "hostAliases", &aliases);
}

fn metadata(choices: &mut Choices<'_>) -> Map<String, Value> {
    let mut metadata = Map::new();
    metadata.insert("name".into(), json!("web"));
    if choices.count(7) == 1 {
        choices.set(&mut metadata, "name", &names());
    }
    choices.set(&mut metadata, "namespace", &optional_names());
    for field in ["labels", "annotations"] {
        let maps = [
            Value::Null,
            json!({"a": "b"}),
            json!({"a": null}),
            json!({"a b": "c"}),
            json!({"": "c"}),
            json!({"a": "c d"}),
        ];
        choices.set(&mut metadata, field, &maps);
    }
    metadata
}

/// The manifest of a pod.
pub(super) fn pod(choices: &mut Choices<'_>) -> Value {
    let mut spec = Map::new();
    let more = choices.count(2);
    let containers: Vec<Value> = (0..=more).map(|index| container(choices, index, false)).collect();
    spec.insert("containers".into(), containers.into());
    let init: Vec<Value> = (0..choices.count(1)).map(|index| container(choices, index, true)).collect();
    spec.insert("initContainers".into(), init.into());
    // The volumes that the first choices of mounts name.
    let mut volumes =
        vec![json!({"name": "a", "emptyDir": {}}), json!({"name": "b", "configMap": {"name": "c"}})];
    volumes.extend((0..choices.count(2)).map(|_| volume(choices)));
    spec.insert("volumes".into(), volumes.into());
    if choices.count(2) == 1 {
        spec.insert("securityContext".into(), security(choices, true));
    }
    for field in
        ["hostNetwork", "hostPID", "hostIPC", "hostUsers", "shareProcessNamespace", "setHostnameAsFQDN"]
    {
        choices.set(&mut spec, field, &optional_bools());
    }
    choices.set(
        &mut spec,
        "restartPolicy",
        &[Value::Null, json!("Never"), json!("OnFailure"), json!("never"), json!("")],
    );
    resolver(choices, &mut spec);
    for field in [
        "hostname",
        "subdomain",
        "hostnameOverride",
        "serviceAccountName",
        "priorityClassName",
        "runtimeClassName",
    ] {
        choices.set(&mut spec, field, &optional_names());
    }
    for field in ["activeDeadlineSeconds", "terminationGracePeriodSeconds"] {
        choices.set(&mut spec, field, &[Value::Null, json!(5), json!(0), json!(-1), json!(i64::MAX)]);
    }
    if choices.count(3) == 1 {
        spec.insert("resources".into(), resources(choices));
    }
    choices.set(&mut spec, "overhead", &amounts());
    choices.set(
        &mut spec,
        "os",
        &[Value::Null, json!({"name": "linux"}), json!({"name": "windows"}), json!({"name": "Linux"})],
    );
    let metadata = metadata(choices);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
}
