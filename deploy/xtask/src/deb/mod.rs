//! `cargo xtask deb`: the Debian packages `keelson` and `keelson-kubelet`, of the templates in deploy/packaging.

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
use crate::{ask_cargo, cargo, packages, run_command, workspace};
use contents::Tree;

/// Names the folder of binaries that are there already.
const BIN_DIR: &str = "KEELSON_BIN_DIR";
/// The scripts of a package that dpkg runs (deb-postinst(5) and its neighbours).
const SCRIPTS: [&str; 4] = ["preinst", "postinst", "prerm", "postrm"];

/// Manual pages of what only an administrator runs (man(1), section 8).
const MANUAL: &str = "usr/share/man/man8";

/// What is packed.
#[derive(Debug, Args)]
pub struct DebArguments {
    /// The profile that the binaries are built with; none is built where KEELSON_BIN_DIR names a folder of them
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
    /// Where the packages are written [default: target/deb]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The packages' version [default: the workspace's, with what git describes where that is no tag]
    #[arg(long, value_name = "VERSION")]
    version: Option<String>,
    /// Do not compress, which takes a while
    #[arg(long)]
    uncompressed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Profile {
    Release,
    Debug,
}

/// What both packages are made of.
struct Material {
    /// The folder with the binaries.
    binaries: PathBuf,
    /// Debian's name of this machine's architecture.
    architecture: String,
    version: String,
    /// Seconds since 1970 that every file has as its time (reproducible-builds.org, SOURCE_DATE_EPOCH).
    epoch: u64,
    license: String,
}

/// Builds, packs and tells where the packages are.
pub fn run(arguments: &DebArguments) -> anyhow::Result<()> {
    for (program, package) in [("dpkg-deb", "dpkg"), ("objdump", "binutils"), ("gzip", "gzip")] {
        find_file(program).with_context(|| format!("install it with: apt-get install -y {package}"))?;
    }
    let facts = version::Facts::ask()?;
    let material = Material {
        binaries: build(arguments.profile)?,
        architecture: said(Command::new("dpkg").arg("--print-architecture"))?,
        version: arguments.version.clone().unwrap_or_else(|| facts.version()),
        epoch: facts.epoch()?,
        license: facts.license,
    };
    version::check(&material.version)?;
    let out = arguments.out.clone().unwrap_or_else(|| workspace().join("target/deb"));
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let out = out.canonicalize()?;
    for name in ["keelson", "keelson-kubelet"] {
        let mut step = Step::start(&format!("Packing {name}"));
        let package = material.pack(name, &out, arguments.uncompressed, &mut step)?;
        step.done("packed");
        println!("{}", package.display());
    }
    Ok(())
}

/// The folder of the binaries, which are built unless the environment names one.
fn build(profile: Profile) -> anyhow::Result<PathBuf> {
    if std::env::var_os(BIN_DIR).is_some() {
        return built_binaries();
    }
    packages::install_to_run()?;
    if profile == Profile::Release {
        return crate::quickstart::build("release");
    }
    // With the rest, so that the tests' binaries are not built a second time with other features.
    run_command(cargo().args(["build", "--locked", "--workspace", "--bins"]))?;
    let metadata = ask_cargo(&["metadata", "--format-version", "1", "--no-deps", "--locked"])?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let target = metadata["target_directory"].as_str().context("cargo names no target folder")?;
    Ok(Path::new(target).join("debug"))
}

impl Material {
    /// Makes a package; the file.
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
        // Each thread packs a part of its own, so that their number would show in the package.
        command.arg("--threads-max=1").env("SOURCE_DATE_EPOCH", self.epoch.to_string());
        step.run(command.arg("--build").arg(tree.root()).arg(&file))?;
        tree.remove()?;
        Ok(file)
    }

    /// Binaries, units, configuration, manual pages and completions.
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
        said(Command::new(&command).arg("man").arg("--dir").arg(&pages))?;
        for page in contents::entries(&pages)? {
            tree.compress(&format!("usr/share/man/man1/{page}"))?;
        }
        let help = said(Command::new(self.binaries.join("keelson-init")).arg("--help"))?;
        tree.write(&format!("{MANUAL}/keelson-init.8"), &manual::page(&help, &self.version)?, 0o644)?;
        tree.compress(&format!("{MANUAL}/keelson-init.8"))?;
        for (shell, place) in [
            ("bash", "usr/share/bash-completion/completions/keelson"),
            ("zsh", "usr/share/zsh/vendor-completions/_keelson"),
            ("fish", "usr/share/fish/vendor_completions.d/keelson.fish"),
        ] {
            let script = said(Command::new(&command).args(["completion", shell]))?;
            tree.write(place, &format!("{script}\n"), 0o644)?;
        }
        let readme = workspace().join("deploy/packaging/keelson/README.Debian");
        tree.copy(&readme, "usr/share/doc/keelson/README.Debian", 0o644)
    }

    /// The other name of init with its manual page, and its unit.
    fn fill_kubelet(&self, tree: &mut Tree) -> anyhow::Result<()> {
        tree.link("usr/bin/kubelet", "../libexec/keelson/keelson-init")?;
        tree.link(&format!("{MANUAL}/kubelet.8.gz"), "keelson-init.8.gz")?;
        let unit = workspace().join("deploy/systemd/kubelet.service");
        tree.copy(&unit, "usr/lib/systemd/system/kubelet.service", 0o644)
    }

    /// What every package of Debian's has (Debian Policy, 12.5 and 12.7).
    fn fill_documentation(&self, name: &str, tree: &mut Tree) -> anyhow::Result<()> {
        let doc = format!("usr/share/doc/{name}");
        let copyright = template("copyright")?.replace("@LICENSE@", &self.license);
        tree.write(&format!("{doc}/copyright"), &copyright, 0o644)?;
        let date =
            said(Command::new("date").args(["--utc", "-R", "--date"]).arg(format!("@{}", self.epoch)))?;
        let changelog = format!(
            "{name} ({version}) unstable; urgency=medium\n\n  * Release {version}; git tells what has changed.\n\n \
             -- The authors of Keelson <authors@keelson.invalid>  {date}\n",
            version = self.version
        );
        tree.write(&format!("{doc}/changelog"), &changelog, 0o644)?;
        tree.compress(&format!("{doc}/changelog"))
    }

    /// What dpkg reads and runs.
    fn fill_control(&self, name: &str, tree: &mut Tree) -> anyhow::Result<()> {
        let sums = tree.md5_sums()?;
        let mut text = template(&format!("{name}/control"))?
            .replace("@VERSION@", &self.version)
            .replace("@ARCHITECTURE@", &self.architecture)
            .replace("@SIZE@", &tree.kibibytes()?.to_string())
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
        for script in SCRIPTS {
            let text = template(&format!("{name}/{script}"))?.replace("@SERVICES@", &services.join(" "));
            tree.write(&format!("DEBIAN/{script}"), &text, 0o755)?;
        }
        Ok(())
    }
}

/// The release whose kubelet the agent stands in for, as the version of a package: kubeadm may want one that is not too old.
fn kubelet_version() -> &'static str {
    let release = KUBELET_VERSION.split('+').next().unwrap_or(KUBELET_VERSION);
    release.trim_start_matches('v')
}

/// The units of the package `keelson`: all but the kubelet's.
fn units(folder: &Path) -> anyhow::Result<Vec<String>> {
    let kinds = ["service", "target", "path", "slice"];
    let is_unit = |name: &String| {
        let kind = Path::new(name).extension().and_then(|kind| kind.to_str());
        name != "kubelet.service" && kind.is_some_and(|kind| kinds.contains(&kind))
    };
    Ok(contents::entries(folder)?.into_iter().filter(is_unit).collect())
}

/// A file of deploy/packaging.
fn template(name: &str) -> anyhow::Result<String> {
    let path = workspace().join("deploy/packaging").join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// What a command prints, without blanks at its end.
fn said(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {}", output.status, error.trim());
    let text = String::from_utf8(output.stdout).with_context(|| format!("{command:?} printed no text"))?;
    Ok(text.trim_end().to_owned())
}
