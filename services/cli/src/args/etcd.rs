//! The flags of a fleet, and what of them the environment may say.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::error::Failure;

/// A fleet over etcd in place of the agent of this machine.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Options for a fleet over etcd (apply, delete, logs, exec, get pods, node, events, secrets, configmaps, config)"
)]
pub(crate) struct EtcdArgs {
    /// Members of the etcd that is the nodes' control plane, with commas between them
    #[arg(long, global = true, value_name = "ENDPOINTS", value_delimiter = ',')]
    pub(crate) etcd: Vec<String>,
    /// The node that is meant [default: all to get; to apply, the one that the manifest names or the only one]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// PEM file of the authorities that the members are checked against [env: KEELSON_ETCD_CA]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) etcd_ca: Option<PathBuf>,
    /// PEM file of the certificate that says who you are, with --etcd-key [env: KEELSON_ETCD_CERT]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) etcd_cert: Option<PathBuf>,
    /// PEM file of its key [env: KEELSON_ETCD_KEY]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) etcd_key: Option<PathBuf>,
    /// User of etcd, with --etcd-password-file [env: KEELSON_ETCD_USER]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) etcd_user: Option<String>,
    /// File with the user's password [env: KEELSON_ETCD_PASSWORD_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) etcd_password_file: Option<PathBuf>,
    /// PEM file of the certificate that says who you are to a node, for logs and exec [default: --etcd-cert]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) node_cert: Option<PathBuf>,
    /// PEM file of its key [default: --etcd-key]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) node_key: Option<PathBuf>,
    /// Where logs and exec reach the node, as through a tunnel [default: where it says to be]
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub(crate) node_address: Option<String>,
}

impl EtcdArgs {
    /// What the line says, and of who you are also what the environment says. A variable that is empty counts as none.
    ///
    /// The environment names no members: what is meant for the agent of this machine never goes to a fleet by itself.
    ///
    /// # Errors
    /// A flag of a fleet without `--etcd`, which would change nothing; or one half of a pair.
    pub(crate) fn complete(mut self, variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        if self.etcd.is_empty() {
            let useless = self.given().next();
            return match useless {
                None => Ok(self),
                Some(flag) => Err(Failure::Usage {
                    message: format!(
                        "{flag} is about a fleet over etcd, and this is about the agent of this machine"
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
                let [there, absent] = if first { pair } else { [pair[1], pair[0]] };
                return Err(Failure::Usage {
                    message: format!("there is {there} without {absent}"),
                    hint: format!("add {absent}"),
                });
            }
        }
        Ok(self)
    }

    /// The flags that have a value, but for `--etcd`.
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

    /// The flags for a fleet of a line, with these variables in the environment.
    fn completed(line: &[&str], variables: &[(&str, &str)]) -> Result<EtcdArgs, Failure> {
        let cli = Cli::try_parse_from(["keelson"].iter().chain(line)).unwrap();
        cli.global.etcd.complete(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn flags_of_a_fleet_without_a_fleet_are_refused_wherever_they_stand() {
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
                let failure = completed(&line, &[]).unwrap_err();
                assert!(failure.to_string().starts_with(&format!("{flag} is about a fleet")), "{failure}");
                assert!(failure.hint().unwrap().contains("add --etcd ENDPOINTS"), "{:?}", failure.hint());
                assert_eq!(failure.exit_code(), 64);
            }
        }
        // All that there are, so that a new one is not forgotten.
        let command = EtcdArgs::augment_args(clap::Command::new("keelson"));
        let flags: Vec<_> = command.get_arguments().filter_map(|arg| arg.get_long()).collect();
        let line: Vec<_> = flags.iter().flat_map(|flag| [format!("--{flag}"), "x".to_owned()]).collect();
        let line: Vec<&str> = ["get", "pods"].into_iter().chain(line.iter().map(String::as_str)).collect();
        assert_eq!(completed(&line, &[]).unwrap().given().count(), flags.len() - 1);
    }

    #[test]
    fn who_you_are_may_stand_in_the_environment_and_changes_nothing_without_a_fleet() {
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
        assert_eq!(fleet.etcd_ca, Some("other".into()), "the line is stronger");
        assert_eq!((fleet.etcd_key, fleet.etcd_user), (Some("key".into()), Some("user".into())));
        let empty = all.map(|(name, _)| (name, ""));
        assert_eq!(completed(&["get", "pods", "--etcd", "h:1"], &empty).unwrap().given().count(), 0);
    }

    #[test]
    fn one_half_of_a_pair_is_refused_and_the_other_half_named() {
        let pairs = [
            ("--etcd-cert", "--etcd-key"),
            ("--etcd-user", "--etcd-password-file"),
            ("--node-cert", "--node-key"),
        ];
        for (first, second) in pairs {
            for (there, absent) in [(first, second), (second, first)] {
                let failure = completed(&["get", "pods", "--etcd", "h:1", there, "x"], &[]).unwrap_err();
                assert_eq!(failure.to_string(), format!("there is {there} without {absent}"));
                assert_eq!((failure.hint(), failure.exit_code()), (Some(format!("add {absent}")), 64));
            }
            completed(&["get", "pods", "--etcd", "h:1", first, "x", second, "x"], &[]).unwrap();
        }
        let key = [("KEELSON_ETCD_KEY", "key")];
        completed(&["get", "pods", "--etcd", "h:1", "--etcd-cert", "x"], &key).unwrap();
        completed(&["get", "pods", "--etcd", "h:1"], &key).unwrap_err();
    }
}
