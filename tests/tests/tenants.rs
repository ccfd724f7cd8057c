//! What a pod, and a local user on the node, can do to the agent and to other pods: nothing (docs/security.md).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output};

use keelson_config::ServiceName;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Image, Scratch, eventually};
use keelson_tests::{LIMIT, is_ready, pods, running, text, until_event, until_explained};
use serde_json::{Value, json};

/// Folders of the node with the libraries of its programs.
const LIBRARIES: [&str; 3] = ["/usr/lib", "/lib", "/lib64"];

/// A pod that sleeps, with the fields of `spec` merged into it.
fn sleeper(name: &str, image: &str, spec: &Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": image, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sleep", "1000000"],
            }],
        },
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        pod["spec"][field] = value.clone();
    }
    pod
}

/// A pod that sees the agent's sockets, in a folder above them, and can run the `keelson` command.
fn spy(agent: &Agent, name: &str, spec: &Value) -> Value {
    let mut pod = sleeper(name, BUSYBOX_IMAGE, spec);
    let above = agent.spec().run_dir.parent().unwrap().to_str().unwrap();
    let folders = [above, agent.spec().bin_dir.to_str().unwrap(), LIBRARIES[0], LIBRARIES[1], LIBRARIES[2]];
    let mounts = ["/above", "/agent-bin", LIBRARIES[0], LIBRARIES[1], LIBRARIES[2]];
    pod["spec"]["volumes"] = (0..folders.len())
        .map(|n| json!({"name": format!("v{n}"), "hostPath": {"path": folders[n]}}))
        .collect::<Vec<_>>()
        .into();
    pod["spec"]["containers"][0]["volumeMounts"] = (0..folders.len())
        .map(|n| json!({"name": format!("v{n}"), "mountPath": mounts[n], "readOnly": true}))
        .collect::<Vec<_>>()
        .into();
    pod
}

/// Runs the `keelson` command inside a pod.
async fn keelson_in_pod(agent: &Agent, pod: &str, args: &[&str]) -> Output {
    let run_dir = agent.spec().run_dir.file_name().unwrap().to_str().unwrap();
    let run_dir = format!("/above/{run_dir}");
    let inside = ["exec", pod, "--", "/agent-bin/keelson", "--run-dir", &run_dir];
    agent.keelson(&[&inside, args].concat()).await.unwrap()
}

#[tokio::test]
async fn a_pod_with_the_agents_sockets_may_call_nothing_even_as_root() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let spies = [
        ("plain", json!({})),
        ("all-processes", json!({"hostPID": true})),
        ("all-of-the-host", json!({"hostPID": true, "hostNetwork": true, "hostIPC": true})),
    ];
    for (name, spec) in &spies {
        agent.write_manifest(&format!("{name}.yaml"), &spy(&agent, name, spec).to_string()).unwrap();
    }
    let names = pods_named(&agent, &spies.map(|(name, _)| name)).await;
    let before = running(&agent).await.unwrap();
    for name in &names {
        // The command works there; the owner of the socket refuses.
        let version = keelson_in_pod(&agent, name, &["version", "--client"]).await;
        assert!(version.status.success(), "{name}: {}", text(&version));
        for args in [&["get", "pods", "-A"][..], &["exec", name, "--", "id"], &["get", "node"]] {
            let refused = keelson_in_pod(&agent, name, args).await;
            let output = text(&refused);
            assert!(
                !refused.status.success() && output.contains("runs in a pod"),
                "{name} {args:?}: {output}"
            );
        }
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    agent.end().unwrap();
}

/// Waits until pods are Ready; their names with that of the node.
async fn pods_named(agent: &Agent, names: &[&str]) -> Vec<String> {
    let names: Vec<String> = names.iter().map(|name| format!("{name}-{}", agent.spec().node_name)).collect();
    let ready = eventually(LIMIT, "the pods are Ready", async || {
        let all = pods(agent).await.unwrap_or_default();
        names.iter().all(|name| all.get(name).is_some_and(is_ready))
    });
    ready.await.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
    names
}

#[tokio::test]
async fn no_container_starts_with_a_uid_or_gid_of_the_agent() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let image = |name: &str, user: &str| Image {
        user: user.to_owned(),
        ..Image::new(&format!("keelson.local/{name}:1"), &["/bin/sleep", "1000000"])
    };
    let images = [
        image("user-by-number", "64206"),
        image("user-by-name", "agent"),
        image("groups-of-the-image", "spy"),
        // A numeric group is passed on, and the supplementary groups are those of the image.
        image("group-by-number", "1000:64200"),
        image("harmless", "app"),
    ];
    agent.containerd().import_images(&images).unwrap();
    for image in &images {
        let name = image.name.trim_start_matches("keelson.local/").trim_end_matches(":1");
        let pod = sleeper(name, &image.name, &json!({}));
        agent.write_manifest(&format!("{name}.yaml"), &pod.to_string()).unwrap();
    }
    // A forbidden id in the pod's spec is refused before anything is created.
    let in_spec = json!({"securityContext": {"runAsUser": 1000, "supplementalGroups": [64200]}});
    agent.write_manifest("said.yaml", &sleeper("said", BUSYBOX_IMAGE, &in_spec).to_string()).unwrap();
    let folder = json!({"volumes": [{"name": "run", "hostPath": {"path": agent.spec().run_dir}}]});
    agent.write_manifest("folder.yaml", &sleeper("folder", BUSYBOX_IMAGE, &folder).to_string()).unwrap();

    for pod in pods_named(&agent, &["harmless", "group-by-number"]).await {
        let ids = text(&agent.keelson(&["exec", &pod, "--", "id"]).await.unwrap());
        assert!(ids.contains("uid=1000") && !ids.contains("642"), "{pod}: {ids}");
    }
    until_event(&agent, "AgentIdentityForbidden", "spec.securityContext.supplementalGroups[0] is 64200")
        .await
        .unwrap();
    until_event(&agent, "SourceForbidden", "sourceLimits.file.agentRunFolder").await.unwrap();
    for image in &images[..3] {
        let name = image.name.trim_start_matches("keelson.local/").trim_end_matches(":1");
        let pod = format!("{name}-{}", agent.spec().node_name);
        let waits = |shown: &Value| {
            let waiting = &shown["status"]["containerStatuses"][0]["state"]["waiting"];
            waiting["reason"] == "CreateContainerConfigError"
                && waiting["message"].as_str().is_some_and(|text| text.contains("could act as the agent"))
        };
        let refused = eventually(LIMIT, "it is refused", async || {
            pods(&agent).await.is_ok_and(|all| all.get(&pod).is_some_and(waits))
        });
        refused.await.unwrap_or_else(|error| panic!("{name}: {error:#}\n{}", agent.log_tail()));
    }
    let running = running(&agent).await.unwrap();
    let names: Vec<&str> = running.keys().map(|name| name.split("-test-").next().unwrap()).collect();
    assert_eq!(names, ["group-by-number", "harmless"]);
    agent.end().unwrap();
}

#[tokio::test]
async fn a_process_with_a_services_uid_cannot_read_its_proc_files() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    for service in ServiceName::ALL {
        let Some(pid) = agent.service_pid(service) else { continue };
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let uid: u32 =
            status.lines().find_map(|l| l.strip_prefix("Uid:\t")?.split('\t').next()?.parse().ok()).unwrap();
        if uid == 0 {
            continue;
        }
        // A readable file, so that the failures below mean something.
        let read = |file: &str| {
            let path = format!("/proc/{pid}/{file}");
            let mut command = Command::new("/bin/head");
            command.args(["-c", "1", &path]).uid(uid).gid(agent_group(&agent)).current_dir("/");
            command.output().unwrap()
        };
        assert!(read("status").status.success(), "{service}");
        for file in ["environ", "maps", "mem", "auxv"] {
            let output = read(file);
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(
                !output.status.success() && error.contains("Permission denied"),
                "{service} {file}: {error}"
            );
        }
        let mut list = Command::new("/bin/ls");
        list.arg(format!("/proc/{pid}/fd")).uid(uid).gid(agent_group(&agent)).current_dir("/");
        let output = list.output().unwrap();
        assert!(!output.status.success(), "{service}: {}", text(&output));
    }
    agent.end().unwrap();
}

/// The group of the operators: that of the folder of the sockets.
fn agent_group(agent: &Agent) -> u32 {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(&agent.spec().run_dir).unwrap().gid()
}

#[tokio::test]
async fn hanging_probes_of_one_pod_do_not_starve_other_pods() {
    const GREEDY: usize = 20;
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let mut greedy = sleeper("greedy", BUSYBOX_IMAGE, &json!({"shareProcessNamespace": true}));
    let mut container = greedy["spec"]["containers"][0].clone();
    container["readinessProbe"] =
        json!({"exec": {"command": ["/bin/sleep", "3600"]}, "periodSeconds": 1, "timeoutSeconds": 3600});
    let containers = (0..GREEDY).map(|n| {
        let mut container = container.clone();
        container["name"] = format!("c{n}").into();
        container
    });
    greedy["spec"]["containers"] = containers.collect::<Vec<_>>().into();
    agent.write_manifest("greedy.yaml", &greedy.to_string()).unwrap();
    let pod = format!("greedy-{}", agent.spec().node_name);
    // There are 16 slots for exec probes; this pod takes all of them.
    let crowded = eventually(LIMIT, "its probes take all places", async || {
        let list = agent.keelson(&["exec", &pod, "-c", "c0", "--", "ps"]).await;
        list.is_ok_and(|list| text(&list).matches("/bin/sleep 3600").count() >= 16)
    });
    crowded.await.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
    let why = "readiness probe waits for its turn: ";
    until_explained(&agent, &pod, "who is in the way", |explained| {
        let text = explained.to_string();
        text.contains(why) && text.contains(&format!("16 of them by default/{pod}"))
    })
    .await
    .unwrap();

    let mut other = sleeper("other", BUSYBOX_IMAGE, &json!({}));
    other["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": ["/bin/true"]}, "periodSeconds": 1, "timeoutSeconds": 20});
    agent.write_manifest("other.yaml", &other.to_string()).unwrap();
    pods_named(&agent, &["other"]).await;
    let metrics = agent.keelson(&["grpc", "call", "pod-sync", "GetMetrics", "{}"]).await.unwrap();
    let cut = text(&metrics);
    let of_greedy = format!("pod=\\\"{pod}\\\"");
    let is_cut =
        |line: &str| line.starts_with("keelson_pod_sync_probes_cut_total{") && line.contains(&of_greedy);
    assert!(cut.split("\\n").any(is_cut), "{cut}");
    agent.end().unwrap();
}

#[tokio::test]
async fn hosts_file_and_termination_log_count_as_ephemeral_storage() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let filling = |name: &str, file: &str| {
        let mut pod = sleeper(name, BUSYBOX_IMAGE, &json!({}));
        let script = format!("dd if=/dev/zero of={file} bs=1048576 count=8; exec sleep 1000000");
        pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", script]);
        pod["spec"]["containers"][0]["resources"] = json!({"limits": {"ephemeral-storage": "4Mi"}});
        pod
    };
    agent.write_manifest("calm.yaml", &filling("calm", "/dev/null").to_string()).unwrap();
    pods_named(&agent, &["calm"]).await;
    let calm = running(&agent).await.unwrap();
    agent.write_manifest("hosts.yaml", &filling("hosts", "/etc/hosts").to_string()).unwrap();
    let applied = scratch.path().join("message.yaml");
    std::fs::write(&applied, filling("message", "/dev/termination-log").to_string()).unwrap();
    let output = agent.keelson(&["apply", "-f", applied.to_str().unwrap()]).await.unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let node = &agent.spec().node_name;
    for name in ["hosts", "message"] {
        let pod = format!("{name}-{node}");
        let mut last = Value::Null;
        let evicted = eventually(LIMIT * 2, format!("{name} is evicted"), async || {
            last = pods(&agent).await.ok().and_then(|mut pods| pods.remove(&pod)).unwrap_or_default();
            last["status"]["phase"] == "Failed"
        });
        evicted.await.unwrap_or_else(|error| panic!("{error:#}\n{last:#}\n{}", agent.log_tail()));
        assert_eq!(last["status"]["reason"], "Evicted", "{last:#}");
        assert_eq!(
            last["status"]["message"],
            "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. "
        );
    }
    let alone = eventually(LIMIT, "calm alone runs, and as it was", async || {
        running(&agent).await.is_ok_and(|now| now == calm)
    });
    alone.await.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
    // A rewritten manifest runs the pod again.
    agent.remove_manifest("hosts.yaml").unwrap();
    let gone = eventually(LIMIT, "hosts is forgotten", async || {
        pods(&agent).await.is_ok_and(|pods| !pods.contains_key(&format!("hosts-{node}")))
    });
    gone.await.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
    agent.write_manifest("hosts.yaml", &filling("hosts", "/dev/null").to_string()).unwrap();
    pods_named(&agent, &["hosts"]).await;
    agent.end().unwrap();
}

/// Root in a pod with `hostPID` cannot read the environment of the agent's root processes, init included: it may hold
/// credentials.
#[tokio::test]
async fn root_in_a_host_pid_pod_cannot_read_the_agents_environment() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent
        .write_manifest("spy.yaml", &sleeper("spy", BUSYBOX_IMAGE, &json!({"hostPID": true})).to_string())
        .unwrap();
    let spy = pods_named(&agent, &["spy"]).await.remove(0);
    for service in ServiceName::ALL {
        let Some(pid) = agent.service_pid(service) else { continue };
        for file in ["environ", "mem", "fd/0"] {
            let path = format!("/proc/{pid}/{file}");
            let output = agent.keelson(&["exec", &spy, "--", "head", "-c", "1", &path]).await.unwrap();
            let output_text = text(&output);
            assert!(
                !output.status.success() && output_text.contains("ermission denied"),
                "{service} {file}: {output_text}"
            );
        }
    }
    agent.end().unwrap();
}

/// Limits the processes and threads of the services with a user of their own: with 1 they can start no more, as when a pod has
/// used up those of the machine.
fn limit_threads(agent: &Agent, most: &str) -> usize {
    let mut limited = 0;
    for service in ServiceName::ALL {
        let Some(pid) = agent.service_pid(service) else { continue };
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let id = |field: &str| -> u32 {
            let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let (uid, gid) = (id("Uid:"), id("Gid:"));
        if uid == 0 {
            continue;
        }
        // Set as the same user, which may lower its own limit and raise it again.
        let mut limit = Command::new("/usr/bin/prlimit");
        limit.args(["--pid", &pid.to_string(), &format!("--nproc={most}:")]);
        let done = limit.uid(uid).gid(gid).current_dir("/").output().unwrap();
        assert!(done.status.success(), "{service}: {}", text(&done));
        limited += 1;
    }
    limited
}

#[tokio::test]
async fn pid_exhaustion_ends_no_container_and_new_pods_run_afterwards() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let write = |name: &str| {
        let pod = sleeper(name, BUSYBOX_IMAGE, &json!({}));
        agent.write_manifest(&format!("{name}.yaml"), &pod.to_string()).unwrap();
    };
    write("calm");
    pods_named(&agent, &["calm"]).await;
    let calm = running(&agent).await.unwrap();
    assert!(limit_threads(&agent, "1") >= 3);
    // Idle blocking threads of tokio end after 10 s.
    let alone = eventually(LIMIT, "pod-config has no other thread than its first", async || {
        let pid = agent.service_pid(ServiceName::PodConfig).unwrap();
        std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("\nThreads:\t1\n")
    });
    alone.await.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
    write("late");
    let late = format!("late-{}", agent.spec().node_name);
    let suffers = eventually(LIMIT, "something fails, or the threads that there are suffice", async || {
        let is_there = pods(&agent).await.is_ok_and(|pods| pods.get(&late).is_some_and(is_ready));
        is_there || agent.log_tail().contains("OS can't spawn worker thread")
    });
    suffers.await.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
    limit_threads(&agent, "500");
    pods_named(&agent, &["late"]).await;
    let now = running(&agent).await.unwrap();
    assert!(calm.iter().all(|(name, process)| now.get(name) == Some(process)), "{now:?}");
    agent.end().unwrap();
}
