//! The packages of `cargo xtask deb`: contents, modes, owners, conffiles, scripts, and reproducibility.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use keelson_config::KUBELET_VERSION;
use keelson_testkit::Scratch;
use keelson_tests::packages::{command_output, make_packages, strip_binaries};

const VERSION: &str = "1.2.3~test";

/// The entries of a package as `dpkg-deb --contents` shows them: mode and owner by path, links with their target.
fn contents(package: &Path) -> BTreeMap<String, String> {
    let listed = command_output(Command::new("dpkg-deb").arg("--contents").arg(package));
    let entry = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words[5..].join(" ").trim_start_matches('.').to_owned(), format!("{} {}", words[0], words[1]))
    };
    listed.lines().map(entry).collect()
}

fn field(package: &Path, name: &str) -> String {
    command_output(Command::new("dpkg-deb").arg("--field").arg(package).arg(name)).trim().to_owned()
}

#[test]
fn packages_have_the_expected_contents_and_are_reproducible() {
    let scratch = Scratch::new().unwrap();
    let binaries = scratch.path().join("bin");
    strip_binaries(&binaries);
    let first = make_packages(&binaries, &scratch.path().join("one"), VERSION, "022");
    let second = make_packages(&binaries, &scratch.path().join("two"), VERSION, "077");
    assert_eq!(first.keys().collect::<Vec<_>>(), ["keelson", "keelson-kubelet"]);
    for (name, package) in &first {
        let (one, two) = (fs::read(package).unwrap(), fs::read(&second[name]).unwrap());
        assert!(one == two, "{name} has other bytes the second time");
        assert_eq!(field(package, "Version"), VERSION);
        scripts_are_well_formed(package, &scratch.path().join(name));
    }

    let (agent, kubelet) = (contents(&first["keelson"]), contents(&first["keelson-kubelet"]));
    for (path, what) in agent.iter().chain(&kubelet) {
        let program = path.starts_with("/usr/bin/") || path.starts_with("/usr/libexec/keelson/");
        let mode = match (path.ends_with('/'), what.starts_with('l'), program) {
            (true, ..) => "drwxr-xr-x",
            (_, true, _) => "lrwxrwxrwx",
            (.., true) => "-rwxr-xr-x",
            _ => "-rw-r--r--",
        };
        assert_eq!(what, &format!("{mode} root/root"), "{path}");
    }
    assert_files(&agent, &kubelet);

    let unpacked = scratch.path().join("unpacked");
    for package in first.values() {
        command_output(Command::new("dpkg-deb").arg("--extract").arg(package).arg(&unpacked));
    }
    units_run_only_what_is_there(&unpacked);
    // Both manual pages are the same, with every flag.
    let page =
        command_output(Command::new("gzip").arg("-dc").arg(unpacked.join("usr/share/man/man8/kubelet.8.gz")));
    for flag in ["config", "kubeconfig", "keelson-config", "max-pods", "resolve-only"] {
        let option = format!("\\fB\\-\\-{}\\fR", flag.replace('-', "\\-"));
        assert!(page.contains(&option), "{option} is not in\n{page}");
    }
    let conffiles =
        command_output(Command::new("dpkg-deb").arg("--info").arg(&first["keelson"]).arg("conffiles"));
    let below_etc = agent.keys().filter(|path| path.starts_with("/etc/") && !path.ends_with('/'));
    assert_eq!(conffiles.lines().collect::<Vec<_>>(), below_etc.collect::<Vec<_>>());
    assert_relations(&first["keelson"], &first["keelson-kubelet"]);
}

/// The packages have the files that an installation needs.
fn assert_files(agent: &BTreeMap<String, String>, kubelet: &BTreeMap<String, String>) {
    for path in [
        "/etc/keelson/keelson.yaml",
        "/etc/keelson/kubelet.yaml",
        "/usr/bin/keelson",
        "/usr/lib/systemd/system/keelson.target",
        "/usr/lib/systemd/system/keelson-config.path",
        "/usr/lib/systemd/system/keelson.slice",
        "/usr/lib/sysusers.d/keelson.conf",
        "/usr/lib/tmpfiles.d/keelson.conf",
        "/usr/share/bash-completion/completions/keelson",
        "/usr/share/doc/keelson/README.Debian",
        "/usr/share/doc/keelson/changelog.gz",
        "/usr/share/doc/keelson/copyright",
        "/usr/share/fish/vendor_completions.d/keelson.fish",
        "/usr/share/man/man1/keelson.1.gz",
        "/usr/share/man/man1/keelson-get-pods.1.gz",
        "/usr/share/man/man8/keelson-init.8.gz",
        "/usr/share/zsh/vendor-completions/_keelson",
    ] {
        assert!(agent.contains_key(path), "no {path} in {agent:#?}");
    }
    assert!(!agent.contains_key("/usr/lib/systemd/system/kubelet.service"));
    assert!(kubelet.contains_key("/usr/lib/systemd/system/kubelet.service"));
    assert!(kubelet.contains_key("/usr/bin/kubelet -> ../libexec/keelson/keelson-init"), "{kubelet:#?}");
    assert!(kubelet.contains_key("/usr/share/man/man8/kubelet.8.gz -> keelson-init.8.gz"), "{kubelet:#?}");
}

/// The packages relate to each other, and to the kubelet's package.
fn assert_relations(agent: &Path, kubelet: &Path) {
    assert!(field(agent, "Depends").starts_with("libc6 (>= 2."));
    assert_eq!(field(kubelet, "Depends"), format!("keelson (= {VERSION})"));
    for relation in ["Conflicts", "Replaces"] {
        assert_eq!(field(kubelet, relation), "kubelet");
    }
    // Before 1.30 kubeadm depends on `kubelet (>= 1.19.0)`.
    let provided = field(kubelet, "Provides");
    let version = provided.strip_prefix("kubelet (= ").and_then(|rest| rest.strip_suffix(')')).unwrap();
    assert!(KUBELET_VERSION.starts_with(&format!("v{version}+")), "{provided}");
    command_output(Command::new("dpkg").args(["--compare-versions", version, "ge", "1.19.0"]));
}

/// Each script is valid for a POSIX shell and has no template placeholder left.
fn scripts_are_well_formed(package: &Path, folder: &Path) {
    command_output(Command::new("dpkg-deb").arg("--control").arg(package).arg(folder));
    for script in ["preinst", "postinst", "prerm", "postrm"] {
        command_output(Command::new("sh").arg("-n").arg(folder.join(script)));
    }
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let left = text
            .split('@')
            .skip(1)
            .any(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase()));
        assert!(!left, "{}:\n{text}", path.display());
    }
}

/// Every program that a unit starts is in the packages.
fn units_run_only_what_is_there(unpacked: &Path) {
    let mut started = 0;
    for entry in fs::read_dir(unpacked.join("usr/lib/systemd/system")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        for line in text.lines().filter_map(|line| line.strip_prefix("ExecStart=")) {
            let program = line.split_whitespace().next().unwrap();
            let place = unpacked.join(program.trim_start_matches('/'));
            assert!(
                place.symlink_metadata().is_ok(),
                "{} starts {program}, which is not there",
                path.display()
            );
            started += 1;
        }
    }
    assert_eq!(started, 10, "seven services, two steps of the configuration, the kubelet");
}
