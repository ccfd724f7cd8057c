//! The flags for a fleet over etcd, and the environment variables that set some of them.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::error::CliError;

/// A fleet over etcd instead of the agent of this machine.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Options for a fleet over etcd (apply, delete, logs, exec, get pods, node, events, secrets, configmaps, pv, pvc, config)"
)]
pub(crate) struct EtcdArgs {
    /// Members of the etcd that is the nodes' control plane, separated by commas
    #[arg(long, global = true, value_name = "ENDPOINTS", value_delimiter = ',')]
    pub(crate) etcd: Vec<String>,
    /// The node [default: for get, all; for apply, the node that the manifest names, or the only one]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// PEM file of the CA certificates that the members are verified against [env: KEELSON_ETCD_CA]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) etcd_ca: Option<PathBuf>,
    /// PEM file of the client certificate, with --etcd-key [env: KEELSON_ETCD_CERT]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) etcd_cert: Option<PathBuf>,
    /// PEM file of the client key [env: KEELSON_ETCD_KEY]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) etcd_key: Option<PathBuf>,
    /// etcd user, with --etcd-password-file [env: KEELSON_ETCD_USER]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) etcd_user: Option<String>,
    /// File with the user's password [env: KEELSON_ETCD_PASSWORD_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) etcd_password_file: Option<PathBuf>,
    /// PEM file of the client certificate for the node, for logs and exec [default: --etcd-cert]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) node_cert: Option<PathBuf>,
    /// PEM file of the client key for the node [default: --etcd-key]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) node_key: Option<PathBuf>,
    /// Address of the node's API for logs and exec, for example of a tunnel [default: the node's own address]
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub(crate) node_address: Option<String>,
}

impl EtcdArgs {
    /// Fills in the credentials that the command line leaves out from the environment. An empty variable counts as unset.
    ///
    /// The environment never names members, so that a command meant for the agent of this machine cannot go to a fleet.
    ///
    /// # Errors
    /// A fleet flag without `--etcd`, which would have no effect; or one half of a pair.
    pub(crate) fn complete(mut self, variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, CliError> {
        if self.etcd.is_empty() {
            let unused = self.given().next();
            return match unused {
                None => Ok(self),
                Some(flag) => Err(CliError::Usage {
                    message: format!(
                        "{flag} is about a fleet over etcd, and without --etcd the command is about the agent of this machine"
                    ),
                    hint: format!("add --etcd ENDPOINTS, or leave {flag} out"),
                }),
            };
        }
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let file = |name: &str| variable(name).map(PathBuf::from);
        self.etcd_ca = self.etcd_ca.or_else(|| file("KEELSON_ETCD_CA"));
        self.etcd_cert = self.etcd_cert.or_else(|| file("KEELSON_ETCD_CERT"));
        self.etcd_key = self.etcd_key.or_else(|| file("KEELSON_ETCD_KEY"));
        let user = || variable("KEELSON_ETCD_USER").map(|user| user.to_string_lossy().into_owned());
        self.etcd_user = self.etcd_user.or_else(user);
        self.etcd_password_file = self.etcd_password_file.or_else(|| file("KEELSON_ETCD_PASSWORD_FILE"));
        for pair in [
            ["--etcd-cert", "--etcd-key"],
            ["--etcd-user", "--etcd-password-file"],
            ["--node-cert", "--node-key"],
        ] {
            let [first, second] = pair.map(|flag| self.given().any(|given| given == flag));
            if first != second {
                let [present, absent] = if first { pair } else { [pair[1], pair[0]] };
                return Err(CliError::Usage {
                    message: format!("{present} is given without {absent}"),
                    hint: format!("add {absent}"),
                });
            }
        }
        Ok(self)
    }

    /// The fleet flags that have a value, except `--etcd`.
    fn given(&self) -> impl Iterator<Item = &'static str> {
        let all = [
            ("--node", self.node.is_some()),
            ("--etcd-ca", self.etcd_ca.is_some()),
            ("--etcd-cert", self.etcd_cert.is_some()),
            ("--etcd-key", self.etcd_key.is_some()),
            ("--etcd-user", self.etcd_user.is_some()),
            ("--etcd-password-file", self.etcd_password_file.is_some()),
            ("--node-cert", self.node_cert.is_some()),
            ("--node-key", self.node_key.is_some()),
            ("--node-address", self.node_address.is_some()),
        ];
        all.into_iter().filter_map(|(flag, is_given)| is_given.then_some(flag))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Cli;

    /// The fleet flags of a command line, with these environment variables.
    fn completed(line: &[&str], variables: &[(&str, &str)]) -> Result<EtcdArgs, CliError> {
        let cli = Cli::try_parse_from(["keelson"].iter().chain(line)).unwrap();
        cli.global.etcd.complete(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn fleet_flags_without_etcd_are_refused_at_any_position() {
        for flag in [
            "--node",
            "--etcd-ca",
            "--etcd-cert",
            "--etcd-key",
            "--etcd-user",
            "--etcd-password-file",
            "--node-cert",
            "--node-key",
            "--node-address",
        ] {
            for line in [[flag, "x", "delete", "pod", "web"], ["delete", "pod", "web", flag, "x"]] {
                let error = completed(&line, &[]).unwrap_err();
                assert!(error.to_string().starts_with(&format!("{flag} is about a fleet")), "{error}");
                assert!(error.hint().unwrap().contains("add --etcd ENDPOINTS"), "{:?}", error.hint());
                assert_eq!(error.exit_code(), 64);
            }
        }
        // All flags, so that a new one is not forgotten.
        let command = EtcdArgs::augment_args(clap::Command::new("keelson"));
        let flags: Vec<_> = command.get_arguments().filter_map(|arg| arg.get_long()).collect();
        let line: Vec<_> = flags.iter().flat_map(|flag| [format!("--{flag}"), "x".to_owned()]).collect();
        let line: Vec<&str> = ["get", "pods"].into_iter().chain(line.iter().map(String::as_str)).collect();
        assert_eq!(completed(&line, &[]).unwrap().given().count(), flags.len() - 1);
    }

    #[test]
    fn environment_credentials_apply_only_with_etcd() {
        let all = [
            ("KEELSON_ETCD", "http://h:1"),
            ("KEELSON_ETCD_CA", "ca"),
            ("KEELSON_ETCD_CERT", "cert"),
            ("KEELSON_ETCD_KEY", "key"),
            ("KEELSON_ETCD_USER", "user"),
            ("KEELSON_ETCD_PASSWORD_FILE", "file"),
        ];
        let local = completed(&["get", "pods"], &all).unwrap();
        assert_eq!((local.etcd.len(), local.given().count()), (0, 0));
        let fleet = completed(&["get", "pods", "--etcd", "http://h:1", "--etcd-ca", "other"], &all).unwrap();
        assert_eq!(
            fleet.given().collect::<Vec<_>>(),
            ["--etcd-ca", "--etcd-cert", "--etcd-key", "--etcd-user", "--etcd-password-file"]
        );
        assert_eq!(fleet.etcd_ca, Some("other".into()), "the command line takes precedence");
        assert_eq!((fleet.etcd_key, fleet.etcd_user), (Some("key".into()), Some("user".into())));
        let empty = all.map(|(name, _)| (name, ""));
        assert_eq!(completed(&["get", "pods", "--etcd", "h:1"], &empty).unwrap().given().count(), 0);
    }

    #[test]
    fn half_of_a_flag_pair_is_refused_and_the_other_half_named() {
        let pairs = [
            ("--etcd-cert", "--etcd-key"),
            ("--etcd-user", "--etcd-password-file"),
            ("--node-cert", "--node-key"),
        ];
        for (first, second) in pairs {
            for (present, absent) in [(first, second), (second, first)] {
                let error = completed(&["get", "pods", "--etcd", "h:1", present, "x"], &[]).unwrap_err();
                assert_eq!(error.to_string(), format!("{present} is given without {absent}"));
                assert_eq!((error.hint(), error.exit_code()), (Some(format!("add {absent}")), 64));
            }
            completed(&["get", "pods", "--etcd", "h:1", first, "x", second, "x"], &[]).unwrap();
        }
        let key = [("KEELSON_ETCD_KEY", "key")];
        completed(&["get", "pods", "--etcd", "h:1", "--etcd-cert", "x"], &key).unwrap();
        completed(&["get", "pods", "--etcd", "h:1"], &key).unwrap_err();
    }
}
