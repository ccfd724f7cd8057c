//! Statistics of a pod, metrics, and the effective configuration of a real agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, http, pods, running, until_ready};
use serde_json::{Value, json};

/// The CPU limit of the pod in thousandths of a core: low enough to be used up on a busy machine, too.
const CPU_MILLI: u64 = 100;
/// The memory limit of the pod, in bytes.
const MEMORY: u64 = 128 << 20;

/// The body of an answer with status 200.
async fn get_ok(url: &str) -> String {
    http::get_ok(url).await.unwrap()
}

async fn get_json(url: &str) -> Value {
    serde_json::from_str(&get_ok(url).await).unwrap()
}

/// A pod that takes 8 MiB and then burns as much CPU as it may.
fn burner() -> String {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "burner"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c",
                    "x=x; while [ ${#x} -lt 8388608 ]; do x=$x$x; done; while :; do :; done"],
                "resources": {"limits": {"cpu": format!("{CPU_MILLI}m"), "memory": MEMORY.to_string()}},
            }],
        },
    });
    pod.to_string()
}

#[tokio::test]
async fn a_busy_pod_has_plausible_cpu_and_memory_statistics() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let (api, node) = (agent.api_url(), agent.spec().node_name.clone());
    // The services have their sockets; node-api opens its ports a moment later.
    let running_pods = format!("{api}/runningpods/");
    eventually(LIMIT, "node-api answers", async || http::get_ok(&running_pods).await.is_ok()).await.unwrap();
    let none = get_json(&running_pods).await;
    assert_eq!((&none["kind"], &none["items"]), (&"PodList".into(), &Value::Null), "{none}");
    agent.write_manifest("burner.yaml", &burner()).unwrap();
    until_ready(&agent, &["burner"]).await.unwrap();
    let name = format!("burner-{node}");
    let uid = pods(&agent).await.unwrap()[&name]["metadata"]["uid"].clone();

    let summary = format!("{api}/stats/summary");
    let mut last = Value::Null;
    let reported = eventually(LIMIT, "the summary has the pod's usage", async || {
        last = get_json(&summary).await;
        let main = &last["pods"][0]["containers"][0];
        let at_least = |value: &Value, least: u64| value.as_u64().is_some_and(|value| value >= least);
        // The node and the pod are sampled by two calls, and each has a rate a second after its own first sample.
        at_least(&main["cpu"]["usageNanoCores"], 50_000_000)
            && at_least(&main["memory"]["rssBytes"], 8 << 20)
            && last["node"]["cpu"]["usageNanoCores"].is_u64()
    });
    reported.await.unwrap_or_else(|e| panic!("{e:#}\n{last:#}\n{}", agent.log_tail()));
    assert_eq!(last["pods"].as_array().unwrap().len(), 1, "{last:#}");
    let pod = &last["pods"][0];
    assert_eq!(pod["podRef"], json!({"name": name, "namespace": "default", "uid": uid}));
    check_pod_summary(pod);
    check_network_statistics(&agent, pod, &format!("{name}/main")).await;
    check_node_summary(&last["node"], &node);

    // Volumes are measured in the background, after the first request.
    let measured = eventually(LIMIT, "the layer and the logs are measured", async || {
        last = get_json(&summary).await;
        let (pod, main) = (&last["pods"][0], &last["pods"][0]["containers"][0]);
        let parts = [&main["rootfs"], &main["logs"], &pod["ephemeral-storage"]];
        parts.iter().all(|part| part["usedBytes"].is_u64() && part["capacityBytes"].as_u64() > Some(0))
    });
    measured.await.unwrap_or_else(|e| panic!("{e:#}\n{last:#}\n{}", agent.log_tail()));
    assert!(last["node"]["runtime"]["containerFs"]["capacityBytes"].as_u64() > Some(0), "{last:#}");

    let little = get_json(&format!("{summary}?only_cpu_and_memory=true")).await;
    assert!(little["pods"][0]["cpu"].is_object() && little["node"]["memory"].is_object(), "{little:#}");
    for absent in [&little["pods"][0]["network"], &little["node"]["fs"], &little["node"]["rlimit"]] {
        assert!(absent.is_null(), "{little:#}");
    }

    check_resource_metrics(&api, &name).await;
    let list = get_json(&format!("{api}/runningpods/")).await;
    assert_eq!(list["items"].as_array().unwrap().len(), 1, "{list}");
    let item = &list["items"][0];
    assert_eq!(item["metadata"], json!({"name": name, "namespace": "default", "uid": uid}), "{list}");
    assert_eq!(item["spec"]["containers"][0]["name"], "main", "{list}");
    assert!(item["spec"]["containers"][0]["image"].as_str().is_some_and(|i| !i.is_empty()), "{list}");

    check_container_metrics(&agent, &name).await;

    agent.remove_manifest("burner.yaml").unwrap();
    let gone = eventually(LIMIT, "a deleted pod is not in the statistics", async || {
        let reported = get_json(&summary).await;
        let metrics = get_ok(&format!("{api}/metrics/resource")).await;
        let list = get_json(&format!("{api}/runningpods/")).await;
        reported["pods"] == json!([]) && !metrics.contains("burner") && list["items"].is_null()
    });
    gone.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}

/// The pod has one container with the CPU quota and the memory limit; the pod's numbers include its sandbox.
fn check_pod_summary(pod: &Value) {
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{pod:#}"));
    let main = &pod["containers"][0];
    assert_eq!((&main["name"], pod["containers"].as_array().unwrap().len()), (&"main".into(), 1), "{pod:#}");
    for of in [main, pod] {
        assert!(of["startTime"].as_str().is_some_and(|time| time.ends_with('Z')), "{pod:#}");
        assert!(number(&of["cpu"]["usageCoreNanoSeconds"]) > 50_000_000, "{pod:#}");
        // A quota applies over many periods; half as much again is beyond all of them.
        assert!(number(&of["cpu"]["usageNanoCores"]) < CPU_MILLI * 1_500_000, "{pod:#}");
        let memory = &of["memory"];
        let working_set = number(&memory["workingSetBytes"]);
        assert!(working_set >= 8 << 20 && working_set <= number(&memory["usageBytes"]), "{pod:#}");
        assert_eq!(number(&memory["availableBytes"]), MEMORY - working_set, "{pod:#}");
        assert!(number(&memory["rssBytes"]) <= MEMORY && number(&memory["pageFaults"]) > 0, "{pod:#}");
    }
    assert!(number(&pod["process_stats"]["process_count"]) >= 2, "{pod:#}");
}

/// The value of a pod's `series` in `text`, by pod, container and further labels.
fn pod_sample(text: &str, pod: &str, (name, container, own): (&str, &str, &str)) -> f64 {
    let begin = format!("{name}{{container=\"{container}\",");
    let pod_sample = format!("namespace=\"default\",pod=\"{pod}\"");
    let fits = |line: &&str| line.starts_with(&begin) && line.contains(&pod_sample) && line.contains(own);
    let line = text.lines().find(fits).unwrap_or_else(|| panic!("no {begin} {own}: {text}"));
    line.split("} ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
}

/// The series of common dashboards, with the limits of the container and its pod.
async fn check_container_metrics(agent: &Agent, pod: &str) {
    let url = format!("{}/metrics/cadvisor", agent.api_url());
    let mut text = String::new();
    // It is throttled; how soon that shows depends on the load of the machine.
    let throttled = eventually(LIMIT, "the container is throttled", async || {
        text = get_ok(&url).await;
        pod_sample(&text, pod, ("container_cpu_cfs_throttled_periods_total", "main", "")) > 0.0
    });
    throttled.await.unwrap();
    let value = |name: &str, container: &str, own: &str| pod_sample(&text, pod, (name, container, own));
    assert!(value("container_cpu_usage_seconds_total", "main", "cpu=\"total\"") > 0.05);
    assert!(value("container_memory_working_set_bytes", "main", "") >= 8_388_608.0);
    assert_eq!(value("container_spec_memory_limit_bytes", "main", "") as u64, MEMORY);
    let (quota, period) =
        (value("container_spec_cpu_quota", "main", ""), value("container_spec_cpu_period", "main", ""));
    assert_eq!((quota / period * 1000.0).round() as u64, CPU_MILLI);
    assert!(value("container_network_receive_bytes_total", "", "interface=\"eth0\"") >= 0.0);
    assert!(value("container_threads", "main", "") >= 1.0);
    assert!(
        text.contains("\nmachine_cpu_cores{") && text.ends_with("\ncontainer_scrape_error 0\n"),
        "{text}"
    );
}

/// The interface statistics of the pod, compared with what its process sees.
async fn check_network_statistics(agent: &Agent, pod: &Value, container: &str) {
    let network = &pod["network"];
    assert_eq!(
        (&network["name"], &network["interfaces"][0]["name"]),
        (&"eth0".into(), &"eth0".into()),
        "{pod:#}"
    );
    let pid = running(agent).await.unwrap()[container].pid;
    let seen = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
    let line = seen.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    let received: u64 = line.split_whitespace().next().unwrap().parse().unwrap();
    assert!(network["rxBytes"].as_u64().is_some_and(|reported| reported <= received), "{network} {line}");
}

fn check_node_summary(node: &Value, name: &str) {
    assert_eq!(node["nodeName"], name);
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{node:#}"));
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total =
        meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")).unwrap();
    let total = total.trim().parse::<u64>().unwrap() * 1024;
    let memory = &node["memory"];
    assert_eq!(number(&memory["availableBytes"]) + number(&memory["workingSetBytes"]), total, "{node:#}");
    assert!(number(&node["cpu"]["usageNanoCores"]) > 0, "{node:#}");
    assert_eq!(node["systemContainers"][0]["name"], "pods");
    assert!(number(&node["systemContainers"][0]["memory"]["workingSetBytes"]) >= 8 << 20, "{node:#}");
    assert!(number(&node["fs"]["capacityBytes"]) > number(&node["fs"]["usedBytes"]), "{node:#}");
    let images = &node["runtime"]["imageFs"];
    // The runtime measures the size of images from time to time.
    assert!(number(&images["capacityBytes"]) > number(&images["usedBytes"]), "{node:#}");
    assert!(number(&node["rlimit"]["curproc"]) > 0 && number(&node["rlimit"]["maxpid"]) > 0, "{node:#}");
}

/// The value of a sample by its name and labels.
fn sample(text: &str, series: &str) -> f64 {
    let found = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    let value = found.unwrap_or_else(|| panic!("no {series} in {text}"));
    value.split(' ').next().unwrap().parse().unwrap()
}

async fn check_resource_metrics(api: &str, pod: &str) {
    let url = format!("{api}/metrics/resource");
    let labels = format!("container=\"main\",namespace=\"default\",pod=\"{pod}\"");
    let cpu = format!("container_cpu_usage_seconds_total{{{labels}}}");
    let first = get_ok(&url).await;
    assert_eq!(sample(&first, "resource_scrape_error"), 0.0);
    assert!(sample(&first, "node_cpu_usage_seconds_total") > sample(&first, &cpu), "{first}");
    let working_set = sample(&first, &format!("container_memory_working_set_bytes{{{labels}}}"));
    assert!(working_set >= f64::from(8 << 20) && working_set <= MEMORY as f64, "{first}");
    assert!(sample(&first, &format!("container_start_time_seconds{{{labels}}}")) > 1.6e9, "{first}");
    let more = eventually(LIMIT, "the counter goes up", async || {
        sample(&get_ok(&url).await, &cpu) > sample(&first, &cpu)
    });
    more.await.unwrap();
}

#[tokio::test]
async fn the_effective_configuration_is_shown_with_its_origin_and_without_secrets() {
    let scratch = Scratch::new().unwrap();
    let builder = Agent::builder(scratch.path()).configure(|spec| {
        spec.kubelet.insert("maxPods".into(), 42.into());
        spec.kubelet.insert("syncFrequency".into(), "90s".into());
        spec.kubelet.insert("staticPodURLHeader".into(), json!({"Authorization": ["Bearer hidden-word"]}));
    });
    let agent = builder.start().await.unwrap();
    let text = get_ok(&format!("{}/configz", agent.api_url())).await;
    let shown: Value = serde_json::from_str(&text).unwrap();
    let shown = &shown["kubeletconfig"];
    assert_eq!(shown["kind"], "KubeletConfiguration", "{shown:#}");
    assert_eq!(shown["apiVersion"], "kubelet.config.k8s.io/v1beta1");
    assert_eq!((&shown["maxPods"], &shown["syncFrequency"]), (&42.into(), &"1m30s".into()), "{shown:#}");
    assert_eq!((&shown["eventBurst"], &shown["cpuCFSQuota"]), (&100.into(), &true.into()), "{shown:#}");
    let given: Value = serde_json::from_slice(&std::fs::read(agent.spec().kubelet_file()).unwrap()).unwrap();
    for field in
        ["port", "healthzPort", "cgroupRoot", "containerRuntimeEndpoint", "podLogsDir", "staticPodPath"]
    {
        if !given[field].is_null() {
            assert_eq!(shown[field], given[field], "{field}: {shown:#}");
        }
    }
    assert_eq!(shown["staticPodURLHeader"], json!({"Authorization": ["<masked>"]}));
    let file = std::fs::read_to_string(agent.spec().run_dir.join("config.json")).unwrap();
    for place in [&text, &file, &agent.log()] {
        assert!(!place.contains("hidden-word"), "{place}");
    }
    agent.end().unwrap();
}
