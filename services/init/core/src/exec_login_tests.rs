use super::*;
use crate::kubeconfig::{FlatKubeconfig, flatten, set_exec_credential};

const V1: &str = "client.authentication.k8s.io/v1";

/// A kubeconfig whose user has this `exec`.
fn kubeconfig(exec: Value) -> Value {
    json!({
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {
            "server": "https://10.0.0.1:6443", "certificate-authority-data": "Y2E=", "proxy-url": "http://proxy:1",
            "extensions": [
                {"name": "other", "extension": 1},
                {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a"}},
            ],
        }}],
        "users": [{"name": "u", "user": {"exec": exec}}],
    })
}

fn flat(file: &Value) -> Result<FlatKubeconfig, String> {
    let root = file.as_object().unwrap();
    let mut no_files = |_: &Path| Err("no file".to_owned());
    flatten(root, Path::new("/etc/kubernetes"), &mut no_files).map_err(|error| error.to_string())
}

fn login(exec: Value) -> ExecLogin {
    flat(&kubeconfig(exec)).unwrap().exec.unwrap()
}

#[test]
fn exec_plugin_command_args_env_and_hint_are_read() {
    let found = login(json!({
        "apiVersion": V1, "command": "aws", "args": ["eks", "get-token"], "interactiveMode": "IfAvailable",
        "env": [{"name": "AWS_PROFILE", "value": "node"}, {"name": "EMPTY"}], "installHint": "install awscli",
    }));
    assert_eq!((found.command.as_str(), found.field.as_str()), ("aws", "users[0].user.exec"));
    assert_eq!(found.args, ["eks", "get-token"]);
    assert_eq!(found.env, [("AWS_PROFILE".into(), "node".into()), ("EMPTY".into(), String::new())]);
    assert_eq!(found.install_hint, "install awscli");
}

#[test]
fn an_exec_command_with_a_slash_is_relative_to_the_kubeconfig() {
    for (command, expected) in [
        ("login", "login"),
        ("./login", "/etc/kubernetes/./login"),
        ("bin/login", "/etc/kubernetes/bin/login"),
        ("/opt/login", "/opt/login"),
    ] {
        let found = login(json!({"apiVersion": V1, "command": command, "interactiveMode": "Never"}));
        assert_eq!(found.command, expected);
    }
}

#[test]
fn invalid_exec_plugins_are_refused_with_their_field() {
    let good = || json!({"apiVersion": V1, "command": "x", "interactiveMode": "Never"});
    let with = |field: &str, value: Value| {
        let mut exec = good();
        exec[field] = value;
        exec
    };
    for (exec, expected) in [
        (json!("aws"), "users[0].user.exec: is not a map"),
        (
            with("apiVersion", Value::Null),
            "users[0].user.exec.apiVersion: is missing; write client.authentication.k8s.io/v1 or",
        ),
        (
            with("apiVersion", "client.authentication.k8s.io/v1alpha1".into()),
            "users[0].user.exec.apiVersion: \"client.authentication.k8s.io/v1alpha1\" is not supported",
        ),
        (with("command", "".into()), "users[0].user.exec.command: is missing"),
        (with("interactiveMode", Value::Null), "users[0].user.exec.interactiveMode: is missing, and"),
        (
            with("interactiveMode", "never".into()),
            "users[0].user.exec.interactiveMode: \"never\" is not supported",
        ),
        (with("interactiveMode", "Always".into()), "users[0].user.exec.interactiveMode: is Always"),
        (with("args", "get".into()), "users[0].user.exec.args: is not a list"),
        (with("args", json!(["a", 1])), "users[0].user.exec.args[1]: is not a string"),
        (
            with("env", json!([{"value": "x"}])),
            "users[0].user.exec.env[0].name: is not the name of a variable",
        ),
        (
            with("env", json!([{"name": "A=B"}])),
            "users[0].user.exec.env[0].name: is not the name of a variable",
        ),
        (with("env", json!([{"name": "A", "value": 1}])), "users[0].user.exec.env[0].value: is not a string"),
        (
            with("provideClusterInfo", "yes".into()),
            "users[0].user.exec.provideClusterInfo: is neither true nor false",
        ),
    ] {
        let error = flat(&kubeconfig(exec)).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    }
    for other in OTHER_CREDENTIALS {
        let mut file = kubeconfig(good());
        file["users"][0]["user"][other] = "x".into();
        let error = flat(&file).unwrap_err();
        assert_eq!(
            error,
            format!("users[0].user.{other}: cannot be combined with exec; keep one of the two")
        );
    }
}

#[test]
fn exec_v1beta1_needs_no_interactive_mode() {
    let older = "client.authentication.k8s.io/v1beta1";
    assert_eq!(login(json!({"apiVersion": older, "command": "x"})).api_version, older);
}

#[test]
fn exec_info_has_the_cluster_only_with_provide_cluster_info() {
    let exec = |provide: bool| json!({"apiVersion": V1, "command": "x", "interactiveMode": "Never", "provideClusterInfo": provide});
    let info = |provide: bool| {
        let file = kubeconfig(exec(provide));
        let found = flat(&file).unwrap();
        let text = found.exec.unwrap().info(&found.document, file.as_object().unwrap());
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let plain = json!({"kind": "ExecCredential", "apiVersion": V1, "spec": {"interactive": false}});
    assert_eq!(info(false), plain);
    assert_eq!(
        info(true)["spec"]["cluster"],
        json!({
            "server": "https://10.0.0.1:6443", "certificate-authority-data": "Y2E=", "proxy-url": "http://proxy:1",
            "config": {"audience": "a"},
        })
    );
}

#[test]
fn exec_answers_are_parsed_and_invalid_ones_are_never_quoted() {
    let login = login(json!({"apiVersion": V1, "command": "x", "interactiveMode": "Never"}));
    let answer =
        |status: Value| json!({"kind": "ExecCredential", "apiVersion": V1, "status": status}).to_string();
    let read = |text: String| login.read_answer(text.as_bytes());
    let found = read(answer(json!({"token": "t", "expirationTimestamp": "1970-01-01T01:00:00Z"}))).unwrap();
    assert_eq!((found.token.as_deref(), found.pair, found.expires), (Some("t"), None, Some(3600)));
    let found = read(answer(json!({"clientCertificateData": "c", "clientKeyData": "k"}))).unwrap();
    assert_eq!((found.token, found.pair, found.expires), (None, Some(("c".into(), "k".into())), None));

    let wrong_kind = json!({"kind": "Pod", "apiVersion": V1, "status": {"token": "secret"}});
    let older = json!({"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1beta1"});
    let no_status = json!({"kind": "ExecCredential", "apiVersion": V1});
    for (text, expected) in [
        ("secret".to_owned(), ExecAnswerError::NotAnObject),
        ("[]".to_owned(), ExecAnswerError::NotAnObject),
        (wrong_kind.to_string(), ExecAnswerError::Kind { found: "Pod".into() }),
        (
            older.to_string(),
            ExecAnswerError::Version {
                expected: V1.into(),
                found: "client.authentication.k8s.io/v1beta1".into(),
            },
        ),
        (no_status.to_string(), ExecAnswerError::NoStatus),
        (answer(json!({})), ExecAnswerError::NoCredential),
        (answer(json!({"token": ""})), ExecAnswerError::NoCredential),
        (answer(json!({"clientKeyData": "secret"})), ExecAnswerError::IncompletePair),
        (answer(json!({"token": 1})), ExecAnswerError::Field { field: "token", expected: "a string" }),
        (
            answer(json!({"token": "secret", "expirationTimestamp": "tomorrow"})),
            ExecAnswerError::Field { field: "expirationTimestamp", expected: "an RFC 3339 timestamp" },
        ),
    ] {
        let error = read(text).unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
        assert_eq!(error, expected);
    }
}

#[test]
fn an_exec_credential_is_refreshed_shortly_before_its_expiry() {
    assert_eq!(refresh_at(0, None), None);
    for (expires, expected) in [(7200, 7140), (100, 95), (10, 10), (-5, -5)] {
        assert_eq!(refresh_at(0, Some(expires)), Some(expected));
    }
}

#[test]
fn an_exec_credential_is_inserted_into_the_flat_kubeconfig() {
    let mut found =
        flat(&kubeconfig(json!({"apiVersion": V1, "command": "x", "interactiveMode": "Never"}))).unwrap();
    assert_eq!(found.document["users"][0]["user"], json!({}));
    let credential =
        ExecCredential { token: Some("t".into()), pair: Some(("c".into(), "k".into())), expires: None };
    set_exec_credential(&mut found.document, &credential, "7");
    let expected = json!({"token": "t", "client-certificate-data": "Yw==", "client-key-data": "aw=="});
    assert_eq!(found.document["users"][0]["user"], expected);
    assert_eq!(found.document["keelsonCredential"], "7");
    assert_eq!(format!("{credential:?}"), "ExecCredential { expires: None, .. }");
}
