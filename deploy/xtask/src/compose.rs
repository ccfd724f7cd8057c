//! `cargo xtask compose`: the images of compose.yaml, and what it needs of the machine beside Docker.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use clap::Subcommand;
use keelson_config::ServiceName;
use keelson_testkit::{
    Component, Remains, built_binaries, find_file, has_cap_sys_resource, standard_images, write_archive,
};

use crate::progress::Step;
use crate::{packages, quickstart, require_root, run_command, workspace};

/// The base of every image.
const BASE: &str = "debian:bookworm-slim";
/// Where compose.yaml keeps everything unless the environment names another folder.
const HOME: (&str, &str) = ("KEELSON_DIR", "/var/lib/keelson-compose");
/// The port of etcd's clients on this machine, as compose.yaml has it.
const ETCD_PORT: (&str, &str) = ("KEELSON_ETCD_PORT", "2379");
/// Names the folder of binaries that are there already.
const BIN_DIR: &str = "KEELSON_BIN_DIR";
/// The label of an image by which it tells of which binary it was made.
const BINARY_LABEL: &str = "keelson.local.binary";
/// Asked for where the machine has it; compose.yaml says why.
const SYS_RESOURCE: (&str, &str) = ("SYS_RESOURCE", "CAP_CHOWN");
/// The cgroups of the nodes, as their KubeletConfigurations name them.
const CGROUP_ROOTS: [&str; 2] = ["/keelson-node-1", "/keelson-node-2"];
/// Asks Docker for the version of cgroups and for its security options, among them whether a container gets a cgroup namespace
/// of its own unless it says otherwise.
const INFO: &str = "{{.CgroupVersion}}{{range .SecurityOptions}} {{.}}{{end}}";
/// The file beside compose.yaml by which containers say otherwise.
const HOST_CGROUPS: &str = "deploy/compose/host-cgroups.yaml";
/// The programs of containerd's image.
const RUNTIME: [&str; 4] = ["containerd", "ctr", "containerd-shim-runc-v2", "runc"];
/// The plugins of its network.
const CNI_PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];

/// What is done.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum ComposeTask {
    /// Make the images, from the binaries in KEELSON_BIN_DIR or from a release build
    Images,
    /// Make what is missing and start both nodes
    Up,
    /// End everything, pods included, and remove what it has made but the images
    Down,
}

/// Runs a task.
pub fn run(task: ComposeTask) -> anyhow::Result<()> {
    require_root("compose")?;
    Component::Docker.find()?;
    Component::DockerCompose.find()?;
    match task {
        ComposeTask::Images => make_images(),
        ComposeTask::Up => up(),
        ComposeTask::Down => down(),
    }
}

fn from_environment((name, default): (&str, &str)) -> String {
    std::env::var(name).ok().filter(|value| !value.is_empty()).unwrap_or_else(|| default.to_owned())
}

fn home() -> PathBuf {
    from_environment(HOME).into()
}

/// The name of an image of ours.
fn tag(image: &str) -> String {
    format!("keelson.local/{image}:dev")
}

/// Every image of ours.
fn images() -> Vec<&'static str> {
    ServiceName::ALL.iter().map(|service| service.as_str()).chain(["containerd", "etcd"]).collect()
}

fn up() -> anyhow::Result<()> {
    if images().iter().any(|image| !has_image(&tag(image))) {
        make_images()?;
    } else {
        let stale = stale_images();
        if !stale.is_empty() {
            println!(
                "Made of other binaries than those there are now: {}. Anew: cargo xtask compose images",
                stale.join(", ")
            );
        }
    }
    let further = further_file(&docker_info(), has_plugin())?;
    share(&home())?;
    let mut command = compose();
    if let Some(file) = further {
        command.args(["--file", "compose.yaml", "--file", file]);
    }
    run_command(command.args(["up", "--detach"]))?;
    println!(
        "Both nodes are up. With the command keelson, from a release build of this workspace:
  keelson get node --etcd http://127.0.0.1:{port}
  keelson apply -f deploy/quickstart/pods/web.yaml --etcd http://127.0.0.1:{port} --node node-1
  keelson get services --run-dir {home}/node-1/run
Stop it and remove everything: cargo xtask compose down",
        port = from_environment(ETCD_PORT),
        home = home().display()
    );
    Ok(())
}

fn down() -> anyhow::Result<()> {
    run_command(compose().args(["down", "--volumes", "--remove-orphans"]))?;
    // Shims and pods are no processes of Docker's, and go on until they are ended here.
    let remains = Remains {
        cgroup_roots: CGROUP_ROOTS.map(str::to_owned).to_vec(),
        dirs: vec![home()],
        ..Remains::default()
    };
    let problems = remains.remove();
    ensure!(problems.is_empty(), "left behind: {}", problems.join("; "));
    println!("Both nodes are gone. The images stay.");
    Ok(())
}

/// What Docker says to [`INFO`]; empty where it is too old for that. One that is not there is told by what is run next.
fn docker_info() -> String {
    let output = Command::new("docker").args(["info", "--format", INFO]).stdin(Stdio::null()).output();
    let said = output.ok().filter(|output| output.status.success());
    said.map_or_else(String::new, |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The file that is needed beside compose.yaml, so that the runtime and the services that look after cgroups see those of the
/// machine.
///
/// # Errors
/// They would not, and docker-compose 1.29 has no word for it.
fn further_file(info: &str, has_plugin: bool) -> anyhow::Result<Option<&'static str>> {
    let mut words = info.split_whitespace();
    let version = words.next().unwrap_or_default();
    if !words.any(|option| option == "name=cgroupns") {
        return Ok(None);
    }
    if has_plugin {
        return Ok(Some(HOST_CGROUPS));
    }
    bail!(
        "with cgroup v{version} Docker here gives each container a cgroup namespace of its own, and docker-compose 1.29 cannot ask \
         for the machine's; install the plugin `docker compose`, or have in /etc/docker/daemon.json the line\n  \
         \"default-cgroupns-mode\": \"host\"\nand restart Docker"
    )
}

/// Whether Docker has `docker compose`.
fn has_plugin() -> bool {
    quiet(Command::new("docker").args(["compose", "version"]))
}

/// `docker compose` where Docker has it, else docker-compose.
fn compose() -> Command {
    let mut command = if has_plugin() {
        let mut command = Command::new("docker");
        command.arg("compose");
        command
    } else {
        Command::new("docker-compose")
    };
    command.current_dir(workspace());
    if !has_cap_sys_resource() {
        command.env(SYS_RESOURCE.0, from_environment(SYS_RESOURCE));
    }
    command
}

/// Whether a command ends well; nobody reads what it says.
fn quiet(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn has_image(name: &str) -> bool {
    quiet(Command::new("docker").args(["image", "inspect", name]))
}

/// The images of services whose binary has become another one. One that is not there cannot tell.
fn stale_images() -> Vec<String> {
    let folder = std::env::var_os(BIN_DIR).map_or_else(|| workspace().join("target/release"), PathBuf::from);
    let is_stale = |service: &&ServiceName| {
        let made_of = label_of(&tag(service.as_str()));
        digest(&folder.join(service.binary())).is_some_and(|now| made_of.is_some_and(|then| then != now))
    };
    ServiceName::ALL.iter().filter(is_stale).map(ToString::to_string).collect()
}

/// The label of an image; empty where it has none.
fn label_of(image: &str) -> Option<String> {
    let format = format!("{{{{index .Config.Labels \"{BINARY_LABEL}\"}}}}");
    let output =
        Command::new("docker").args(["image", "inspect", "--format", &format, image]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The SHA-256 of a file; `None` where it cannot be read.
fn digest(file: &Path) -> Option<String> {
    let output = Command::new("sha256sum").arg("--binary").arg(file).output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let digest = said.split_whitespace().next().filter(|_| output.status.success())?;
    Some(digest.trim_start_matches('\\').to_owned())
}

/// Sees to it that what a container mounts below `home` is seen by the machine and by the others (architecture §10). Where
/// systemd runs, all mounts are shared from the beginning.
fn share(home: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(home)
        .and_then(|()| fs::set_permissions(home, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot make {}", home.display()))?;
    let output = Command::new("findmnt")
        .args(["--noheadings", "--output", "PROPAGATION", "--target"])
        .arg(home)
        .output()
        .context("cannot run findmnt")?;
    if String::from_utf8_lossy(&output.stdout).contains("shared") {
        return Ok(());
    }
    run_command(Command::new("mount").arg("--bind").args([home, home]))?;
    run_command(Command::new("mount").arg("--make-shared").arg(home))
}

fn make_images() -> anyhow::Result<()> {
    let binaries = match std::env::var_os(BIN_DIR) {
        Some(_) => built_binaries()?,
        None => {
            packages::install_to_run()?;
            quickstart::build("release")?
        }
    };
    let contexts = workspace().join("target/images");
    fs::create_dir_all(&contexts).with_context(|| format!("cannot make {}", contexts.display()))?;
    make_base(&contexts)?;
    for service in ServiceName::ALL {
        let own = Context::new(&contexts, "service")?;
        own.put(&binaries.join(service.binary()), service.binary())?;
        let label =
            format!("{BINARY_LABEL}={}", digest(&binaries.join(service.binary())).unwrap_or_default());
        own.build(service.as_str(), &["--build-arg", &format!("SERVICE={service}"), "--label", &label])?;
    }
    let etcd = Context::new(&contexts, "etcd")?;
    etcd.put(&Component::EtcdServer.find()?, "etcd")?;
    etcd.build("etcd", &[])?;
    let containerd = Context::new(&contexts, "containerd")?;
    for program in RUNTIME {
        containerd.put(&find_file(program)?, &format!("bin/{program}"))?;
    }
    let plugins = Component::CniPlugins.find()?;
    for plugin in CNI_PLUGINS {
        containerd.put(&plugins.join(plugin), &format!("cni/{plugin}"))?;
    }
    write_archive(&containerd.folder.join("images.tar"), &standard_images())?;
    containerd.build("containerd", &[])
}

/// The base as it is, as a registry has it, or else made here.
fn make_base(contexts: &Path) -> anyhow::Result<()> {
    if has_image(BASE) || quiet(Command::new("docker").args(["pull", "--quiet", BASE])) {
        return Ok(());
    }
    let mut step = Step::start(&format!("Making {BASE}, which cannot be pulled"));
    let script = workspace().join("deploy/images/base");
    step.run(Command::new(script).arg(contexts.join("base.tar")))?;
    step.done("made");
    Ok(())
}

/// What an image is built from: a folder of its own with the files of deploy/images and the binaries.
struct Context {
    folder: PathBuf,
}

impl Context {
    fn new(contexts: &Path, name: &str) -> anyhow::Result<Self> {
        let context = Self { folder: contexts.join(name) };
        // What an earlier run has left may be of an earlier release.
        let _ = fs::remove_dir_all(&context.folder);
        let source = workspace().join("deploy/images").join(name);
        let entries = fs::read_dir(&source).with_context(|| format!("cannot read {}", source.display()))?;
        for entry in entries {
            let path = entry?.path();
            context.put(&path, &path.file_name().unwrap_or_default().to_string_lossy())?;
        }
        Ok(context)
    }

    /// Puts a copy of a file there, under a name that may have a folder.
    fn put(&self, source: &Path, name: &str) -> anyhow::Result<()> {
        let target = self.folder.join(name);
        let made = target.parent().map_or(Ok(()), fs::create_dir_all);
        made.and_then(|()| fs::copy(source, &target).map(drop))
            .with_context(|| format!("cannot copy {} to {}", source.display(), target.display()))
    }

    fn build(&self, image: &str, arguments: &[&str]) -> anyhow::Result<()> {
        let mut step = Step::start(&format!("Making the image {}", tag(image)));
        let mut command = Command::new("docker");
        // What is needed is in the context.
        command.args(["build", "--network", "none", "--tag", &tag(image)]).args(arguments).arg(&self.folder);
        step.run(&mut command)?;
        step.done("made");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compose_file() -> String {
        fs::read_to_string(workspace().join("compose.yaml")).unwrap()
    }

    #[test]
    fn every_image_of_the_compose_file_is_made_here() {
        let text = compose_file();
        let named = text.lines().filter_map(|line| line.trim().strip_prefix("image: "));
        let mut named: Vec<String> = named.map(str::to_owned).collect();
        named.sort();
        named.dedup();
        let mut made: Vec<String> = images().into_iter().map(tag).chain([BASE.to_owned()]).collect();
        made.sort();
        assert_eq!(named, made);
    }

    #[test]
    fn a_digest_is_that_of_the_contents_and_a_missing_file_has_none() {
        let folder = keelson_testkit::Scratch::new().unwrap();
        let file = folder.path().join("a");
        assert_eq!(digest(&file), None);
        fs::write(&file, "abc").unwrap();
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest(&file).as_deref(), Some(known));
    }

    #[test]
    fn where_containers_get_cgroups_of_their_own_those_of_the_machine_are_asked_for_or_up_is_refused() {
        let asked = Some(HOST_CGROUPS);
        for (info, has_plugin, expected) in [
            ("1 name=seccomp,profile=default", false, Some(None)),
            ("1 name=seccomp,profile=default", true, Some(None)),
            ("2 name=apparmor name=seccomp,profile=builtin", false, Some(None)),
            ("2 name=apparmor name=seccomp,profile=builtin name=cgroupns", true, Some(asked)),
            ("2 name=apparmor name=seccomp,profile=builtin name=cgroupns", false, None),
            ("1 name=cgroupns", false, None),
            ("", false, Some(None)),
        ] {
            let found = further_file(info, has_plugin);
            let told = found.as_ref().err().map(ToString::to_string);
            assert_eq!(found.ok(), expected, "{info}");
            let line = "\n  \"default-cgroupns-mode\": \"host\"\n";
            assert!(told.is_none_or(|told| told.contains(line) && told.contains("docker compose")), "{info}");
        }
    }

    #[test]
    fn the_containers_that_ask_for_the_machines_cgroups_are_those_that_mount_them() {
        let (mut service, mut mounting) = ("", Vec::new());
        let text = compose_file();
        for line in text.lines() {
            let name = line.strip_prefix("  ").and_then(|rest| rest.strip_suffix(':'));
            if let Some(name) = name.filter(|name| !name.starts_with(' ')) {
                service = name;
            }
            if line.trim_start().starts_with("- /sys/fs/cgroup:") {
                mounting.push(service);
            }
        }
        let further = fs::read_to_string(workspace().join(HOST_CGROUPS)).unwrap();
        let asking: Vec<&str> =
            further.lines().filter_map(|line| line.trim().strip_suffix(": { cgroup: host }")).collect();
        assert_eq!((asking.len(), asking), (6, mounting));
    }

    #[test]
    fn folder_port_and_cgroups_are_those_of_the_compose_file() {
        let text = compose_file();
        for (name, default) in [HOME, ETCD_PORT] {
            assert!(text.contains(&format!("${{{name}:-{default}}}")), "{name}");
        }
        for (n, root) in (1..).zip(CGROUP_ROOTS) {
            assert!(text.contains(&format!("CGROUP_ROOT: {root},")), "{root}");
            let file = workspace().join(format!("deploy/compose/node-{n}.yaml"));
            let kubelet = fs::read_to_string(file).unwrap();
            assert!(kubelet.lines().any(|line| line == format!("cgroupRoot: {root}")), "{kubelet}");
        }
    }
}
