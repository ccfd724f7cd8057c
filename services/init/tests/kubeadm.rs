//! The files that kubeadm leaves on a node, read and merged unchanged.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::Scene;
use keelson_config::{Config, kubelet_configuration};

const RELEASES: [&str; 3] = ["1.34", "1.35", "1.36"];
const ENDPOINT: &str = "unix:///var/run/containerd/containerd.sock";

fn fixture(release: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kubeadm").join(release).join(name)
}

/// The flags of `kubeadm-flags.env`, as systemd reads and splits the variable.
fn flags(release: &str) -> Vec<String> {
    let text = fs::read_to_string(fixture(release, "kubeadm-flags.env")).unwrap();
    let value = text.trim_end().strip_prefix("KUBELET_KUBEADM_ARGS=\"").unwrap().strip_suffix('"').unwrap();
    value.split_whitespace().map(ToOwned::to_owned).collect()
}

/// Resolves the files of a release, with its instance configuration and `more` as drop-ins over `config.yaml`. Returns the
/// exit code and the lines of the output.
fn resolve(scene: &Scene, release: &str, more: Option<&str>) -> (Option<i32>, Vec<String>) {
    resolve_with(scene, release, more, &[])
}

fn resolve_with(
    scene: &Scene,
    release: &str,
    more: Option<&str>,
    flags_before: &[&str],
) -> (Option<i32>, Vec<String>) {
    let drop_ins = scene.path("kubelet.conf.d");
    fs::create_dir_all(&drop_ins).unwrap();
    let instance = fixture(release, "instance-config.yaml");
    if instance.exists() {
        fs::copy(instance, drop_ins.join("10-instance.conf")).unwrap();
    }
    if let Some(more) = more {
        fs::write(drop_ins.join("50-more.conf"), more).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_keelson-init"))
        .arg("--config")
        .arg(fixture(release, "config.yaml"))
        .arg("--config-dir")
        .arg(drop_ins)
        .args(["--keelson-config", &scene.text("keelson.yaml"), "--run-dir", &scene.text("run")])
        .args(["--state-dir", &scene.text("state"), "--root-dir", &scene.text("root")])
        // The result must not depend on the test machine.
        .args(["--fail-swap-on=false", "--resolve-only"])
        .args(flags_before)
        .args(flags(release))
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap().lines().map(ToOwned::to_owned).collect())
}

#[test]
fn kubeadm_files_without_a_kubeconfig_lack_only_an_api_server() {
    for release in RELEASES {
        let (code, lines) = resolve(&Scene::new(), release, None);
        assert_eq!(code, Some(78), "{release}: {lines:#?}");
        // A kubelet without --kubeconfig fails with the same two errors (node-and-api.md §4.9).
        assert_eq!(lines.len(), 2, "{release}: {lines:#?}");
        assert!(lines[0].contains("no client provided, cannot use webhook authentication"), "{lines:#?}");
        assert!(lines[1].contains("no client provided, cannot use webhook authorization"), "{lines:#?}");
    }
}

/// kubeadm's drop-in starts the kubelet with a kubeconfig, so there is an API server.
#[test]
fn kubeadm_files_with_a_kubeconfig_are_accepted_unchanged() {
    for release in RELEASES {
        let scene = Scene::new();
        fs::write(scene.path("ca.crt"), "CA certificates").unwrap();
        fs::write(
            scene.path("kubelet.conf"),
            "current-context: c\nclusters: [{name: k, cluster: {server: 'https://10.0.0.1:6443'}}]\n\
             contexts: [{name: c, context: {cluster: k, user: u}}]\nusers: [{name: u, user: {token: t}}]\n",
        )
        .unwrap();
        // The test machine has no cluster CA at kubeadm's path.
        let more = format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
             authentication:\n  x509:\n    clientCAFile: {}\n",
            scene.text("ca.crt")
        );
        let kubeconfig = scene.text("kubelet.conf");
        let (code, lines) = resolve_with(&scene, release, Some(&more), &["--kubeconfig", &kubeconfig]);
        assert_eq!(code, Some(0), "{release}: {lines:#?}");
        let config = Config::load(&scene.path("run/config.json")).unwrap();
        let tls = config.api.tls.unwrap();
        assert_eq!((tls.tokens, tls.reviews, tls.anonymous), (true, true, false));
        let reported = |part: &str| lines.iter().any(|line| line.contains(part));
        assert!(
            !reported("no effect yet") && !reported("lenient"),
            "empty fields are not reported: {lines:#?}"
        );
        assert!(matches!(config.control_plane, keelson_config::ControlPlane::Kubernetes(_)));
    }
}

#[test]
fn kubeadm_files_without_webhooks_are_accepted_unchanged() {
    for release in RELEASES {
        let scene = Scene::new();
        fs::write(scene.path("ca.crt"), "CA certificates").unwrap();
        let more = format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
             authentication:\n  webhook:\n    enabled: false\n  x509:\n    clientCAFile: {}\n\
             authorization:\n  mode: AlwaysAllow\n",
            scene.text("ca.crt")
        );
        let (code, lines) = resolve(&scene, release, Some(&more));
        assert_eq!(code, Some(0), "{release}: {lines:#?}");
        assert!(lines.iter().all(|line| !line.contains("has no field")), "{release}: {lines:#?}");

        let file = scene.path("run/config.json");
        let config = Config::load(&file).unwrap();
        let runtime = &config.runtime;
        assert_eq!((runtime.endpoint.as_str(), runtime.cgroup_driver.as_str()), (ENDPOINT, "systemd"));
        assert_eq!((runtime.request_timeout_ms, config.sources.file_check_ms), (120_000, 20_000));
        assert_eq!(
            (runtime.cluster_dns.as_slice(), runtime.cluster_domain.as_str()),
            (&["10.96.0.10".to_owned()][..], "cluster.local")
        );
        assert_eq!(config.sources.static_pod_path.as_deref(), Some(Path::new("/etc/kubernetes/manifests")));
        assert_eq!(config.api.tls.as_ref().unwrap().client_ca_file, Some(scene.path("ca.crt")));

        let whole = kubelet_configuration(&file).unwrap().unwrap();
        for (field, value) in [
            ("syncFrequency", "1m0s"),
            ("nodeStatusUpdateFrequency", "10s"),
            ("nodeStatusReportFrequency", "5m0s"),
            ("imageMinimumGCAge", "2m0s"),
            ("runtimeRequestTimeout", "2m0s"),
            ("streamingConnectionIdleTimeout", "4h0m0s"),
        ] {
            assert_eq!(whole[field], value, "{release}: {field}");
        }
        assert_eq!(whole["logging"]["flushFrequency"], "5s");
        let origin = |field: &str| config.provenance[&format!("kubeletConfiguration.{field}")].clone();
        let drop_in = scene.text("kubelet.conf.d/10-instance.conf:2");
        let endpoint = if release == "1.34" { "--container-runtime-endpoint".to_owned() } else { drop_in };
        assert_eq!(origin("containerRuntimeEndpoint"), endpoint);
        assert!(origin("clusterDomain").ends_with("config.yaml:18"), "{}", origin("clusterDomain"));
        assert!(
            !config.provenance.contains_key("kubeletConfiguration.syncFrequency"),
            "a zero counts as unset"
        );
        if release == "1.35" {
            assert_eq!(config.node_name, "node-1");
            assert_eq!(whole["registerWithTaints"][0]["key"], "node-role.kubernetes.io/control-plane");
        }
    }
}
