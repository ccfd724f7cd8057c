//! `cargo xtask deb`: builds the Debian packages `keelson` and `keelson-kubelet` from the templates in deploy/packaging.

mod contents;
mod libraries;
mod manual;
mod version;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use keelson_config::{KUBELET_VERSION, ServiceName};
use keelson_testkit::{binary_names, built_binaries, find_file};

use crate::progress::Step;
use crate::{cargo, cargo_stdout, packages, run_command, workspace};
use contents::Tree;

/// The variable that names a folder of prebuilt binaries.
const BIN_DIR: &str = "KEELSON_BIN_DIR";
/// The maintainer scripts of a package, which dpkg runs (deb-preinst(5), deb-postinst(5), deb-prerm(5), deb-postrm(5)).
const MAINTAINER_SCRIPTS: [&str; 4] = ["preinst", "postinst", "prerm", "postrm"];

/// The folder of manual pages for administration commands (man(1), section 8).
const MAN8: &str = "usr/share/man/man8";

/// The arguments of `cargo xtask deb`.
#[derive(Debug, Args)]
pub struct DebArguments {
    /// The build profile of the binaries; ignored if KEELSON_BIN_DIR names a folder of binaries
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
    /// The folder for the packages [default: target/deb]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The packages' version [default: the workspace's version, with a suffix for the commit unless it is tagged]
    #[arg(long, value_name = "VERSION")]
    version: Option<String>,
    /// Do not compress the packages, which is faster
    #[arg(long)]
    uncompressed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Profile {
    Release,
    Debug,
}

/// The values that both packages share.
struct Builder {
    /// The folder with the binaries.
    binaries: PathBuf,
    /// Debian's name of this host's architecture.
    architecture: String,
    version: String,
    /// The time of every file, in seconds since 1970 (reproducible-builds.org, SOURCE_DATE_EPOCH).
    epoch: u64,
    /// The SPDX identifier of the licence.
    license: String,
}

/// Builds the binaries and the packages, and prints the paths of the packages.
pub fn run(arguments: &DebArguments) -> anyhow::Result<()> {
    for (program, package) in [("dpkg-deb", "dpkg"), ("objdump", "binutils"), ("gzip", "gzip")] {
        find_file(program).with_context(|| format!("install it with: apt-get install -y {package}"))?;
    }
    let facts = version::Facts::read()?;
    let builder = Builder {
        binaries: build(arguments.profile)?,
        architecture: stdout_of(Command::new("dpkg").arg("--print-architecture"))?,
        version: arguments.version.clone().unwrap_or_else(|| facts.version()),
        epoch: facts.epoch()?,
        license: facts.license,
    };
    version::validate(&builder.version)?;
    let out = arguments.out.clone().unwrap_or_else(|| workspace().join("target/deb"));
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let out = out.canonicalize()?;
    for name in ["keelson", "keelson-kubelet"] {
        let mut step = Step::start(&format!("Packing {name}"));
        let package = builder.pack(name, &out, arguments.uncompressed, &mut step)?;
        step.done("packed");
        println!("{}", package.display());
    }
    Ok(())
}

/// Returns the folder of the binaries: the one in `KEELSON_BIN_DIR`, or that of a new build.
fn build(profile: Profile) -> anyhow::Result<PathBuf> {
    if std::env::var_os(BIN_DIR).is_some() {
        return built_binaries();
    }
    packages::install_to_run()?;
    if profile == Profile::Release {
        return crate::quickstart::build("release");
    }
    // A build of the whole workspace, so that the tests can reuse it: other features would mean another build.
    run_command(cargo().args(["build", "--locked", "--workspace", "--bins"]))?;
    let metadata = cargo_stdout(&["metadata", "--format-version", "1", "--no-deps", "--locked"])?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let target =
        metadata["target_directory"].as_str().context("`cargo metadata` prints no target_directory")?;
    Ok(Path::new(target).join("debug"))
}

impl Builder {
    /// Builds the package `name` and returns its path.
    fn pack(&self, name: &str, out: &Path, uncompressed: bool, step: &mut Step) -> anyhow::Result<PathBuf> {
        let file = out.join(format!("{name}_{}_{}.deb", self.version, self.architecture));
        let mut tree = Tree::new(out.join(format!(".{name}")))?;
        match name {
            "keelson" => self.fill_keelson(&mut tree)?,
            _ => self.fill_kubelet(&mut tree)?,
        }
        self.fill_documentation(name, &mut tree)?;
        self.fill_control(name, &mut tree)?;
        tree.set_times(self.epoch)?;
        let mut command = Command::new("dpkg-deb");
        command.arg("--root-owner-group").arg(if uncompressed { "-Znone" } else { "-Zxz" });
        // The compressed bytes depend on the number of threads, because each one compresses its own part.
        command.arg("--threads-max=1").env("SOURCE_DATE_EPOCH", self.epoch.to_string());
        step.run(command.arg("--build").arg(tree.root()).arg(&file))?;
        tree.remove()?;
        Ok(file)
    }

    /// Adds the binaries, units, configuration, manual pages and completions.
    fn fill_keelson(&self, tree: &mut Tree) -> anyhow::Result<()> {
        for name in binary_names() {
            let target = if name == "keelson" { "usr/bin" } else { "usr/libexec/keelson" };
            tree.copy(&self.binaries.join(name), &format!("{target}/{name}"), 0o755)?;
        }
        let systemd = workspace().join("deploy/systemd");
        for unit in units(&systemd)? {
            tree.copy(&systemd.join(&unit), &format!("usr/lib/systemd/system/{unit}"), 0o644)?;
        }
        for folder in ["sysusers.d", "tmpfiles.d"] {
            let file = systemd.join(folder).join("keelson.conf");
            tree.copy(&file, &format!("usr/lib/{folder}/keelson.conf"), 0o644)?;
        }
        for file in ["keelson.yaml", "kubelet.yaml"] {
            tree.copy(&systemd.join(file), &format!("etc/keelson/{file}"), 0o644)?;
        }
        let command = self.binaries.join("keelson");
        let pages = tree.root().join("usr/share/man/man1");
        stdout_of(Command::new(&command).arg("man").arg("--dir").arg(&pages))?;
        for page in contents::entries(&pages)? {
            tree.compress(&format!("usr/share/man/man1/{page}"))?;
        }
        let help = stdout_of(Command::new(self.binaries.join("keelson-init")).arg("--help"))?;
        tree.write(&format!("{MAN8}/keelson-init.8"), &manual::page(&help, &self.version)?, 0o644)?;
        tree.compress(&format!("{MAN8}/keelson-init.8"))?;
        for (shell, path) in [
            ("bash", "usr/share/bash-completion/completions/keelson"),
            ("zsh", "usr/share/zsh/vendor-completions/_keelson"),
            ("fish", "usr/share/fish/vendor_completions.d/keelson.fish"),
        ] {
            let script = stdout_of(Command::new(&command).args(["completion", shell]))?;
            tree.write(path, &format!("{script}\n"), 0o644)?;
        }
        let readme = workspace().join("deploy/packaging/keelson/README.Debian");
        tree.copy(&readme, "usr/share/doc/keelson/README.Debian", 0o644)
    }

    /// Adds the links that make init available as `kubelet`, and the unit kubelet.service.
    fn fill_kubelet(&self, tree: &mut Tree) -> anyhow::Result<()> {
        tree.link("usr/bin/kubelet", "../libexec/keelson/keelson-init")?;
        tree.link(&format!("{MAN8}/kubelet.8.gz"), "keelson-init.8.gz")?;
        let unit = workspace().join("deploy/systemd/kubelet.service");
        tree.copy(&unit, "usr/lib/systemd/system/kubelet.service", 0o644)
    }

    /// Adds the files that every Debian package has: the copyright and the changelog (Debian Policy, 12.5 and 12.7).
    fn fill_documentation(&self, name: &str, tree: &mut Tree) -> anyhow::Result<()> {
        let doc = format!("usr/share/doc/{name}");
        let copyright = template("copyright")?.replace("@LICENSE@", &self.license);
        tree.write(&format!("{doc}/copyright"), &copyright, 0o644)?;
        let date =
            stdout_of(Command::new("date").args(["--utc", "-R", "--date"]).arg(format!("@{}", self.epoch)))?;
        let changelog = format!(
            "{name} ({version}) unstable; urgency=medium\n\n  * Release {version}; see the git history for the changes.\n\n \
             -- The authors of Keelson <authors@keelson.invalid>  {date}\n",
            version = self.version
        );
        tree.write(&format!("{doc}/changelog"), &changelog, 0o644)?;
        tree.compress(&format!("{doc}/changelog"))
    }

    /// Adds the control files and maintainer scripts, for dpkg.
    fn fill_control(&self, name: &str, tree: &mut Tree) -> anyhow::Result<()> {
        let sums = tree.md5_sums()?;
        let mut text = template(&format!("{name}/control"))?
            .replace("@VERSION@", &self.version)
            .replace("@ARCHITECTURE@", &self.architecture)
            .replace("@SIZE@", &tree.size_kib()?.to_string())
            .replace("@KUBELET_VERSION@", kubelet_version());
        if text.contains("@LIBRARIES@") {
            let binaries = binary_names().into_iter().map(|name| self.binaries.join(name));
            text = text.replace("@LIBRARIES@", &libraries::depends(binaries)?);
        }
        tree.write("DEBIAN/control", &text, 0o644)?;
        tree.write("DEBIAN/md5sums", &sums, 0o644)?;
        if let Ok(conffiles) = template(&format!("{name}/conffiles")) {
            tree.write("DEBIAN/conffiles", &conffiles, 0o644)?;
        }
        let services: Vec<&str> = ServiceName::supervised().map(ServiceName::as_str).collect();
        for script in MAINTAINER_SCRIPTS {
            let text = template(&format!("{name}/{script}"))?.replace("@SERVICES@", &services.join(" "));
            tree.write(&format!("DEBIAN/{script}"), &text, 0o755)?;
        }
        Ok(())
    }
}

/// The Kubernetes release whose kubelet the agent replaces, as a package version. kubeadm may require a minimum version.
fn kubelet_version() -> &'static str {
    let release = KUBELET_VERSION.split('+').next().unwrap_or(KUBELET_VERSION);
    release.trim_start_matches('v')
}

/// The names of the units of the package `keelson`: all except kubelet.service.
fn units(folder: &Path) -> anyhow::Result<Vec<String>> {
    let kinds = ["service", "target", "path", "slice"];
    let is_unit = |name: &String| {
        let kind = Path::new(name).extension().and_then(|kind| kind.to_str());
        name != "kubelet.service" && kind.is_some_and(|kind| kinds.contains(&kind))
    };
    Ok(contents::entries(folder)?.into_iter().filter(is_unit).collect())
}

/// Reads a file of deploy/packaging.
fn template(name: &str) -> anyhow::Result<String> {
    let path = workspace().join("deploy/packaging").join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Runs a command and returns its stdout without whitespace at the end.
///
/// # Errors
/// The command cannot be run, fails, or prints something that is not UTF-8.
fn stdout_of(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {}", output.status, error.trim());
    let text = String::from_utf8(output.stdout)
        .with_context(|| format!("the output of {command:?} is not UTF-8"))?;
    Ok(text.trim_end().to_owned())
}
