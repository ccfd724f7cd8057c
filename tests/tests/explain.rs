//! `keelson explain` names all that a pod waits for, with its owner, since when, and the next attempt, until the wait is
//! over (proof 9).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, HungMount, Scratch, copy_binaries, eventually};
use keelson_tests::waits::{
    assert_not_scheduled, assert_same_after_a_retry, pod_with, until_one_ready, until_retried, waiting_reason,
};
use keelson_tests::{
    LIMIT, pods, running, service_row, sleeper, text, until_cause, until_event, until_explained,
    until_no_cause, until_ready,
};
use serde_json::Value;

#[tokio::test]
async fn a_missing_image_waits_for_you_and_backs_off_until_the_manifest_is_fixed() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let missing = sleeper("web").replace(BUSYBOX_IMAGE, "127.0.0.1:1/nowhere/image:1");
    agent.write_manifest("web.yaml", &missing).unwrap();
    let step = until_retried(&agent, "web", "image", "you", "nowhere/image").await;
    assert_eq!(step["state"], "failed");
    assert_eq!(step["subject"], "main");
    until_event(&agent, "Failed", "nowhere/image").await.unwrap();
    eventually(LIMIT, "the container backs off", async || {
        waiting_reason(&agent, "web").await == "ImagePullBackOff"
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_same_after_a_retry(&agent, "web", &step).await;
    // The cause is shown also during the back-off.
    until_cause(&agent, "web", "image", "you", "connection refused").await.unwrap();

    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_missing_config_map_waits_for_you_until_it_is_created() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let env = "    env:\n    - name: COLOUR\n      valueFrom:\n        configMapKeyRef:\n          \
               name: colours\n          key: main\n";
    agent.write_manifest("web.yaml", &pod_with("web", env, "")).unwrap();
    let step = until_retried(&agent, "web", "container", "you", "colours").await;
    assert_eq!(step["state"], "failed");
    assert_eq!(waiting_reason(&agent, "web").await, "CreateContainerConfigError");
    assert_same_after_a_retry(&agent, "web", &step).await;

    let map = |key: &str| {
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: colours\ndata:\n  {key}: blue\n")
    };
    // The object alone is not enough: its key is missing.
    agent.write_manifest("colours.yaml", &map("other")).unwrap();
    until_retried(&agent, "web", "container", "you", "\"colours\"").await;
    agent.write_manifest("colours.yaml", &map("main")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_volume_of_an_unsupported_kind_waits_for_you() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let mount = "    volumeMounts:\n    - name: share\n      mountPath: /share\n";
    let volume = "  volumes:\n  - name: share\n    rbd:\n      image: disk\n      monitors: [127.0.0.1]\n";
    agent.write_manifest("web.yaml", &pod_with("web", mount, volume)).unwrap();
    let step = until_retried(&agent, "web", "volumes", "you", "share").await;
    assert_eq!(step["state"], "failed");
    until_event(&agent, "FailedMount", "rbd").await.unwrap();
    agent.write_manifest("web.yaml", &pod_with("web", "", "")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_host_path_of_the_wrong_type_waits_for_you_until_it_is_fixed() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let path = scratch.path().join("data");
    fs::write(&path, "a file").unwrap();
    let volume = format!(
        "    volumeMounts:\n    - name: data\n      mountPath: /data\n  volumes:\n  - name: data\n    hostPath:\n      path: {}\n      type: Directory\n",
        path.display()
    );
    agent.write_manifest("web.yaml", &pod_with("web", &volume, "")).unwrap();
    let step = until_retried(&agent, "web", "volumes", "you", path.to_str().unwrap()).await;
    until_event(&agent, "FailedMount", "hostPath type check failed").await.unwrap();
    assert_same_after_a_retry(&agent, "web", &step).await;

    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_crash_loop_shows_the_next_restart_and_retry_ends_the_back_off() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let flag = scratch.path().join("flag");
    fs::create_dir(&flag).unwrap();
    let volume = format!(
        "    volumeMounts:\n    - name: flag\n      mountPath: /flag\n  volumes:\n  - name: flag\n    hostPath:\n      path: {}\n",
        flag.display()
    );
    let crashing = pod_with("web", &volume, "").replace(
        "exec sleep 1000000",
        "if [ -e /flag/good ]; then exec sleep 1000000; fi; echo no flag; exit 1",
    );
    agent.write_manifest("web.yaml", &crashing).unwrap();
    let step = until_retried(&agent, "web", "container", "pod-sync", "back-off").await;
    assert_eq!(step["subject"], "main");
    assert_eq!(waiting_reason(&agent, "web").await, "CrashLoopBackOff");
    let shown = text(&agent.keelson(&["explain", "pod", "web"]).await.unwrap());
    assert!(shown.contains("in "), "the next retry is shown: {shown}");

    fs::write(flag.join("good"), "").unwrap();
    let retried = agent.keelson(&["retry", "pod", "web"]).await.unwrap();
    assert!(retried.status.success(), "{}", text(&retried));
    until_ready(&agent, &["web"]).await.unwrap();
    let pod = pods(&agent).await.unwrap().into_values().next().unwrap();
    let started = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"].as_str();
    assert!(started.is_some() && started < step["next_retry"].as_str(), "the back-off continued: {pod:#}");
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn admission_rejects_pods_that_never_fit_and_holds_pods_that_do_not_fit_now() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).configure(|spec| spec.max_pods = 2).start().await.unwrap();
    agent.write_manifest("one.yaml", &sleeper("one")).unwrap();
    until_one_ready(&agent, "one").await;
    let huge = pod_with("huge", "    resources:\n      requests:\n        cpu: \"4000\"\n", "");
    agent.write_manifest("huge.yaml", &huge).unwrap();
    let text = "Node didn't have enough resource: cpu, requested: 4000000";
    let step = until_cause(&agent, "huge", "admission", "you", text).await.unwrap();
    assert_eq!(step["state"], "failed");
    // A rejected pod is never admitted: another one has to replace it.
    assert_not_scheduled(&step);
    let full = format!("huge-{}", agent.spec().node_name);
    let status = pods(&agent).await.unwrap()[&full]["status"].clone();
    assert_eq!((&status["phase"], &status["reason"]), (&"Failed".into(), &"OutOfcpu".into()), "{status}");

    // A rejected pod takes no slot; the third running pod is one too many.
    agent.write_manifest("two.yaml", &sleeper("two")).unwrap();
    until_one_ready(&agent, "two").await;
    agent.write_manifest("three.yaml", &sleeper("three")).unwrap();
    let text = "pods, requested: 1, used: 2, capacity: 2";
    let step = until_cause(&agent, "three", "admission", "resource-manager", text).await.unwrap();
    assert_eq!(step["state"], "waiting");
    // It is admitted when another pod ends.
    agent.remove_manifest("two.yaml").unwrap();
    until_one_ready(&agent, "three").await;

    // With smaller requests, and a free slot, it runs.
    for gone in ["three.yaml", "huge.yaml"] {
        agent.remove_manifest(gone).unwrap();
    }
    until_ready(&agent, &["one"]).await.unwrap();
    agent.write_manifest("huge.yaml", &sleeper("huge")).unwrap();
    until_ready(&agent, &["one", "huge"]).await.unwrap();
    until_no_cause(&agent, "huge").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn explain_names_a_hanging_service_as_the_owner() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("old.yaml", &sleeper("old")).unwrap();
    until_ready(&agent, &["old"]).await.unwrap();
    for service in [ServiceName::ResourceManager, ServiceName::VolumeManager, ServiceName::RuntimeShim] {
        let name = format!("new-{service}");
        let process = agent.service(service).unwrap();
        assert!(process.signal(Signal::STOP));
        agent.write_manifest(&format!("{name}.yaml"), &sleeper(&name)).unwrap();
        let (step, text) = match service {
            ServiceName::ResourceManager => ("admission", "cannot ask for admission"),
            ServiceName::VolumeManager => ("volumes", "Unable to attach or mount volumes"),
            _ => ("image", "is not reachable"),
        };
        until_retried(&agent, &name, step, service.as_str(), text).await;
        assert!(process.signal(Signal::CONT));
        until_one_ready(&agent, &name).await;
        until_no_cause(&agent, &name).await.unwrap();
    }
    agent.end().unwrap();
}

/// An agent with its own copy of the binaries, which a test may replace.
async fn agent_with_own_binaries(scratch: &Scratch) -> Agent {
    let builder = Agent::builder(scratch.path()).configure(|spec| {
        let bins = spec.config_dir.with_file_name("own-bin");
        copy_binaries(&spec.bin_dir, &bins).unwrap();
        spec.bin_dir = bins;
    });
    builder.start().await.unwrap()
}

/// Kills a service and replaces its binary by one that kills itself; returns the binary's path, next to which the real one is.
fn kill_at_every_start(agent: &Agent, service: ServiceName) -> PathBuf {
    let process = agent.service(service).unwrap();
    let binary = agent.spec().bin_dir.join(service.binary());
    fs::rename(&binary, binary.with_extension("real")).unwrap();
    fs::write(&binary, "#!/bin/sh\nkill -9 $$\n").unwrap();
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    process.signal(Signal::KILL);
    binary
}

#[tokio::test]
async fn explain_names_a_crash_looping_service_as_the_owner() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_own_binaries(&scratch).await;
    let binary = kill_at_every_start(&agent, ServiceName::ResourceManager);
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    let step = until_retried(&agent, "web", "admission", "resource-manager", "is not reachable").await;
    assert_eq!(step["state"], "waiting");
    let row = service_row(&agent, ServiceName::ResourceManager).await.unwrap();
    assert_ne!(row["state"], "running", "{row}");
    fs::rename(binary.with_extension("real"), &binary).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn without_pod_config_explain_says_so_for_running_and_unknown_pods() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_own_binaries(&scratch).await;
    agent.write_manifest("old.yaml", &sleeper("old")).unwrap();
    until_ready(&agent, &["old"]).await.unwrap();
    let binary = kill_at_every_start(&agent, ServiceName::PodConfig);
    agent.write_manifest("new.yaml", &sleeper("new")).unwrap();
    let names_it = |e: &Value| {
        let step = &e["steps"][0];
        // init shows since when, and the next start; during a start there is no next one.
        let is_shown = step["since"].is_string() && step["next_retry"].is_string();
        step["owner"] == "pod-config" && step["state"] == "waiting" && is_shown
    };
    for pod in ["old", "new"] {
        let explained = until_explained(&agent, pod, "pod-config owns the wait", names_it).await.unwrap();
        let step = &explained["steps"][0];
        assert!(step["message"].as_str().unwrap().contains("manifests are not read"), "{step}");
        assert!(step["next_retry"].as_str() >= step["since"].as_str(), "{step}");
    }
    fs::rename(binary.with_extension("real"), &binary).unwrap();
    until_ready(&agent, &["new", "old"]).await.unwrap();
    for pod in ["old", "new"] {
        until_no_cause(&agent, pod).await.unwrap();
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn explain_names_runtime_shim_while_the_runtime_is_unavailable() {
    let scratch = Scratch::new().unwrap();
    let mut agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("old.yaml", &sleeper("old")).unwrap();
    until_ready(&agent, &["old"]).await.unwrap();
    agent.containerd_mut().kill();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    let socket = agent.containerd().socket().display().to_string();
    let step = until_cause(&agent, "web", "sandbox", "runtime-shim", &socket).await.unwrap();
    assert_eq!(step["state"], "waiting");
    // It continues with the first successful list of the runtime, and no sooner.
    assert_not_scheduled(&step);
    // A pod that ends waits for the runtime, too, and lists it itself.
    agent.remove_manifest("old.yaml").unwrap();
    until_retried(&agent, "old", "termination", "runtime-shim", "").await;
    agent.containerd_mut().restart().unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_pod_waits_for_a_terminating_pod_of_the_same_name() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    // The shell ignores SIGTERM, so the whole grace period is used.
    let stubborn = sleeper("web")
        .replace("terminationGracePeriodSeconds: 0", "terminationGracePeriodSeconds: 6")
        .replace("exec sleep 1000000", "trap '' TERM; while true; do sleep 1; done");
    agent.write_manifest("web.yaml", &stubborn).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    let full = format!("web-{}", agent.spec().node_name);
    let list = eventually(LIMIT, "the old pod ends", async || {
        text(&agent.keelson(&["get", "pods"]).await.unwrap()).contains("Terminating")
    });
    list.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    // The name alone means the new pod; the old one is found by its UID.
    let step = until_cause(&agent, &full, "source", "pod-sync", "still ending").await.unwrap();
    assert_eq!(step["state"], "waiting");
    assert_not_scheduled(&step);
    assert_eq!(running(&agent).await.unwrap(), before, "the old one uses its grace");
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    assert_ne!(running(&agent).await.unwrap(), before);
    agent.end().unwrap();
}

#[tokio::test]
async fn a_volume_on_a_hanging_file_system_is_named_and_delays_no_other_pod() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let share = scratch.path().join("share");
    fs::create_dir(&share).unwrap();
    let hung = HungMount::over(&share).unwrap();
    let mount = "    volumeMounts:\n    - name: share\n      mountPath: /share\n";
    let volume = format!(
        "  volumes:\n  - name: share\n    hostPath:\n      path: {}\n      type: Directory\n",
        share.display()
    );
    agent.write_manifest("stuck.yaml", &pod_with("stuck", mount, &volume)).unwrap();
    let text = format!("volume \"share\" takes longer than 2 s: the file system at {}", share.display());
    let step = until_cause(&agent, "stuck", "volumes", "volume-manager", &text).await.unwrap();
    assert_eq!(step["state"], "waiting");
    // The one call that hangs is still pending.
    assert_not_scheduled(&step);

    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_one_ready(&agent, "web").await;
    let still = until_cause(&agent, "stuck", "volumes", "volume-manager", &text).await.unwrap();
    assert_eq!(still["since"], step["since"]);
    assert!(!running(&agent).await.unwrap().keys().any(|name| name.starts_with("stuck-")));

    drop(hung);
    until_ready(&agent, &["stuck", "web"]).await.unwrap();
    until_no_cause(&agent, "stuck").await.unwrap();
    agent.end().unwrap();
}
