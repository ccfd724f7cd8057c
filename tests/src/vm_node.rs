//! A node in an emulated machine with systemd and cgroup v2.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::{BUSYBOX_IMAGE, Scratch, Vm, standard_images, write_archive};
use serde_json::{Value, json};

use crate::is_ready;
use crate::packages::strip_binaries;

/// Time limit of every wait in an emulated machine.
pub const LIMIT: Duration = Duration::from_secs(240);

const CONTAINERS: &str = r#"set -o pipefail
ctr -n k8s.io tasks list | while read -r id pid status; do
  if [ "$status" = RUNNING ]; then echo "$id $pid $(sed 's/.*) //' /proc/$pid/stat | cut -d ' ' -f 20)"; fi
done | sort"#;

/// The machine's `/payload`: a repository after a release build, as far as docs/systemd.md needs it.
///
/// # Panics
/// The agent is not built, or its files cannot be copied.
pub fn pack(folder: &Path) {
    strip_binaries(&folder.join("target/release"));
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    fs::create_dir_all(folder.join("deploy")).unwrap();
    let copied = Command::new("cp").arg("-r").arg(deploy.join("systemd")).arg(folder.join("deploy")).status();
    assert!(copied.unwrap().success());
}

/// The commands in the shell blocks of a section of docs/systemd.md.
///
/// # Panics
/// It has no such section.
pub fn doc_commands(title: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/systemd.md");
    let page = fs::read_to_string(page).unwrap();
    let section = page.split("\n## ").find(|section| section.starts_with(&format!("{title}\n")));
    let section = section.unwrap_or_else(|| panic!("docs/systemd.md has no section {title}"));
    let blocks = section.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    format!("set -e\ncd /payload\n{}", blocks.collect::<String>())
}

/// A container with resource requests and limits.
fn container(command: &str, requests: &Value, limits: &Value) -> Value {
    json!({
        "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", command], "resources": {"requests": requests, "limits": limits},
    })
}

fn pod(name: &str, container: &Value, volumes: &Value) -> String {
    let spec = json!({"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": volumes});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}).to_string()
}

/// A pod with an emptyDir in memory, a ConfigMap and an HTTP probe.
pub fn web() -> String {
    let limits = json!({"memory": "128Mi"});
    let mut main = container(
        "echo ok > /scratch/index.html; exec busybox httpd -f -p 8080 -h /scratch",
        &json!({"cpu": "250m", "memory": "64Mi"}),
        &limits,
    );
    main["volumeMounts"] = json!([
        {"name": "scratch", "mountPath": "/scratch"}, {"name": "conf", "mountPath": "/conf"},
    ]);
    let get = json!({"path": "/index.html", "port": 8080});
    main["readinessProbe"] = json!({"httpGet": get, "periodSeconds": 2, "timeoutSeconds": 30});
    let volumes = json!([
        {"name": "scratch", "emptyDir": {"medium": "Memory"}},
        {"name": "conf", "configMap": {"name": "greeting"}},
    ]);
    pod("web", &main, &volumes)
}

/// A pod with limits of half a core and 64 MiB.
pub fn bound() -> String {
    let both = json!({"cpu": "500m", "memory": "64Mi"});
    pod("bound", &container("exec sleep 1000000", &both, &both), &json!([]))
}

/// A machine with the agent in it.
#[derive(Debug)]
pub struct Node {
    vm: Vm,
    _scratch: Scratch,
}

impl Node {
    /// Boots a machine whose `/payload` is the folder `payload` of a scratch folder, with the images of `images.tar` there.
    ///
    /// # Panics
    /// It does not boot, or not with systemd and cgroup v2.
    pub fn boot(scratch: Scratch) -> Self {
        let payload = scratch.path().join("payload");
        write_archive(&payload.join("images.tar"), &standard_images()).unwrap();
        let mut vm = Vm::boot(&scratch.path().join("vm"), &payload).unwrap();
        assert_eq!(vm.sh("cat /proc/1/comm").unwrap().trim(), "systemd");
        assert_eq!(vm.sh("stat -f -c %T /sys/fs/cgroup").unwrap().trim(), "cgroup2fs");
        vm.sh("until ctr version > /dev/null; do sleep 0.2; done; ctr -n k8s.io images import /payload/images.tar")
            .unwrap();
        Self { vm, _scratch: scratch }
    }

    /// Runs a line of bash, which must succeed; its output.
    ///
    /// # Panics
    /// It fails; the message has the last lines of the journal.
    pub fn sh(&mut self, line: &str) -> String {
        self.vm.sh(line).unwrap_or_else(|error| {
            let journal =
                self.vm.run("journalctl -b -n 60 --no-pager -u 'keelson*' -u kubelet -u containerd");
            panic!("{error:#}\n{}", journal.map_or_else(|error| error.to_string(), |output| output.stdout))
        })
    }

    /// Waits until a line of bash succeeds.
    ///
    /// # Panics
    /// It does not within [`LIMIT`]; the message has the state of all units.
    pub fn until(&mut self, what: &str, line: &str) {
        let done = self.vm.until(what, LIMIT, line, |output| (output.code == 0).then_some(()));
        if let Err(error) = done {
            let state = self.sh(
                "systemctl list-units --all --no-pager 'keelson*' kubelet*; keelson get services || true",
            );
            let journal = self.sh("journalctl -b -n 80 --no-pager -u 'keelson*' -u kubelet -u containerd");
            panic!("{error:#}\n{state}\n{journal}");
        }
    }

    /// Writes a file.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn write(&mut self, path: &str, text: &str) {
        assert!(!text.contains("\nEND\n"));
        self.sh(&format!("cat > {path} <<'END'\n{text}\nEND"));
    }

    /// A property of a unit.
    ///
    /// # Panics
    /// systemd does not answer.
    pub fn property(&mut self, unit: &str, name: &str) -> String {
        self.sh(&format!("systemctl show --property {name} --value {unit}")).trim().to_owned()
    }

    /// The pods that the agent shows, by name; empty if it does not answer.
    ///
    /// # Panics
    /// The machine does not answer.
    pub fn pods(&mut self) -> BTreeMap<String, Value> {
        let output = self.vm.run("keelson get pods -A -o json").unwrap();
        let list: Value = serde_json::from_str(&output.stdout).unwrap_or_default();
        let items = list["items"].as_array().cloned().unwrap_or_default();
        items.into_iter().map(|pod| (pod["metadata"]["name"].as_str().unwrap().to_owned(), pod)).collect()
    }

    /// Waits until exactly these pods are Ready.
    ///
    /// # Panics
    /// They are not within [`LIMIT`].
    pub fn until_ready(&mut self, names: &[&str]) -> BTreeMap<String, Value> {
        let mut wanted: Vec<String> = names.iter().map(|name| format!("{name}-vm")).collect();
        wanted.sort();
        let deadline = Instant::now() + LIMIT;
        loop {
            let pods = self.pods();
            if pods.keys().eq(wanted.iter()) && pods.values().all(is_ready) {
                return pods;
            }
            if Instant::now() > deadline {
                let why = self.sh("keelson get services; keelson get pods -A; keelson get events || true");
                let journal =
                    self.sh("journalctl -b -n 80 --no-pager -u 'keelson*' -u kubelet -u containerd");
                panic!("{names:?} are not Ready: {pods:#?}\n{why}\n{journal}");
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Every running container with its process and start time, from the runtime and /proc alone.
    ///
    /// # Panics
    /// The runtime does not answer.
    pub fn containers(&mut self) -> String {
        self.sh(CONTAINERS)
    }

    /// The process id of a service.
    ///
    /// # Panics
    /// The unit has none.
    pub fn pid(&mut self, service: ServiceName) -> u32 {
        self.property(&format!("keelson-{service}.service"), "MainPID").parse().unwrap()
    }

    /// Waits until the unit of each service is in this state.
    ///
    /// # Panics
    /// One is not within [`LIMIT`].
    pub fn until_all_are(&mut self, state: &str) {
        for service in ServiceName::supervised() {
            let line = format!("[ $(systemctl show -P ActiveState keelson-{service}) = {state} ]");
            self.until(&format!("{service} is {state}"), &line);
        }
    }

    /// Waits until each unit has a healthy process.
    ///
    /// # Panics
    /// One does not within [`LIMIT`].
    pub fn until_healthy(&mut self) {
        for service in ServiceName::supervised() {
            self.until(
                &format!("{service} is healthy"),
                &format!(
                    "systemctl is-active --quiet keelson-{service} && runuser -u $(stat -c %U /run/keelson/{service}) -- \
                     /usr/libexec/keelson/keelson-{service} --health"
                ),
            );
        }
    }

    /// Reboots the machine.
    ///
    /// # Panics
    /// It does not come back.
    pub fn reboot(&mut self) {
        self.vm.reboot().unwrap();
    }
}
