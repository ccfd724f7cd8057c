//! The iptables chains across kills of the service, in a network namespace of the test's thread.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_imports, reason = "only its directories and cgroups are used here")]
mod support;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::thread::{UnshareFlags, unshare_unsafe};
use support::World;

const INSTALL: &str = "install it with: apt-get install -y iptables";

/// The service as a process in the network namespace of this thread, with the machine's tunables read-only.
struct Service(Child);

impl Service {
    fn start(world: &World) -> Self {
        const ENTER: &str =
            "mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys && exec \"$@\"";
        let file = world.config.paths.config_file();
        keelson_service_kit::store_config(&file, &world.config, Default::default()).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--", "sh", "-c", ENTER, "enter"]);
        command.arg(env!("CARGO_BIN_EXE_keelson-resource-manager")).arg("--config").arg(file);
        Self(command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Reads its log until the chains of both families exist.
    fn wait_for_chains(&mut self) {
        let lines = BufReader::new(self.0.stderr.take().unwrap()).lines();
        let (mut seen, mut families) = (Vec::new(), 0);
        for line in lines.map_while(Result::ok) {
            families += usize::from(line.contains("iptables_chains_"));
            seen.push(line);
            if families == 2 {
                return;
            }
        }
        panic!("the service has exited without its chains:\n{}", seen.join("\n"));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The rules of a table; none where the listed chain does not exist.
fn shown(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(["-w", "5"]).args(arguments).output().expect(INSTALL);
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

fn all() -> Vec<String> {
    let mut all = Vec::new();
    for program in ["iptables", "ip6tables"] {
        for table in ["mangle", "nat", "filter"] {
            let text = shown(program, &["-t", table, "-S"]).unwrap();
            let mut lines: Vec<String> =
                text.lines().map(|line| format!("{program} {table} {line}")).collect();
            lines.sort();
            all.extend(lines);
        }
    }
    all
}

#[test]
fn iptables_chains_survive_restarts_without_duplicates() {
    // SAFETY: this thread stops sharing only its network namespace with the other threads.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("run this as root: it makes a network namespace");
    let mut world = World::new();
    world.config.manage_host = true;
    let wanted = |all: &[String], what: &str| all.iter().filter(|line| line.ends_with(what)).count();

    // Kill it in the middle of its work: the first chain exists, the last one is not checked yet.
    let mut service = Service::start(&world);
    while shown("iptables", &["-t", "filter", "-S", "KUBE-FIREWALL"]).is_none() {
        assert_eq!(service.0.try_wait().unwrap(), None, "the service has exited without any chain");
    }
    drop(service);

    let mut service = Service::start(&world);
    service.wait_for_chains();
    let first = all();
    for (what, count) in [
        ("-N KUBE-IPTABLES-HINT", 2),
        ("-N KUBE-KUBELET-CANARY", 6),
        ("-N KUBE-FIREWALL", 1),
        ("-A INPUT -j KUBE-FIREWALL", 1),
        ("-A OUTPUT -j KUBE-FIREWALL", 1),
        ("-j DROP", 1),
    ] {
        assert_eq!(wanted(&first, what), count, "{what}: {first:#?}");
    }
    for _ in 0..2 {
        drop(service);
        assert_eq!(all(), first, "the chains stay without the service");
        service = Service::start(&world);
        service.wait_for_chains();
        assert_eq!(all(), first);
    }
}
