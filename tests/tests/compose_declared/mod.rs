//! The settings that compose.yaml declares for each container, and checks that Docker and the kernel have them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_testkit::has_cap_sys_resource;
use keelson_testkit::process;
use serde_json::Value;

/// The expected settings of a container.
struct Declared {
    /// Its first process.
    program: &'static str,
    uid: u32,
    gid: u32,
    capabilities: &'static [(&'static str, u32)],
    /// Whether it may gain privileges.
    may_gain: bool,
    sees_all_processes: bool,
    sees_all_cgroups: bool,
    network: Network,
    /// Docker's filters that are off.
    unconfined: &'static [&'static str],
    /// Mounted folders, with the same path inside and outside, and their options.
    devices: &'static [(&'static str, &'static str)],
}

/// The network of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Network {
    /// Nothing.
    None,
    /// Its own, in the network of compose.
    Composes,
    /// The network of its node.
    OfItsNode,
}

const OPERATORS: u32 = 64_200;
/// Numbers of linux/capability.h.
const CHOWN: (&str, u32) = ("CHOWN", 0);
const DAC_OVERRIDE: (&str, u32) = ("DAC_OVERRIDE", 1);
const DAC_READ_SEARCH: (&str, u32) = ("DAC_READ_SEARCH", 2);
const FOWNER: (&str, u32) = ("FOWNER", 3);
const FSETID: (&str, u32) = ("FSETID", 4);
const KILL: (&str, u32) = ("KILL", 5);
const SETGID: (&str, u32) = ("SETGID", 6);
const SETUID: (&str, u32) = ("SETUID", 7);
const SETPCAP: (&str, u32) = ("SETPCAP", 8);
const NET_BIND_SERVICE: (&str, u32) = ("NET_BIND_SERVICE", 10);
const NET_ADMIN: (&str, u32) = ("NET_ADMIN", 12);
const NET_RAW: (&str, u32) = ("NET_RAW", 13);
const SYS_CHROOT: (&str, u32) = ("SYS_CHROOT", 18);
const SYS_PTRACE: (&str, u32) = ("SYS_PTRACE", 19);
const SYS_ADMIN: (&str, u32) = ("SYS_ADMIN", 21);
const SYS_RESOURCE: (&str, u32) = ("SYS_RESOURCE", 24);
const MKNOD: (&str, u32) = ("MKNOD", 27);
const AUDIT_WRITE: (&str, u32) = ("AUDIT_WRITE", 29);
const SETFCAP: (&str, u32) = ("SETFCAP", 31);
const SYSLOG: (&str, u32) = ("SYSLOG", 34);

type Capabilities = &'static [(&'static str, u32)];

const OF_RUNTIME_SHIM: Capabilities = &[CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID];
const OF_VOLUME_MANAGER: Capabilities =
    &[CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, SYS_ADMIN, SYS_RESOURCE, MKNOD];
const OF_RESOURCE_MANAGER: Capabilities = &[
    CHOWN,
    DAC_OVERRIDE,
    DAC_READ_SEARCH,
    FOWNER,
    KILL,
    SYS_PTRACE,
    SYS_RESOURCE,
    NET_ADMIN,
    NET_RAW,
    SYSLOG,
];
const OF_CONTAINERD: Capabilities = &[
    CHOWN,
    DAC_OVERRIDE,
    DAC_READ_SEARCH,
    FOWNER,
    FSETID,
    KILL,
    SETGID,
    SETUID,
    SETPCAP,
    SETFCAP,
    NET_BIND_SERVICE,
    NET_RAW,
    NET_ADMIN,
    SYS_CHROOT,
    SYS_PTRACE,
    SYS_ADMIN,
    SYS_RESOURCE,
    MKNOD,
    AUDIT_WRITE,
];
const OF_INIT: Capabilities = &[CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID];

/// A program without capabilities in the network of its node.
fn program(program: &'static str, uid: u32, gid: u32) -> Declared {
    Declared {
        program,
        uid,
        gid,
        capabilities: &[],
        may_gain: false,
        sees_all_processes: false,
        sees_all_cgroups: false,
        network: Network::OfItsNode,
        unconfined: &[],
        devices: &[],
    }
}

/// A service with its own user. Like each service it sees the processes of the machine, to identify its callers.
fn service(name: &'static str, uid: u32) -> Declared {
    Declared { sees_all_processes: true, ..program(name, uid, OPERATORS) }
}

/// A service that runs as root.
fn root_service(name: &'static str, capabilities: Capabilities) -> Declared {
    Declared { capabilities, sees_all_processes: true, ..program(name, 0, 0) }
}

/// The name of a container in compose.yaml without the number of its node, and the node.
fn kind_and_node(container: &str) -> (&str, Option<&'static str>) {
    for (suffix, node) in [("-1", "node-1"), ("-2", "node-2")] {
        if let Some(kind) = container.strip_suffix(suffix) {
            return (kind, Some(node));
        }
    }
    (container, None)
}

/// The settings of a container by its name in compose.yaml without the number.
fn declared(kind: &str) -> Declared {
    let composes = |declared| Declared { network: Network::Composes, ..declared };
    match kind {
        "etcd" => composes(program("etcd", 64_250, 64_250)),
        "node" => composes(program("sleep", 65_534, 65_534)),
        "prepare" | "config" => {
            let init = program("keelson-init", 0, 0);
            Declared { capabilities: OF_INIT, network: Network::None, ..init }
        }
        "images" => Declared { network: Network::None, ..program("ctr", 0, 0) },
        "pod-config" => composes(service("keelson-pod-config", 64_201)),
        "pod-sync" => service("keelson-pod-sync", 64_205),
        "node-status" => service("keelson-node-status", 64_206),
        "node-api" => service("keelson-node-api", 64_207),
        "runtime-shim" => {
            Declared { sees_all_cgroups: true, ..root_service("keelson-runtime-shim", OF_RUNTIME_SHIM) }
        }
        "volume-manager" => Declared {
            network: Network::None,
            unconfined: &["apparmor"],
            ..root_service("keelson-volume-manager", OF_VOLUME_MANAGER)
        },
        "resource-manager" => Declared {
            sees_all_cgroups: true,
            unconfined: &["apparmor"],
            devices: &[("/dev/kmsg", "r")],
            ..root_service("keelson-resource-manager", OF_RESOURCE_MANAGER)
        },
        "containerd" => Declared {
            may_gain: true,
            sees_all_cgroups: true,
            unconfined: &["seccomp", "apparmor"],
            ..root_service("containerd", OF_CONTAINERD)
        },
        other => panic!("compose.yaml has a container that nobody declared: {other}"),
    }
}

impl Declared {
    /// The capabilities as far as this machine can give them.
    fn capabilities(&self) -> impl Iterator<Item = &'static (&'static str, u32)> {
        self.capabilities.iter().filter(|capability| **capability != SYS_RESOURCE || has_cap_sys_resource())
    }

    fn bits(&self) -> u64 {
        self.capabilities().fold(0, |bits, (_, number)| bits | 1 << number)
    }

    /// The security options as Docker shows them, in a normalized form.
    fn security(&self) -> BTreeSet<String> {
        let own = (!self.may_gain).then(|| "no-new-privileges".to_owned());
        self.unconfined.iter().map(|filter| format!("{filter}:unconfined")).chain(own).collect()
    }
}

/// Checks Docker's settings of one of `all` containers, running or ended.
pub fn check_settings(name: &str, all: &BTreeMap<String, Value>, home: &Path) {
    let (container, (kind, node)) = (&all[name], kind_and_node(name));
    let (declared, host) = (declared(kind), &container["HostConfig"]);
    assert_eq!(host["Privileged"], false, "{name}");
    assert_eq!(host["ReadonlyRootfs"], true, "{name}");
    assert_eq!(host["CapDrop"].to_string(), "[\"ALL\"]", "{name}");
    assert_eq!(host["PidMode"] == "host", declared.sees_all_processes, "{name}");
    let list = |key: &str| host[key].as_array().into_iter().flatten();
    let texts = |key: &str| list(key).filter_map(Value::as_str);
    let asked: BTreeSet<&str> = texts("CapAdd").map(|name| name.trim_start_matches("CAP_")).collect();
    assert_eq!(asked, declared.capabilities().map(|(name, _)| *name).collect(), "{name}");

    let plain = |option: &str| option.replace('=', ":").trim_end_matches(":true").to_owned();
    // Docker itself adds a label to containers that see the machine's processes.
    let security: BTreeSet<String> =
        texts("SecurityOpt").map(plain).filter(|option| option != "label:disable").collect();
    assert_eq!(security, declared.security(), "{name}");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let devices: Vec<[String; 3]> = list("Devices")
        .map(|device| ["PathOnHost", "PathInContainer", "CgroupPermissions"].map(|key| text(&device[key])))
        .collect();
    let wanted = |(path, rights): &(&str, &str)| [*path, *path, *rights].map(str::to_owned);
    assert_eq!(devices, declared.devices.iter().map(wanted).collect::<Vec<_>>(), "{name}");
    let network = match (declared.network, node) {
        (Network::None, _) => "none".to_owned(),
        (Network::OfItsNode, Some(node)) => format!("container:{}", text(&all[node]["Id"])),
        _ => format!("{}_default", text(&container["Config"]["Labels"]["com.docker.compose.project"])),
    };
    assert_eq!(text(&host["NetworkMode"]), network, "{name}");
    check_mounts(name, container, home);
}

/// A container has only the files of its own node, the socket folders only of itself and the services that it calls,
/// and the cgroups only if it must see them.
fn check_mounts(name: &str, container: &Value, home: &Path) {
    let (kind, node) = kind_and_node(name);
    let (mut found, mut sees_all_cgroups) = (BTreeSet::new(), false);
    let mounts = container["Mounts"].as_array().into_iter().flatten();
    for mount in mounts.filter(|mount| mount["Type"] == "bind") {
        let path = |key: &str| PathBuf::from(mount[key].as_str().unwrap());
        let (source, inside) = (path("Source"), path("Destination"));
        let own = node.map(|node| home.join(node));
        if source == Path::new("/sys/fs/cgroup") {
            sees_all_cgroups = true;
        } else if let Some(below) = own.as_ref().and_then(|own| source.strip_prefix(own.join("run")).ok()) {
            assert_eq!(inside, Path::new("/run/keelson").join(below), "{name}");
            found.insert((below.display().to_string(), mount["RW"] == true));
        } else if !own.is_some_and(|own| source.starts_with(own)) {
            let is_configuration = source.parent().is_some_and(|folder| folder.ends_with("deploy/compose"));
            assert!(is_configuration && mount["RW"] == false, "{name} has {source:?} of the machine");
        }
    }
    assert_eq!(sees_all_cgroups, declared(kind).sees_all_cgroups, "{name}");
    let wanted = match (kind, kind.parse::<ServiceName>()) {
        ("prepare" | "config", _) => BTreeSet::from([(String::new(), true)]),
        (_, Ok(service)) => below_the_run_folder(service),
        _ => BTreeSet::new(),
    };
    assert_eq!(found, wanted, "{name}");
}

/// The mounts of a service below the run dir of its node, and whether they are writable (architecture §2).
fn below_the_run_folder(service: ServiceName) -> BTreeSet<(String, bool)> {
    let more = match service {
        ServiceName::PodConfig | ServiceName::RuntimeShim | ServiceName::NodeStatus => {
            Some(format!("credentials/{service}"))
        }
        ServiceName::NodeApi => Some("flags.json".to_owned()),
        _ => None,
    };
    let called = service.callees().iter().map(ToString::to_string);
    let read = called.chain(more).chain(["config.json".to_owned()]).map(|path| (path, false));
    read.chain([(service.to_string(), true)]).collect()
}

/// The first process of a running container.
pub fn main_pid(container: &Value) -> u32 {
    container["State"]["Pid"].as_u64().and_then(|pid| pid.try_into().ok()).unwrap()
}

/// A line of `/proc/<pid>/status`.
fn status_line(pid: u32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim().to_owned()
}

/// A namespace of a process; `None` where the kernel has none of the kind.
fn namespace(pid: u32, kind: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()
}

/// Checks what the kernel has for the first process of one of `all` containers, and that it is the only one.
pub fn check_process(name: &str, all: &BTreeMap<String, Value>) {
    let (kind, node) = kind_and_node(name);
    let (declared, pid) = (declared(kind), main_pid(&all[name]));
    let process = process::read(pid).unwrap();
    assert_eq!(process.exe_name().as_deref(), Some(declared.program), "{name}");
    for ids in [("Uid", declared.uid), ("Gid", declared.gid)] {
        let id = ids.1.to_string();
        let line = status_line(pid, ids.0);
        assert!(line.split_whitespace().all(|found| found == id), "{name}: {} {line}", ids.0);
    }
    for set in ["CapEff", "CapPrm", "CapBnd"] {
        let found = u64::from_str_radix(&status_line(pid, set), 16).unwrap();
        assert_eq!(found, declared.bits(), "{name}: {set} {found:x}");
    }
    assert_eq!(status_line(pid, "NoNewPrivs"), if declared.may_gain { "0" } else { "1" }, "{name}");
    if !declared.sees_all_processes {
        assert_eq!(status_line(pid, "NSpid").split_whitespace().last(), Some("1"), "{name}");
    }
    let of_machine = |kind: &str| namespace(pid, kind) == namespace(std::process::id(), kind);
    assert_eq!(of_machine("pid"), declared.sees_all_processes, "{name}");
    assert!(!of_machine("net") && !of_machine("mnt"), "{name}");
    if declared.sees_all_cgroups {
        assert!(of_machine("cgroup"), "{name}");
    }
    let of_node = node.map(|node| namespace(main_pid(&all[node]), "net"));
    let is_of_node = of_node.is_some_and(|net| net == namespace(pid, "net"));
    assert_eq!(is_of_node, declared.network == Network::OfItsNode || kind == "node", "{name}");
    assert_only_process(name, &all[name], pid);
}

/// No other process runs in a container; health checks come and go as children of Docker, not of the first process.
fn assert_only_process(name: &str, container: &Value, pid: u32) {
    let id = container["Id"].as_str().unwrap();
    let inside = |process: &process::Process| {
        let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", process.id.pid));
        cgroups.is_ok_and(|text| text.contains(id))
    };
    let all = process::all();
    let children = process::descendants(&all, &[pid]);
    let living: Vec<_> = all.iter().filter(|p| inside(p) && children.contains(&p.id)).collect();
    assert!(living.is_empty(), "{name}: {living:?}");
}
