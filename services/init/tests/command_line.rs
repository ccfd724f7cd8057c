//! The command line of init: exit codes, messages, and the modes that start no service.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output, Stdio};

use common::{Scene, eventually, find, status_field};
use keelson_config::{Config, Paths, ServiceName};
use keelson_proto::keelson::supervisor::v1::WatchServicesRequest;
use keelson_testkit::json_lines;
use rustix::process::Signal;

const INIT: &str = env!("CARGO_BIN_EXE_keelson-init");

fn code_and_text(output: &Output) -> (Option<i32>, String) {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

fn init(arguments: &[&str]) -> (Option<i32>, String) {
    code_and_text(&Command::new(INIT).args(arguments).output().unwrap())
}

#[test]
fn help_and_version_succeed_and_an_unknown_flag_is_a_usage_error() {
    assert_eq!(init(&["--version"]), (Some(0), format!("keelson-init {}\n", env!("CARGO_PKG_VERSION"))));
    let (code, text) = init(&["--help"]);
    assert_eq!(code, Some(0));
    assert!(text.contains("--pod-manifest-path"));
    let (code, text) = init(&["--podmanifest-path", "/x"]);
    assert_eq!(code, Some(64));
    assert!(text.contains("--podmanifest-path"), "{text}");
}

#[test]
fn under_the_name_kubelet_the_exit_codes_are_0_and_1() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = dir.path().join("kubelet");
    std::os::unix::fs::symlink(INIT, &kubelet).unwrap();
    let run = |arguments: &[&str]| Command::new(&kubelet).args(arguments).output().unwrap();
    let code = |arguments: &[&str]| run(arguments).status.code();
    let version = run(&["--version"]);
    assert_eq!(version.status.code(), Some(0));
    assert!(version.stdout.starts_with(b"Kubernetes v1.36."), "{version:?}");
    let deprecated = ["--max-pods=1", "--config=/nonexistent.yaml"];
    let warned = String::from_utf8(run(&deprecated).stderr).unwrap();
    let warning = "Flag --max-pods has been deprecated, set maxPods in the file of --config instead\n";
    assert!(warned.starts_with(warning), "{warned}");
    let (_, under_its_own_name) = init(&deprecated);
    assert!(!under_its_own_name.contains("deprecated"), "{under_its_own_name}");
    assert_eq!(code(&["--no-such-flag"]), Some(1));
    let ended = String::from_utf8(run(&["--no-such-flag"]).stderr).unwrap();
    let words = "\"command failed\" err=\"failed to parse kubelet flag: unknown flag: --no-such-flag";
    assert!(ended.starts_with(words), "{ended}");
    assert_eq!(code(&["--config", "/nonexistent.yaml"]), Some(1));
}

#[test]
fn every_configuration_error_is_printed_with_file_and_line() {
    let scene = Scene::new();
    fs::write(
        scene.path("kubelet.yaml"),
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\nmaxPods: many\naddress: 0.0.0.0\n",
    )
    .unwrap();
    let (code, text) = code_and_text(&scene.command().args(["--log-level", "loud"]).output().unwrap());
    assert_eq!(code, Some(78));
    let file = scene.text("kubelet.yaml");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    let begins = |line: usize, expected: &str| {
        assert!(lines[line].starts_with(&format!("keelson-init: {expected}")), "{expected}: {text}");
    };
    begins(0, &format!("failed to load kubelet config file, path: {file}, error: invalid configuration: "));
    begins(1, "failed to validate kubelet configuration, error: invalid configuration: ");
    begins(2, "failed to validate kubelet flags: invalid configuration: ");
    assert!(lines[0].contains(&format!("maxPods = \"many\" ({file}:4; --max-pods)")), "{text}");
    assert!(lines[1].contains(&format!("address = \"0.0.0.0\" ({file}:5; --address)")), "{text}");
    assert!(lines[2].contains("--log-level = \"loud\""), "{text}");
}

#[test]
fn all_unreadable_configuration_files_are_reported() {
    let (code, text) = init(&["--config", "/nonexistent/k.yaml", "--keelson-config", "/nonexistent/o.yaml"]);
    assert_eq!(code, Some(78));
    assert!(
        text.contains("failed to load kubelet config file, path: /nonexistent/k.yaml, error: "),
        "{text}"
    );
    assert!(text.contains("/nonexistent/k.yaml that --config names"), "{text}");
    assert!(text.contains("/nonexistent/o.yaml that --keelson-config names"), "{text}");
}

#[test]
fn a_run_dir_that_cannot_be_created_is_reported_with_a_remedy() {
    let scene = Scene::new();
    fs::write(scene.path("run"), "a file").unwrap();
    let (code, text) = code_and_text(&scene.command().output().unwrap());
    assert_eq!(code, Some(78));
    assert!(text.contains(&scene.text("run")) && text.contains("flag"), "{text}");
}

#[test]
fn a_run_dir_on_a_full_disk_is_reported_with_a_remedy() {
    let scene = Scene::new();
    let run = scene.text("run");
    fs::create_dir(&run).unwrap();
    // In its own mount namespace, so that nothing needs to be unmounted.
    let script = format!(
        "mount -t tmpfs -o size=64k,mode=755 none {run} && ! dd if=/dev/zero of={run}/fill bs=1k count=65 2>/dev/null && exec \"$@\""
    );
    let output = in_namespace(&["--mount"], &script, &scene.command());
    let (code, text) = code_and_text(&output);
    assert_eq!(code, Some(78), "{text}");
    assert!(
        text.contains("config.json") && text.contains("--run-dir") && text.contains("No space left"),
        "{text}"
    );
}

#[test]
fn resolve_only_writes_the_configuration_and_starts_nothing() {
    let scene = Scene::new();
    scene.write_config("startParallelism: 3\n");
    // An earlier init has left the status of an assigned configuration.
    let status = scene.path("run/node-configuration.json");
    fs::create_dir_all(scene.path("run")).unwrap();
    fs::write(&status, r#"{"assigned": {"revision": 7}, "state": "active"}"#).unwrap();
    let output = scene.command().arg("--resolve-only").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(!status.exists());
    let config = Config::load(&scene.path("run/config.json")).unwrap();
    assert_eq!((config.node_name.as_str(), config.runtime.start_parallelism), ("testnode", 3));
    assert_eq!(config.provenance["nodeName"], "--hostname-override");
    assert_eq!(config.provenance["runtime.startParallelism"], format!("{}:5", scene.text("keelson.yaml")));
    let flags = fs::read(scene.path("run/flags.json")).unwrap();
    let flags: BTreeMap<String, String> = serde_json::from_slice(&flags).unwrap();
    assert_eq!((&*flags["hostname-override"], &*flags["run-dir"]), ("testnode", &*scene.text("run")));
    assert_eq!((&*flags["resolve-only"], &*flags["log-format"]), ("true", "text"));
    let mode = fs::metadata(scene.path("run/flags.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    assert!(scene.processes().is_empty());
    assert!(!scene.path("state").exists());
}

#[test]
fn each_resolved_configuration_has_a_later_time() {
    let scene = Scene::new();
    let resolved = || {
        let output = scene.command().arg("--resolve-only").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        Config::load(&scene.path("run/config.json")).unwrap().resolved_unix_nanos
    };
    let before = keelson_service_kit::now_unix_nanos();
    let (first, second) = (resolved(), resolved());
    let after = keelson_service_kit::now_unix_nanos();
    assert!(before < first && first < second && second < after, "{before} {first} {second} {after}");
}

#[test]
fn credential_provider_config_is_copied_for_runtime_shim_only() {
    let scene = Scene::new();
    let run = |more: &[&str]| {
        let mut command = scene.command();
        command.args(more).arg("--resolve-only").env("PLUGIN_REGION", "north").env("NOTIFY_SOCKET", "@x");
        code_and_text(&command.output().unwrap())
    };
    fs::create_dir(scene.path("providers.d")).unwrap();
    let second =
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: b\n";
    fs::write(scene.path("providers.d/2.yaml"), second).unwrap();
    fs::write(scene.path("providers.d/1.json"), r#"{"providers": [{"name": "a"}]}"#).unwrap();
    fs::write(scene.path("providers.d/README"), ": no yaml").unwrap();
    for name in ["a", "b"] {
        fs::copy(scene.path("bin/fake"), scene.path("bin").join(name)).unwrap();
    }
    // An existing file is neither kept nor followed if it is a link.
    let file = scene.path("run/credentials/runtime-shim/image-credential-providers.json");
    let (parent, leftover) = (file.parent().unwrap(), file.with_extension("json.new"));
    fs::create_dir_all(parent).unwrap();
    fs::write(scene.path("foreign"), "theirs").unwrap();
    std::os::unix::fs::symlink(scene.path("foreign"), &leftover).unwrap();
    let (folder, bin) = (scene.text("providers.d"), scene.text("bin"));
    let flags = ["--image-credential-provider-config", &folder, "--image-credential-provider-bin-dir", &bin];
    assert_eq!(run(&flags).0, Some(0));
    assert_eq!(fs::read_to_string(scene.path("foreign")).unwrap(), "theirs");
    let found: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(
        (found["binDir"].as_str(), &found["environment"]["PLUGIN_REGION"]),
        (Some(&*bin), &"north".into())
    );
    assert!(found["environment"].get("NOTIFY_SOCKET").is_none(), "it is meant for init only");
    let files = found["files"].as_array().unwrap();
    assert_eq!(files.len(), 2, "{files:?}");
    assert_eq!(files[0]["path"], scene.text("providers.d/1.json"));
    assert_eq!(files[1]["text"], second);
    assert_eq!(files[1]["config"]["providers"][0]["name"], "b");
    assert_eq!(files[1]["lines"]["providers[0].name"], 4);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    // Services without root traverse the parent folder.
    assert_eq!((mode(&file), mode(parent), mode(parent.parent().unwrap())), (0o600, 0o700, 0o711));
    assert!(!fs::read_to_string(scene.path("run/config.json")).unwrap().contains("PLUGIN_REGION"));
    // Without the flags the copy is removed, and so are leftovers of a killed init.
    fs::write(&leftover, "hunter2").unwrap();
    assert_eq!(run(&[]).0, Some(0));
    assert!(!file.exists() && !leftover.exists());
}

#[test]
fn credential_provider_errors_are_reported_with_all_other_errors() {
    let scene = Scene::new();
    fs::create_dir(scene.path("empty")).unwrap();
    fs::create_dir(scene.path("broken")).unwrap();
    for name in ["a.yaml", "b.yml"] {
        fs::write(scene.path("broken").join(name), "providers: [").unwrap();
    }
    // Of three binaries one is missing, one is not executable, and one is fine.
    fs::write(scene.path("bin/unset"), "").unwrap();
    fs::copy(scene.path("bin/fake"), scene.path("bin/good")).unwrap();
    let providers = ["gone", "good", "unset", "../bin/gone"].map(|name| format!("- name: {name}\n")).concat();
    fs::write(scene.path("missing.yaml"), format!("providers:\n{providers}- gone\n")).unwrap();
    let (none, empty, broken) = (scene.text("none"), scene.text("empty"), scene.text("broken"));
    let (missing, bin) = (scene.text("missing.yaml"), scene.text("bin"));
    let gone = format!(
        "providers[0].name = \"gone\" ({missing}:2): {bin}/gone (--image-credential-provider-bin-dir): No such file"
    );
    let unset = format!(
        "providers[2].name = \"unset\" ({missing}:4): {bin}/unset (--image-credential-provider-bin-dir): it is not executable"
    );
    let cases: [(&str, Option<&str>, &[&str]); 5] = [
        (&missing, Some(&bin), &[&gone, &unset]),
        (&none, Some("/bin"), &[&none]),
        (&empty, Some("/bin"), &["has no file that ends in .json, .yaml or .yml"]),
        (&broken, Some("/bin"), &["broken/a.yaml", "broken/b.yml"]),
        (&empty, None, &["set it with --image-credential-provider-bin-dir"]),
    ];
    for (config, bin, expected) in cases {
        let mut command = scene.command();
        command.args(["--log-level", "loud", "--image-credential-provider-config", config]);
        if let Some(bin) = bin {
            command.args(["--image-credential-provider-bin-dir", bin]);
        }
        let (code, text) = code_and_text(&command.output().unwrap());
        assert_eq!(code, Some(78));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("--log-level = \"loud\""), "{text}");
        let reported: Vec<&&str> =
            lines[1..].iter().filter(|line| line.starts_with("keelson-init: ")).collect();
        assert_eq!(reported.len(), expected.len(), "{text}");
        for (line, expected) in reported.iter().zip(expected) {
            assert!(line.contains(expected), "{text}");
        }
    }
}

#[tokio::test]
async fn resolve_only_does_not_change_the_configuration_of_a_running_agent() {
    let scene = Scene::new();
    let _init = scene.start();
    scene.all_running().await;
    let output = scene.command().arg("--resolve-only").output().unwrap();
    let (code, text) = code_and_text(&output);
    assert_eq!(code, Some(78));
    assert!(text.contains("another keelson"), "{text}");
}

#[test]
fn prepare_host_makes_the_folders_and_shares_the_root() {
    let scene = Scene::new();
    let mut command = scene.command();
    command.arg("--prepare-host");
    // Run twice: the second time everything exists.
    let output = in_namespace(&["--mount"], "\"$@\" && \"$@\" && cat /proc/self/mountinfo", &command);
    let (code, text) = code_and_text(&output);
    assert_eq!(code, Some(0), "{text}");
    let root = scene.text("root");
    let mounts: Vec<&str> = text.lines().filter(|line| line.contains(&format!(" {root} "))).collect();
    assert_eq!(mounts.len(), 1, "{text}");
    assert!(mounts[0].contains(" shared:"), "{text}");
    for folder in ["run/pod-sync", "state/pod-sync", "logs", "links"] {
        assert!(scene.path(folder).is_dir(), "{folder}");
    }
}

/// Runs `script` with the command line of `command` as its arguments, in new namespaces.
fn in_namespace(kinds: &[&str], script: &str, command: &Command) -> Output {
    namespaced(kinds, script, command).output().unwrap()
}

fn namespaced(kinds: &[&str], script: &str, command: &Command) -> Command {
    let mut unshare = Command::new("unshare");
    unshare.args(kinds).args(["--propagation", "private", "sh", "-c", script, "sh"]);
    unshare.arg(command.get_program()).args(command.get_args());
    unshare
}

#[tokio::test]
async fn from_verbosity_1_on_every_flag_is_logged_at_the_start() {
    for (verbosity, logged) in [("0", false), ("1", true)] {
        let scene = Scene::new();
        let mut command = scene.command();
        command.args(["--v", verbosity]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = tokio::task::spawn_blocking({
            let child = command.spawn().unwrap();
            move || child.wait_with_output().unwrap()
        });
        let services = scene.all_running().await;
        common::signal(find(&services, ServiceName::Init).pid, Signal::TERM);
        let (code, text) = code_and_text(&output.await.unwrap());
        assert_eq!(code, Some(0), "{text}");
        for line in ["FLAG: --hostname-override=\"testnode\"", "FLAG: --max-pods=\"110\""] {
            assert_eq!(text.contains(line), logged, "{line}: {text}");
        }
    }
}

#[tokio::test]
async fn as_process_1_init_reaps_orphans_and_ends_on_sigterm() {
    let scene = Scene::new();
    scene.behave(ServiceName::NodeApi, "orphan 5");
    let kinds = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let mut unshare = scene.start_as(namespaced(&kinds, "exec \"$@\"", &scene.command()));
    let children = |pid: u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        text.split_whitespace().map(|pid| pid.parse::<u32>().unwrap()).collect::<Vec<_>>()
    };
    eventually("init runs", || !children(unshare.pid()).is_empty()).await;
    let init = children(unshare.pid())[0];
    // Its API cannot be used: callers from another pid namespace are not identified.
    let sockets = ServiceName::ALL.map(|service| Paths::socket_below(&scene.path("run"), service));
    eventually("all services answer", || sockets.iter().all(|socket| socket.exists())).await;
    assert_eq!(status_field(init, "NSpid").split(' ').next_back(), Some("1"));
    let refused = scene.client().watch_services(WatchServicesRequest {}).await.unwrap_err();
    assert!(refused.message().contains("another pid namespace"), "{refused:?}");
    eventually("only the services are left as children", || children(init).len() == 7).await;
    assert!(children(init).iter().all(|child| !status_field(*child, "State").starts_with('Z')));
    common::signal(init, Signal::TERM);
    assert_eq!(unshare.ended().await, Some(0));
}

#[tokio::test]
async fn binaries_in_a_folder_only_root_can_traverse_are_started() {
    assert!(rustix::process::geteuid().is_root(), "this test is about users; run it as root");
    let scene = Scene::new();
    fs::set_permissions(scene.path("bin"), fs::Permissions::from_mode(0o700)).unwrap();
    let _init = scene.start();
    let services = scene.all_running().await;
    let service = find(&services, ServiceName::PodSync);
    assert_ne!(service.uid, 0);
    assert_eq!(fs::read_link(format!("/proc/{}/exe", service.pid)).unwrap(), scene.path("bin/fake"));
}

#[test]
fn under_the_name_kubelet_a_late_startup_error_has_the_same_words() {
    let scene = Scene::new();
    fs::write(scene.path("state"), "no folder").unwrap();
    std::os::unix::fs::symlink(INIT, scene.path("kubelet")).unwrap();
    let own = scene.command();
    let output = Command::new(scene.path("kubelet")).args(own.get_args()).output().unwrap();
    let (code, text) = code_and_text(&output);
    assert_eq!(code, Some(1), "{text}");
    assert_eq!(text.matches("\"command failed\" err=\"").count(), 1, "{text}");
}

#[test]
fn an_invalid_kubeconfig_is_reported_and_a_valid_one_copied() {
    let scene = Scene::new();
    let path = scene.path("kubelet.conf");
    let resolve = || {
        let output = scene.command().arg("--kubeconfig").arg(&path).arg("--resolve-only").output().unwrap();
        code_and_text(&output)
    };
    let file = |user: &str| {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters:\n- name: k\n  cluster: {{server: 'https://h:6443'}}\n\
             contexts:\n- name: c\n  context: {{cluster: k, user: u}}\nusers:\n- name: u\n  user: {user}\n"
        )
    };
    let (code, text) = resolve();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("invalid kubeconfig") && text.contains("kubelet.conf"), "{text}");
    for (text, expected) in [
        ("current-context: [".to_owned(), "is not usable"),
        (
            file("{client-certificate: gone.pem, client-key: gone.pem}"),
            "users[0].user.client-certificate: cannot read",
        ),
        (
            file("{exec: {command: aws}}"),
            "users[0].user.exec.apiVersion: is missing; write client.authentication.k8s.io/v1",
        ),
    ] {
        fs::write(&path, text).unwrap();
        let (code, output) = resolve();
        assert_eq!(code, Some(0), "{output}");
        assert!(output.contains("invalid kubeconfig") && output.contains(expected), "{output}");
    }
    fs::write(&path, file("{token: secret}")).unwrap();
    let (code, text) = resolve();
    assert_eq!(code, Some(0), "{text}");
    for service in ["pod-config", "node-status"] {
        let copy = scene.path("run/credentials").join(service).join("kubeconfig.json");
        assert!(fs::read_to_string(&copy).unwrap().contains("secret"), "{service}");
        assert_eq!(fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o400);
    }
    let config = fs::read_to_string(scene.path("run/config.json")).unwrap();
    assert!(!config.contains("secret") && config.contains("kubelet.conf"));
}

#[tokio::test]
async fn the_agent_runs_with_an_invalid_kubeconfig_and_uses_it_once_valid() {
    let scene = Scene::new();
    let path = scene.path("kubelet.conf");
    fs::write(&path, "current-context: [").unwrap();
    let log = scene.path("log");
    let mut command = scene.command();
    command.arg("--kubeconfig").arg(&path).args(["--log-format", "json"]).stderr(File::create(&log).unwrap());
    let mut init = scene.start_as(command);
    let services = scene
        .wait("init reports the error and the services run", |services| {
            services.len() == ServiceName::ALL.len()
                && services.iter().all(|service| match service.name.as_str() {
                    "init" => service.state == "degraded",
                    _ => service.state == "running",
                })
        })
        .await;
    let message = &find(&services, ServiceName::Init).message;
    assert!(message.contains("invalid kubeconfig") && message.contains("kubelet.conf"), "{message}");
    let copy = scene.path("run/credentials/pod-config/kubeconfig.json");
    assert!(!copy.exists());

    fs::write(
        &path,
        "current-context: c\nclusters: [{name: k, cluster: {server: 'https://h:6443'}}]\n\
         contexts: [{name: c, context: {cluster: k, user: u}}]\nusers: [{name: u, user: {token: abc.def}}]\n",
    )
    .unwrap();
    eventually("it is copied", || copy.exists()).await;
    assert_eq!(scene.all_running().await.iter().map(|service| service.restarts).sum::<u32>(), 0);
    init.signal(Signal::TERM);
    assert_eq!(init.ended().await, Some(0));
    let text = fs::read_to_string(&log).unwrap();
    let is_error = |line: &&serde_json::Value| {
        let message = line["msg"].as_str().unwrap_or_default();
        line["level"] == "ERROR" && message.starts_with("invalid kubeconfig: ")
    };
    assert_eq!(json_lines(&text).unwrap().iter().filter(is_error).count(), 1, "{text}");
}

#[test]
fn bootstrap_kubeconfig_is_copied_for_node_status_only() {
    let scene = Scene::new();
    let (own, bootstrap) = (scene.path("kubelet.conf"), scene.path("bootstrap.conf"));
    let resolve = || {
        let mut command = scene.command();
        command.arg("--kubeconfig").arg(&own).arg("--bootstrap-kubeconfig").arg(&bootstrap);
        command.args(["--cert-dir", &scene.text("pki"), "--resolve-only"]);
        code_and_text(&command.output().unwrap())
    };
    for (text, expected) in [
        (None, "cannot read the configuration file"),
        (Some("current-context: ["), "is not usable"),
        (Some("current-context: c"), "contexts: there is no entry named \"c\""),
    ] {
        if let Some(text) = text {
            fs::write(&bootstrap, text).unwrap();
        }
        let (code, output) = resolve();
        assert_eq!(code, Some(0), "{output}");
        assert!(output.contains("bootstrap.conf") && output.contains(expected), "{output}");
        assert!(!own.exists());
    }
    let file = "current-context: c\nclusters: [{name: k, cluster: {server: 'https://h:6443'}}]\n\
                contexts: [{name: c, context: {cluster: k, user: u}}]\nusers: [{name: u, user: {token: abc.def}}]\n";
    fs::write(&bootstrap, file).unwrap();
    for _ in 0..2 {
        let (code, output) = resolve();
        assert_eq!(code, Some(0), "{output}");
        let written = fs::read_to_string(&own).unwrap();
        assert!(
            written.contains("pki/kubelet-client-current.pem") && !written.contains("abc.def"),
            "{written}"
        );
        assert_eq!(fs::metadata(&own).unwrap().permissions().mode() & 0o777, 0o600);
        let copy = |service: &str, name: &str| scene.path("run/credentials").join(service).join(name);
        let copied = copy("node-status", "bootstrap-kubeconfig.json");
        assert!(fs::read_to_string(&copied).unwrap().contains("abc.def"));
        assert_eq!(fs::metadata(&copied).unwrap().permissions().mode() & 0o777, 0o400);
        for service in ["node-status", "pod-config"] {
            assert!(!copy(service, "kubeconfig.json").exists(), "{service}");
        }
        assert!(!copy("pod-config", "bootstrap-kubeconfig.json").exists());
    }
}
