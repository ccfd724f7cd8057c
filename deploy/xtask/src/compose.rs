//! `cargo xtask compose`: builds the images of compose.yaml, prepares the host, and starts and stops the containers.

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

/// The base image of every image.
const BASE: &str = "debian:bookworm-slim";
/// The variable that names the folder of all data of the nodes, and its default, as in compose.yaml.
const HOME: (&str, &str) = ("KEELSON_DIR", "/var/lib/keelson-compose");
/// The variable that names the host's port of etcd, and its default, as in compose.yaml.
const ETCD_PORT: (&str, &str) = ("KEELSON_ETCD_PORT", "2379");
/// The variable that names a folder of prebuilt binaries.
const BIN_DIR: &str = "KEELSON_BIN_DIR";
/// The image label that holds the SHA-256 of the binary in the image.
const BINARY_LABEL: &str = "keelson.local.binary";
/// The variable of compose.yaml for CAP_SYS_RESOURCE, and the capability to request instead on a host without it.
const SYS_RESOURCE: (&str, &str) = ("SYS_RESOURCE", "CAP_CHOWN");
/// The `cgroupRoot` of each node's KubeletConfiguration.
const CGROUP_ROOTS: [&str; 2] = ["/keelson-node-1", "/keelson-node-2"];
/// The template for `docker info`: the cgroup version and the security options. The option `name=cgroupns` means that a
/// container gets a cgroup namespace of its own by default.
const INFO_TEMPLATE: &str = "{{.CgroupVersion}}{{range .SecurityOptions}} {{.}}{{end}}";
/// The compose file that overrides compose.yaml so that containers use the host's cgroup namespace.
const HOST_CGROUPS: &str = "deploy/compose/host-cgroups.yaml";
/// The programs in the image of containerd.
const RUNTIME_PROGRAMS: [&str; 4] = ["containerd", "ctr", "containerd-shim-runc-v2", "runc"];
/// The CNI plugins in the image of containerd.
const CNI_PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];

/// The subcommands of `cargo xtask compose`.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum ComposeTask {
    /// Build the images from the binaries in KEELSON_BIN_DIR, or from a release build
    Images,
    /// Build missing images and start both nodes
    Up,
    /// Stop everything, pods included, and remove all that was created except the images
    Down,
}

/// Runs the subcommand.
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

/// The value of an environment variable, or the default if it is unset or empty.
fn from_environment((name, default): (&str, &str)) -> String {
    std::env::var(name).ok().filter(|value| !value.is_empty()).unwrap_or_else(|| default.to_owned())
}

fn home() -> PathBuf {
    from_environment(HOME).into()
}

/// The full name of one of our images.
fn tag(image: &str) -> String {
    format!("keelson.local/{image}:dev")
}

/// The short names of all images that this command builds.
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
                "The binaries of these images have changed since they were built: {}. Rebuild them: cargo xtask compose images",
                stale.join(", ")
            );
        }
    }
    let override_file = cgroup_override(&docker_info(), has_plugin())?;
    make_shared_mount(&home())?;
    let mut command = compose();
    if let Some(file) = override_file {
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
    // containerd's shims and the pods are not Docker's children, so Docker does not stop them.
    let remains = Remains {
        cgroup_roots: CGROUP_ROOTS.map(str::to_owned).to_vec(),
        dirs: vec![home()],
        ..Remains::default()
    };
    let errors = remains.remove();
    ensure!(errors.is_empty(), "not removed: {}", errors.join("; "));
    println!("Both nodes are gone. The images are still there.");
    Ok(())
}

/// Returns the output of `docker info` for [`INFO_TEMPLATE`], or an empty string if the command fails. A Docker that is too old
/// does not know the template; a Docker that is down makes the next command fail with a clear error.
fn docker_info() -> String {
    let output =
        Command::new("docker").args(["info", "--format", INFO_TEMPLATE]).stdin(Stdio::null()).output();
    let succeeded = output.ok().filter(|output| output.status.success());
    succeeded.map_or_else(String::new, |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns [`HOST_CGROUPS`] if Docker would otherwise hide the host's cgroups from the containers that need them: containerd
/// and the services that read or write cgroups. `info` is the output of [`docker_info`].
///
/// # Errors
/// The file is needed, but only docker-compose 1.29 is installed, which cannot request the host's cgroup namespace.
fn cgroup_override(info: &str, has_plugin: bool) -> anyhow::Result<Option<&'static str>> {
    let mut words = info.split_whitespace();
    let version = words.next().unwrap_or_default();
    if !words.any(|option| option == "name=cgroupns") {
        return Ok(None);
    }
    if has_plugin {
        return Ok(Some(HOST_CGROUPS));
    }
    bail!(
        "Docker gives each container its own cgroup namespace (cgroup v{version}), and docker-compose 1.29 cannot request the \
         host's; install the plugin `docker compose`, or add to /etc/docker/daemon.json the line\n  \
         \"default-cgroupns-mode\": \"host\"\nand restart Docker"
    )
}

/// Whether the plugin `docker compose` is installed.
fn has_plugin() -> bool {
    succeeds(Command::new("docker").args(["compose", "version"]))
}

/// A command that runs `docker compose`, or docker-compose if the plugin is not installed.
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

/// Runs a command without its output and returns whether it succeeded.
fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn has_image(name: &str) -> bool {
    succeeds(Command::new("docker").args(["image", "inspect", name]))
}

/// The services whose binary differs from the one in their image. A service whose binary is missing is not listed.
fn stale_images() -> Vec<String> {
    let folder = std::env::var_os(BIN_DIR).map_or_else(|| workspace().join("target/release"), PathBuf::from);
    let is_stale = |service: &&ServiceName| {
        let in_image = binary_label(&tag(service.as_str()));
        let current = sha256(&folder.join(service.binary()));
        current.is_some_and(|current| in_image.is_some_and(|in_image| in_image != current))
    };
    ServiceName::ALL.iter().filter(is_stale).map(ToString::to_string).collect()
}

/// The [`BINARY_LABEL`] of an image, empty if the image has no such label; `None` if the image does not exist.
fn binary_label(image: &str) -> Option<String> {
    let format = format!("{{{{index .Config.Labels \"{BINARY_LABEL}\"}}}}");
    let output =
        Command::new("docker").args(["image", "inspect", "--format", &format, image]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The SHA-256 of a file in hexadecimal digits; `None` if the file cannot be read.
fn sha256(file: &Path) -> Option<String> {
    let output = Command::new("sha256sum").arg("--binary").arg(file).output().ok()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let digest = stdout.split_whitespace().next().filter(|_| output.status.success())?;
    // sha256sum begins the line with a backslash if it escapes the file's name.
    Some(digest.trim_start_matches('\\').to_owned())
}

/// Makes `home` a shared mount, so that the host and all containers see what one container mounts below it (architecture §10).
/// On a host with systemd all mounts are shared already.
fn make_shared_mount(home: &Path) -> anyhow::Result<()> {
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
        let context = BuildContext::new(&contexts, "service")?;
        context.add(&binaries.join(service.binary()), service.binary())?;
        let label =
            format!("{BINARY_LABEL}={}", sha256(&binaries.join(service.binary())).unwrap_or_default());
        context
            .build(service.as_str(), &["--build-arg", &format!("SERVICE={service}"), "--label", &label])?;
    }
    let etcd = BuildContext::new(&contexts, "etcd")?;
    etcd.add(&Component::EtcdServer.find()?, "etcd")?;
    etcd.build("etcd", &[])?;
    let containerd = BuildContext::new(&contexts, "containerd")?;
    for program in RUNTIME_PROGRAMS {
        containerd.add(&find_file(program)?, &format!("bin/{program}"))?;
    }
    let plugins = Component::CniPlugins.find()?;
    for plugin in CNI_PLUGINS {
        containerd.add(&plugins.join(plugin), &format!("cni/{plugin}"))?;
    }
    write_archive(&containerd.folder.join("images.tar"), &standard_images())?;
    containerd.build("containerd", &[])
}

/// Makes sure that the base image exists: uses a local one, pulls it, or else builds it.
fn make_base(contexts: &Path) -> anyhow::Result<()> {
    if has_image(BASE) || succeeds(Command::new("docker").args(["pull", "--succeeds", BASE])) {
        return Ok(());
    }
    let mut step = Step::start(&format!("Building {BASE}, which cannot be pulled"));
    let script = workspace().join("deploy/images/base");
    step.run(Command::new(script).arg(contexts.join("base.tar")))?;
    step.done("built");
    Ok(())
}

/// The build context of one image: a folder with the files of deploy/images and the binaries.
struct BuildContext {
    folder: PathBuf,
}

impl BuildContext {
    fn new(contexts: &Path, name: &str) -> anyhow::Result<Self> {
        let context = Self { folder: contexts.join(name) };
        // Files of an earlier run may belong to an earlier release.
        let _ = fs::remove_dir_all(&context.folder);
        let source = workspace().join("deploy/images").join(name);
        let entries = fs::read_dir(&source).with_context(|| format!("cannot read {}", source.display()))?;
        for entry in entries {
            let path = entry?.path();
            context.add(&path, &path.file_name().unwrap_or_default().to_string_lossy())?;
        }
        Ok(context)
    }

    /// Copies the file `source` into the context. `name` may contain folders, which are created.
    fn add(&self, source: &Path, name: &str) -> anyhow::Result<()> {
        let target = self.folder.join(name);
        let created = target.parent().map_or(Ok(()), fs::create_dir_all);
        created
            .and_then(|()| fs::copy(source, &target).map(drop))
            .with_context(|| format!("cannot copy {} to {}", source.display(), target.display()))
    }

    fn build(&self, image: &str, arguments: &[&str]) -> anyhow::Result<()> {
        let mut step = Step::start(&format!("Building the image {}", tag(image)));
        let mut command = Command::new("docker");
        // The context has all files that the build needs, so it needs no network.
        command.args(["build", "--network", "none", "--tag", &tag(image)]).args(arguments).arg(&self.folder);
        step.run(&mut command)?;
        step.done("built");
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
    fn images_of_compose_yaml_are_the_images_that_are_built() {
        let text = compose_file();
        let referenced = text.lines().filter_map(|line| line.trim().strip_prefix("image: "));
        let mut referenced: Vec<String> = referenced.map(str::to_owned).collect();
        referenced.sort();
        referenced.dedup();
        let mut built: Vec<String> = images().into_iter().map(tag).chain([BASE.to_owned()]).collect();
        built.sort();
        assert_eq!(referenced, built);
    }

    #[test]
    fn sha256_is_that_of_the_contents_and_none_for_a_missing_file() {
        let folder = keelson_testkit::Scratch::new().unwrap();
        let file = folder.path().join("a");
        assert_eq!(sha256(&file), None);
        fs::write(&file, "abc").unwrap();
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(&file).as_deref(), Some(known));
    }

    #[test]
    fn private_cgroup_namespaces_need_the_host_cgroups_file_and_the_compose_plugin() {
        let host = Some(HOST_CGROUPS);
        for (info, has_plugin, expected) in [
            ("1 name=seccomp,profile=default", false, Some(None)),
            ("1 name=seccomp,profile=default", true, Some(None)),
            ("2 name=apparmor name=seccomp,profile=builtin", false, Some(None)),
            ("2 name=apparmor name=seccomp,profile=builtin name=cgroupns", true, Some(host)),
            ("2 name=apparmor name=seccomp,profile=builtin name=cgroupns", false, None),
            ("1 name=cgroupns", false, None),
            ("", false, Some(None)),
        ] {
            let result = cgroup_override(info, has_plugin);
            let error = result.as_ref().err().map(ToString::to_string);
            assert_eq!(result.ok(), expected, "{info}");
            let line = "\n  \"default-cgroupns-mode\": \"host\"\n";
            let names_both_ways = |error: String| error.contains(line) && error.contains("docker compose");
            assert!(error.is_none_or(names_both_ways), "{info}");
        }
    }

    #[test]
    fn host_cgroups_file_lists_the_containers_that_mount_sys_fs_cgroup() {
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
        let override_file = fs::read_to_string(workspace().join(HOST_CGROUPS)).unwrap();
        let listed: Vec<&str> =
            override_file.lines().filter_map(|line| line.trim().strip_suffix(": { cgroup: host }")).collect();
        assert_eq!((listed.len(), listed), (6, mounting));
    }

    #[test]
    fn folder_port_and_cgroup_roots_match_compose_yaml_and_the_node_files() {
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
