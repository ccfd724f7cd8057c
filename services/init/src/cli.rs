//! The command line.

use std::collections::BTreeMap;
use std::path::PathBuf;

use keelson_config::KUBELET_VERSION;
use keelson_init_core::flags::{CommandLine, FieldFlag, FlagError, Request, help, parse};
use keelson_init_core::{Flags, flag_lines, shown_flags};
use serde_json::Value;

use crate::lock_file::LockFile;

/// The flags without a KubeletConfiguration field that [`Flags`], a method here, or the parser handles.
const HANDLED_FLAGS: &[&str] = &[
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

/// A parsed command line.
#[derive(Debug, Clone, Default)]
pub struct Cli(CommandLine);

impl Cli {
    /// Parses the arguments after the program name; relative paths start from `cwd`.
    ///
    /// # Errors
    /// The first error.
    pub fn parse(arguments: &[String], cwd: &str) -> Result<Self, FlagError> {
        parse(arguments, cwd).map(Self)
    }

    /// The text to print instead of running, for `--help` and `--version`.
    pub fn early_output(&self, program: &str, is_kubelet: bool) -> Option<String> {
        match (self.0.request, is_kubelet) {
            (Request::Run, _) => None,
            (Request::Help, _) => Some(help(program)),
            (Request::Version { raw: false }, true) => Some(format!("Kubernetes {KUBELET_VERSION}\n")),
            (Request::Version { raw: false }, false) => {
                Some(format!("{program} {}\n", env!("CARGO_PKG_VERSION")))
            }
            (Request::Version { raw: true }, _) => Some(raw_version()),
        }
    }

    /// The warnings about deprecated flags.
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
        Some(LockFile { path, exit_on_contention: self.0.is_on("exit-on-lock-contention") })
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

    /// The values that the resolution depends on.
    pub fn flags(&self) -> Flags {
        let line = &self.0;
        let mut fields = line.fields.clone();
        if line.is_on("seccomp-default") {
            // The flag can only turn the field on.
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
            others: line.other_flags_except(HANDLED_FLAGS),
        }
    }

    /// The log lines about the flags at this verbosity.
    pub fn log_lines(&self, verbosity: i64) -> Vec<String> {
        flag_lines(&self.0, verbosity)
    }

    /// All flags with their values, for `/flagz`.
    pub fn all_flags(&self) -> BTreeMap<&'static str, String> {
        shown_flags(&self.0)
    }
}

/// The version with all details, in a kubelet's format (node-and-api.md §1.3).
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
    fn node_labels_flag_may_be_repeated() {
        let cli = read(&["--node-labels", "a=1,b=2", "--node-labels=c=3"]);
        assert_eq!(cli.flags().node_labels, ["a=1,b=2,c=3"]);
    }

    #[test]
    fn lock_file_is_relative_to_the_working_directory_and_empty_means_none() {
        let lock = |arguments: &[&str]| read(arguments).lock_file();
        let file = |exit_on_contention| Some(LockFile { path: "/srv/l".into(), exit_on_contention });
        assert_eq!(lock(&[]), None);
        assert_eq!(lock(&["--lock-file="]), None);
        assert_eq!(lock(&["--lock-file=l"]), file(false));
        assert_eq!(lock(&["--lock-file=l", "--exit-on-lock-contention=false"]), file(false));
        assert_eq!(lock(&["--lock-file=l", "--exit-on-lock-contention"]), file(true));
    }

    #[test]
    fn other_flags_are_passed_on_and_flags_without_effect_are_not() {
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
    fn seccomp_default_flag_can_only_enable_the_field() {
        let fields = |flag| read(&[flag]).flags().fields;
        assert_eq!(fields("--seccomp-default")[0].path, "seccompDefault");
        assert_eq!(fields("--seccomp-default=false"), []);
    }

    #[test]
    fn help_has_precedence_and_kubelet_prints_a_kubernetes_version() {
        let early_output = |arguments: &[&str], is_kubelet| read(arguments).early_output("p", is_kubelet);
        assert_eq!(early_output(&[], false), None);
        assert_eq!(early_output(&["--version=false"], true), None);
        assert!(
            early_output(&["--version", "-h"], true).unwrap().contains("\nUsage:\n  p [flags]\n\nFlags:\n")
        );
        assert_eq!(early_output(&["--version"], true).unwrap(), format!("Kubernetes {KUBELET_VERSION}\n"));
        assert_eq!(
            early_output(&["--version"], false).unwrap(),
            format!("p {}\n", env!("CARGO_PKG_VERSION"))
        );
        let raw = early_output(&["--version=raw"], true).unwrap();
        assert!(raw.starts_with("version.Info{Major:\"1\", Minor:\"36\", GitVersion:\"v1.36."), "{raw}");
    }
}
