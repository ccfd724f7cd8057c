//! The command line.

use std::collections::BTreeMap;
use std::path::PathBuf;

use keelson_config::KUBELET_VERSION;
use keelson_init_core::flags::{Asked, CommandLine, FieldFlag, FlagError, help, parse};
use keelson_init_core::{Flags, flag_lines, shown_flags};
use serde_json::Value;

use crate::lock_file::LockFile;

/// Flags without a field that have a place of their own in [`Flags`] or here, or that are spent on the way.
const TAKEN: &[&str] = &[
    "config",
    "config-dir",
    "help",
    "hostname-override",
    "image-credential-provider-bin-dir",
    "image-credential-provider-config",
    "keelson-config",
    "log-format",
    "log-level",
    "maximum-dead-containers",
    "maximum-dead-containers-per-container",
    "minimum-container-ttl-duration",
    "node-labels",
    "prepare-host",
    "resolve-only",
    "root-dir",
    "run-dir",
    "runtime-cgroups",
    "seccomp-default",
    "state-dir",
];

/// A command line that was read.
#[derive(Debug, Clone, Default)]
pub struct Cli(CommandLine);

impl Cli {
    /// Reads the arguments after the name of the program; relative paths start from `cwd`.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn parse(arguments: &[String], cwd: &str) -> Result<Self, FlagError> {
        parse(arguments, cwd).map(Self)
    }

    /// What to print instead of running, if that is what is asked for.
    pub fn instead(&self, program: &str, is_kubelet: bool) -> Option<String> {
        match (self.0.asked, is_kubelet) {
            (Asked::Run, _) => None,
            (Asked::Help, _) => Some(help(program)),
            (Asked::Version { raw: false }, true) => Some(format!("Kubernetes {KUBELET_VERSION}\n")),
            (Asked::Version { raw: false }, false) => {
                Some(format!("{program} {}\n", env!("CARGO_PKG_VERSION")))
            }
            (Asked::Version { raw: true }, _) => Some(raw_version()),
        }
    }

    /// What to say of flags that should not be used any more.
    pub fn warnings(&self) -> &[String] {
        &self.0.warnings
    }

    /// `--config`.
    pub fn config(&self) -> Option<PathBuf> {
        self.path("config")
    }

    /// `--config-dir`.
    pub fn config_dir(&self) -> Option<PathBuf> {
        self.path("config-dir")
    }

    /// `--keelson-config`.
    pub fn keelson_config(&self) -> Option<PathBuf> {
        self.path("keelson-config")
    }

    /// `--image-credential-provider-config`.
    pub fn image_credential_provider_config(&self) -> Option<String> {
        self.0.text("image-credential-provider-config")
    }

    /// `--image-credential-provider-bin-dir`.
    pub fn image_credential_provider_bin_dir(&self) -> Option<String> {
        self.0.text("image-credential-provider-bin-dir")
    }

    /// `--lock-file` with `--exit-on-lock-contention`.
    pub(crate) fn lock_file(&self) -> Option<LockFile> {
        let path = self.path("lock-file")?;
        Some(LockFile { path, gives_way: self.0.is_on("exit-on-lock-contention") })
    }

    /// `--resolve-only`.
    pub fn resolve_only(&self) -> bool {
        self.0.is_on("resolve-only")
    }

    /// `--prepare-host`.
    pub fn prepare_host(&self) -> bool {
        self.0.is_on("prepare-host")
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.0.text(name).filter(|text| !text.is_empty()).map(PathBuf::from)
    }

    /// The values that take part in the resolution.
    pub fn flags(&self) -> Flags {
        let line = &self.0;
        let mut fields = line.fields.clone();
        if line.is_on("seccomp-default") {
            // The flag adds to the file and takes nothing from it.
            let flag = "--seccomp-default".to_owned();
            fields.push(FieldFlag { flag, path: "seccompDefault", value: Value::Bool(true) });
        }
        let labels = line.given("node-labels").map(ToOwned::to_owned);
        Flags {
            root_dir: line.text("root-dir"),
            hostname_override: line.text("hostname-override"),
            node_labels: labels.into_iter().collect(),
            run_dir: line.text("run-dir"),
            state_dir: line.text("state-dir"),
            log_level: line.text("log-level"),
            log_format: line.text("log-format"),
            minimum_container_ttl: line.text("minimum-container-ttl-duration"),
            max_dead_per_container: line.number("maximum-dead-containers-per-container"),
            max_dead_containers: line.number("maximum-dead-containers"),
            runtime_cgroups: line.text("runtime-cgroups"),
            fields,
            others: line.own_besides(TAKEN),
        }
    }

    /// The lines that the log has of the flags at a verbosity.
    pub fn lines(&self, verbosity: i64) -> Vec<String> {
        flag_lines(&self.0, verbosity)
    }

    /// Every flag with its value, for `/flagz`.
    pub fn shown(&self) -> BTreeMap<&'static str, String> {
        shown_flags(&self.0)
    }
}

/// Every fact of the version, in the form that a kubelet prints it in (node-and-api.md §1.3).
fn raw_version() -> String {
    let mut numbers = KUBELET_VERSION.trim_start_matches('v').split('.');
    let mut number = || numbers.next().unwrap_or_default();
    let (major, minor) = (number(), number());
    format!(
        "version.Info{{Major:{major:?}, Minor:{minor:?}, GitVersion:{KUBELET_VERSION:?}, GitCommit:\"\", \
         GitTreeState:\"\", BuildDate:\"\", GoVersion:\"\", Compiler:\"rustc\", Platform:\"linux/{}\"}}\n",
        match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(arguments: &[&str]) -> Cli {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Cli::parse(&arguments, "/srv").unwrap()
    }

    #[test]
    fn labels_may_be_given_several_times() {
        let cli = read(&["--node-labels", "a=1,b=2", "--node-labels=c=3"]);
        assert_eq!(cli.flags().node_labels, ["a=1,b=2,c=3"]);
    }

    #[test]
    fn the_lock_file_starts_from_the_working_directory_and_an_empty_one_is_none() {
        let lock = |arguments: &[&str]| read(arguments).lock_file();
        let file = |gives_way| Some(LockFile { path: "/srv/l".into(), gives_way });
        assert_eq!(lock(&[]), None);
        assert_eq!(lock(&["--lock-file="]), None);
        assert_eq!(lock(&["--lock-file=l"]), file(false));
        assert_eq!(lock(&["--lock-file=l", "--exit-on-lock-contention=false"]), file(false));
        assert_eq!(lock(&["--lock-file=l", "--exit-on-lock-contention"]), file(true));
    }

    #[test]
    fn what_nothing_acts_on_is_known_and_an_unused_flag_is_not_among_it() {
        let cli = read(&[
            "--lock-file=l",
            "--exit-on-lock-contention",
            "--boot-id-file=/x",
            "--containerd=y",
            "--config=k.yaml",
        ]);
        let others = cli.flags().others;
        let expected = [("boot-id-file", "/x"), ("exit-on-lock-contention", "true"), ("lock-file", "l")];
        assert_eq!(others, expected.map(|(name, text)| (name, text.to_owned())).into());
        assert_eq!(cli.config().unwrap().to_str(), Some("/srv/k.yaml"));
        assert_eq!(read(&["--config="]).config(), None);
    }

    #[test]
    fn the_flag_for_seccomp_adds_to_the_file_and_takes_nothing_from_it() {
        let fields = |flag| read(&[flag]).flags().fields;
        assert_eq!(fields("--seccomp-default")[0].path, "seccompDefault");
        assert_eq!(fields("--seccomp-default=false"), []);
    }

    #[test]
    fn help_goes_before_the_version_and_a_kubelet_has_the_version_of_one() {
        let instead = |arguments: &[&str], is_kubelet| read(arguments).instead("p", is_kubelet);
        assert_eq!(instead(&[], false), None);
        assert_eq!(instead(&["--version=false"], true), None);
        assert!(instead(&["--version", "-h"], true).unwrap().contains("\nUsage:\n  p [flags]\n\nFlags:\n"));
        assert_eq!(instead(&["--version"], true).unwrap(), format!("Kubernetes {KUBELET_VERSION}\n"));
        assert_eq!(instead(&["--version"], false).unwrap(), format!("p {}\n", env!("CARGO_PKG_VERSION")));
        let raw = instead(&["--version=raw"], true).unwrap();
        assert!(raw.starts_with("version.Info{Major:\"1\", Minor:\"36\", GitVersion:\"v1.36."), "{raw}");
    }
}
