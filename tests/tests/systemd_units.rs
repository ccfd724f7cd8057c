//! The units of deploy/systemd as systemd itself verifies them, without running them.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use keelson_config::ServiceName;
use keelson_testkit::{Component, Scratch, built_binaries, find_file};

/// The highest allowed exposure of a service, in tenths of what `systemd-analyze security` shows, and a reason where it is more
/// than 30; deploy/systemd/README.md has the same numbers with more words.
const EXPOSURE: [(&str, u32, &str); 9] = [
    ("keelson-pod-config.service", 20, ""),
    ("keelson-pod-sync.service", 16, ""),
    ("keelson-node-status.service", 16, ""),
    ("keelson-node-api.service", 16, ""),
    ("keelson-runtime-shim.service", 29, ""),
    (
        "keelson-resource-manager.service",
        41,
        "writes cgroups, tunables, oom scores and chains in iptables, looks at pods' processes",
    ),
    ("keelson-volume-manager.service", 51, "mounts for the machine, in the machine's mount namespace"),
    (
        "keelson-config.service",
        51,
        "makes folders of others, shares the mounts below the root folder, and ends",
    ),
    ("kubelet.service", 96, "starts the services and takes from each what it does not need itself"),
];

/// The limits for services without root, and for those with root where they can meet it.
const DEFAULT_LIMIT: u32 = 30;

fn deployed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd")
}

/// The unit files, by name.
fn units() -> Vec<(String, String)> {
    let is_unit =
        |name: &str| [".service", ".slice", ".target", ".path"].iter().any(|ending| name.ends_with(ending));
    let mut units: Vec<(String, String)> = fs::read_dir(deployed())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| is_unit(entry.file_name().to_str().unwrap()))
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read_to_string(entry.path()).unwrap()))
        .collect();
    units.sort();
    units
}

/// The units with the binaries of this build in place of installed ones, followed by systemd's own units.
struct Installed {
    scratch: Scratch,
    analyze: PathBuf,
}

impl Installed {
    fn new() -> Self {
        Component::Systemd.find().unwrap();
        let scratch = Scratch::new().unwrap();
        let binaries = built_binaries().unwrap();
        symlink(binaries.join("keelson-init"), scratch.path().join("kubelet")).unwrap();
        for (name, text) in units() {
            let text = text.replace("/usr/libexec/keelson", binaries.to_str().unwrap());
            let text = text.replace("/usr/bin/kubelet", scratch.path().join("kubelet").to_str().unwrap());
            fs::write(scratch.path().join(name), text).unwrap();
        }
        Self { scratch, analyze: find_file("systemd-analyze").unwrap() }
    }

    fn analyze(&self, arguments: &[&str], units: &[&str]) -> Output {
        let folder = self.scratch.path();
        let mut command = Command::new(&self.analyze);
        // A colon at the end: the default folders follow (systemd(1)).
        command.env("SYSTEMD_UNIT_PATH", format!("{}:", folder.display())).args(arguments);
        command.args(units.iter().map(|unit| folder.join(unit))).output().unwrap()
    }
}

#[test]
fn systemd_analyze_verify_accepts_every_unit() {
    let installed = Installed::new();
    let units = units();
    let names: Vec<&str> = units.iter().map(|(name, _)| name.as_str()).collect();
    let output = installed.analyze(&["verify", "--man=no"], &names);
    let stderr = String::from_utf8_lossy(&output.stderr);
    // Unknown directives are only mentioned on stderr.
    let ours: Vec<&str> =
        stderr.lines().filter(|line| names.iter().any(|name| line.contains(name))).collect();
    assert!(output.status.success() && ours.is_empty(), "{stderr}");

    fs::write(installed.scratch.path().join("keelson-pod-sync.service"), "[Service]\nExecStat=/bin/true\n")
        .unwrap();
    let output = installed.analyze(&["verify", "--man=no"], &["keelson-pod-sync.service"]);
    assert!(!output.status.success(), "a broken one is found");
}

#[test]
fn no_unit_exceeds_its_security_exposure_limit() {
    let installed = Installed::new();
    let mut judged: Vec<&str> = EXPOSURE.iter().map(|(unit, ..)| *unit).collect();
    judged.sort_unstable();
    let units = units();
    let services: Vec<&str> =
        units.iter().map(|(name, _)| name.as_str()).filter(|name| name.ends_with(".service")).collect();
    assert_eq!(judged, services);
    for (unit, stated, reason) in EXPOSURE {
        assert_eq!(stated > DEFAULT_LIMIT, !reason.is_empty(), "{unit}");
        let within = |threshold: u32| {
            let threshold = format!("--threshold={threshold}");
            let output =
                installed.analyze(&["security", "--offline=true", "--no-pager", &threshold], &[unit]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            (output.status.success(), text)
        };
        let (good, text) = within(stated);
        assert!(good, "{unit} is more exposed than {stated}:\n{text}");
        // The limit is as low as possible.
        assert!(!within(stated - 1).0, "{unit} is less exposed than {stated}: state it");
    }
    for service in ServiceName::supervised().filter(|service| !service.needs_root()) {
        let unit = format!("keelson-{service}.service");
        let stated = EXPOSURE.iter().find(|(name, ..)| *name == unit).unwrap().1;
        assert!(stated <= DEFAULT_LIMIT, "{unit}");
    }
}

#[test]
fn the_docs_give_the_exposure_of_each_unit() {
    let read = |path: &str| fs::read_to_string(deployed().join(path)).unwrap();
    let table = read("README.md");
    let table = table.split("## Exposure").nth(1).unwrap();
    let page = read("../../docs/systemd.md").replace('`', "");
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let usual = "Services without root: 1.6,";
    for (unit, stated, _) in EXPOSURE {
        let name = unit.trim_start_matches("keelson-").trim_end_matches(".service");
        let names_it = |cell: &str| cell.split([' ', ',', '`']).any(|word| word == name || word == unit);
        let rows = table.lines().map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
        let row = rows.filter(|row| row.len() > 2).find(|row| names_it(row[1]));
        assert_eq!(row.map(|row| row[2].to_owned()), Some(stated.to_string()), "README.md: {unit}");
        let shown = format!("{}.{}", stated / 10, stated % 10);
        let documented =
            ["", "keelson-"].iter().any(|before| page.contains(&format!(" {before}{name} {shown}")))
                || page.contains(&format!("{unit} {shown}"))
                || (shown == "1.6" && page.contains(usual));
        assert!(documented, "docs/systemd.md does not say that {unit} has {shown}");
    }
}

#[test]
fn no_unit_waits_for_another_and_each_is_restarted() {
    let units = units();
    let of =
        |name: &str| &units.iter().find(|(unit, _)| unit == name).unwrap_or_else(|| panic!("no {name}")).1;
    let values = |unit: &str, key: &str| -> Vec<String> {
        let lines = of(unit).lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        lines.flat_map(str::split_whitespace).map(ToOwned::to_owned).collect()
    };
    let wanted = values("keelson.target", "Wants");
    let started = values("keelson-config.service", "OnSuccess");
    let conflicting = values("kubelet.service", "Conflicts");
    assert_eq!(values("keelson-config.service", "PartOf"), ["keelson.target"]);
    for service in ServiceName::supervised() {
        let unit = format!("keelson-{service}.service");
        assert_eq!(values(&unit, "After"), ["keelson-config.service"], "{unit}");
        for key in ["Before", "Requires", "Requisite", "Wants", "BindsTo", "Upholds", "JoinsNamespaceOf"] {
            assert!(values(&unit, key).is_empty(), "{unit}: {key}");
        }
        let expected = [
            ("Type", "notify"),
            ("PartOf", "keelson.target"),
            ("Slice", "keelson.slice"),
            ("Restart", "always"),
            ("RestartPreventExitStatus", "64 78"),
            ("WatchdogSec", "30"),
            ("WatchdogSignal", "SIGKILL"),
            ("OOMScoreAdjust", "-999"),
            ("StartLimitIntervalSec", "0"),
            ("ConditionPathExists", "/run/keelson/without-init"),
        ];
        let groups = if service.needs_root() {
            [("Group", "root"), ("SupplementaryGroups", "keelson")]
        } else {
            [("Group", "keelson"), ("SupplementaryGroups", "")]
        };
        for (key, value) in expected.into_iter().chain(groups) {
            assert_eq!(values(&unit, key).join(" "), value, "{unit}: {key}");
        }
        for list in [&wanted, &started, &conflicting] {
            assert!(list.contains(&unit), "{unit}");
        }
    }
    // Settings that give a service its own mount namespace (systemd.exec(5)).
    let isolating = [
        "ProtectS",
        "ProtectHome",
        "ProtectP",
        "ProtectK",
        "ProtectControlGroups",
        "Private",
        "ReadW",
        "Root",
    ];
    let text = of("keelson-volume-manager.service");
    let settings = text.lines().filter(|line| !line.starts_with('#'));
    let out: Vec<&str> = settings.filter(|line| isolating.iter().any(|key| line.starts_with(key))).collect();
    assert!(out.is_empty() && !text.contains("\nMemoryMax="), "{out:?}");
}

#[test]
fn writable_paths_below_run_exist_before_any_service_starts() {
    let scratch = Scratch::new().unwrap();
    Component::Systemd.find().unwrap();
    let output = Command::new(find_file("systemd-tmpfiles").unwrap())
        .arg(format!("--root={}", scratch.path().display()))
        .arg("--create")
        .arg(deployed().join("tmpfiles.d/keelson.conf").canonicalize().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let units = units();
    let paths = units
        .iter()
        .flat_map(|(_, text)| text.lines())
        .filter_map(|line| line.strip_prefix("ReadWritePaths="))
        .flat_map(str::split_whitespace)
        .map(|path| path.trim_start_matches('-'))
        .filter(|path| path.starts_with("/run/") && !path.starts_with("/run/keelson/"));
    let found: Vec<&str> = paths.collect();
    assert_eq!(found, ["/run/xtables.lock"]);
    for path in found {
        let meta = fs::metadata(scratch.path().join(path.trim_start_matches('/'))).unwrap();
        assert_eq!((meta.is_file(), meta.mode() & 0o777, meta.uid()), (true, 0o600, 0), "{path}");
    }
}

#[test]
fn every_documented_folder_of_keys_is_watched() {
    let units = units();
    let (_, text) = units.iter().find(|(name, _)| name == "keelson-config.path").unwrap();
    let watched: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("PathChanged=")).collect();
    let page = fs::read_to_string(deployed().join("../../docs/fleet.md")).unwrap();
    let of_files = page.split([' ', '`', '}', '\n']).filter(|word| word.starts_with("/etc/keelson/"));
    let folders: Vec<&str> = of_files.filter_map(|path| Path::new(path).parent()?.to_str()).collect();
    assert!(folders.contains(&"/etc/keelson/pki"), "{folders:?}");
    assert!(folders.iter().all(|folder| watched.contains(folder)), "{folders:?} {watched:?}");
}

#[test]
fn unit_users_match_the_configuration() {
    let scratch = Scratch::new().unwrap();
    fs::create_dir(scratch.path().join("etc")).unwrap();
    Component::Systemd.find().unwrap();
    let output = Command::new(find_file("systemd-sysusers").unwrap())
        .arg(format!("--root={}", scratch.path().display()))
        .arg(deployed().join("sysusers.d/keelson.conf").canonicalize().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |name: &str| fs::read_to_string(scratch.path().join("etc").join(name)).unwrap();
    let group = read("group");
    let gid = group.lines().find_map(|line| line.strip_prefix("keelson:")?.split(':').nth(1)).unwrap();
    let passwd = read("passwd");
    let mut found: Vec<&str> = passwd
        .lines()
        .filter(|line| line.split(':').nth(3) == Some(gid) && line.ends_with("nologin"))
        .filter_map(|line| line.split(':').next()?.strip_prefix("keelson-"))
        .collect();
    found.sort_unstable();
    let mut wanted: Vec<&str> =
        ServiceName::supervised().filter(|s| !s.needs_root()).map(ServiceName::as_str).collect();
    wanted.sort_unstable();
    assert_eq!(found, wanted);
}
