//! A fleet over etcd: commands with `--etcd`, which need no agent.
//!
//! `keelson apply`, `get` and `delete` read and write the keys of the nodes (architecture §6), so they work also for a node that
//! is down; it reads the keys when it is back. `logs` and `exec` call the node's own API.

mod apply;
mod configuration;
mod delete;
mod events;
mod get;
mod get_objects;
mod node_api;
mod objects;
mod pods;
mod watch;

use std::collections::{BTreeMap, BTreeSet};

use keelson_config::{Etcd as Settings, EtcdEndpoint};
use keelson_etcd::keys::{KeyKind, NODES, parse_key};
use keelson_etcd::{Etcd, EtcdError, NodeKeys, Range};

use crate::args::{Command, DeleteWhat, EtcdArgs, GetWhat};
use crate::cmd::manifests::ObjectKind;
use crate::error::CliError;
use crate::session::Session;
use crate::suggest::similar_names;

/// The etcd and the node of a command with `--etcd`.
#[derive(Debug)]
pub(crate) struct Fleet {
    etcd: Etcd,
    /// The value of `--node`.
    node: Option<String>,
}

/// The nodes that have keys.
#[derive(Debug, Default)]
struct Nodes {
    /// Every node with a key, and whether it has a lease.
    alive: BTreeMap<String, bool>,
}

impl Fleet {
    fn new(args: &EtcdArgs) -> Result<Self, CliError> {
        for endpoint in &args.etcd {
            if EtcdEndpoint::parse(endpoint).is_none() {
                return Err(CliError::Usage {
                    message: format!("{endpoint:?} is not an etcd endpoint: it {}", EtcdEndpoint::RULE),
                    hint: "separate the members with commas".into(),
                });
            }
        }
        if let Some(node) = args.node.as_deref().filter(|node| node.is_empty() || node.contains('/')) {
            return Err(CliError::Usage {
                message: format!("--node {node:?} is not a valid node name"),
                hint: "`keelson get node --etcd …` lists the nodes".into(),
            });
        }
        let settings = Settings {
            ca_file: args.etcd_ca.clone(),
            cert_file: args.etcd_cert.clone(),
            key_file: args.etcd_key.clone(),
            user: args.etcd_user.clone(),
            password_file: args.etcd_password_file.clone(),
            ..Settings::plain(args.etcd.clone())
        };
        Ok(Self { etcd: Etcd::new(settings), node: args.node.clone() })
    }

    /// All nodes that have a key.
    async fn nodes(&self) -> Result<Nodes, CliError> {
        let keys = self.etcd.keys(&Range::prefix(NODES)).await.map_err(from_etcd_error)?;
        let mut nodes = Nodes::default();
        for (node, named) in keys.iter().filter_map(|key| parse_key(key)) {
            *nodes.alive.entry(node.to_owned()).or_default() |= named == KeyKind::Lease;
        }
        Ok(nodes)
    }

    /// The nodes of a read command: the one of `--node`, else all.
    async fn selected_nodes(&self) -> Result<Nodes, CliError> {
        let Some(node) = &self.node else { return self.nodes().await };
        let alive = self.etcd.get(&NodeKeys::new(node).lease()).await.map_err(from_etcd_error)?.is_some();
        Ok(Nodes { alive: [(node.clone(), alive)].into() })
    }

    /// The requested node: `--node`, else the one that the object names.
    fn requested_node<'a>(&'a self, named: &'a str) -> Result<Option<&'a str>, CliError> {
        let named = Some(named).filter(|named| !named.is_empty());
        match (self.node.as_deref(), named) {
            (Some(node), Some(named)) if named != node => Err(CliError::Usage {
                message: format!("spec.nodeName is {named:?} and --node is {node:?}"),
                hint: "use one of the two, or make them equal".into(),
            }),
            (node, named) => Ok(node.or(named)),
        }
    }

    /// The node that an object goes to: the requested one, else the only one.
    async fn target_node(&self, named: &str, nodes: &mut Option<Nodes>) -> Result<String, CliError> {
        if let Some(node) = self.requested_node(named)? {
            return Ok(node.to_owned());
        }
        let known = match nodes.take() {
            Some(known) => known,
            None => self.nodes().await?,
        };
        let known = nodes.insert(known);
        match known.alive.keys().collect::<Vec<_>>().as_slice() {
            [only] => Ok((*only).clone()),
            all => {
                let list: Vec<&str> = all.iter().map(|name| name.as_str()).collect();
                Err(CliError::Usage {
                    message: "the command does not name a node".into(),
                    hint: match list.as_slice() {
                        [] => "add --node NAME; no node has a key yet".into(),
                        list => format!("add --node with one of: {}", list.join(", ")),
                    },
                })
            }
        }
    }
}

impl Nodes {
    fn names(&self) -> BTreeSet<String> {
        self.alive.keys().cloned().collect()
    }

    fn is_alive(&self, node: &str) -> bool {
        self.alive.get(node).copied().unwrap_or(false)
    }

    /// The hint for an unknown node name.
    fn suggestion(&self, name: &str) -> String {
        let similar = similar_names(name, self.alive.keys().map(String::as_str));
        if similar.is_empty() {
            "`keelson get node --etcd …` lists the nodes".into()
        } else {
            format!("did you mean {}?", similar.join(" or "))
        }
    }
}

/// The error for a failed call of etcd.
fn from_etcd_error(error: EtcdError) -> CliError {
    let message = error.to_string();
    match error {
        EtcdError::Unreachable { .. } => CliError::EtcdUnavailable {
            message,
            hint: "check that the members are running and that --etcd names their client ports".into(),
        },
        EtcdError::Refused { .. } => CliError::Failed {
            message,
            hint: Some("set --etcd-cert and --etcd-key, or --etcd-user; the user needs a role on the node's keys".into()),
        },
        EtcdError::TooLarge { .. } => CliError::Failed {
            message,
            hint: Some(
                "make the object smaller: etcd accepts 1.5 MiB in one request, unless --max-request-bytes of its members is larger"
                    .into(),
            ),
        },
        EtcdError::Credential { field, path, message } => {
            let (flag, path) = (flag(field), path.display());
            CliError::Usage {
                message: format!("cannot use {path} of {flag}: {message}"),
                hint: format!("name another file with {flag}"),
            }
        }
        EtcdError::Missing { field, message } => {
            let flag = flag(field);
            CliError::Usage {
                message: format!("{flag} is not given: {message}"),
                hint: format!("add {flag} FILE"),
            }
        }
        EtcdError::Endpoint { .. } => {
            CliError::Usage { message, hint: "`keelson help` lists the flags of --etcd".into() }
        }
    }
}

/// The flag for a field of `etcd` in the KeelsonConfiguration.
fn flag(field: &str) -> &str {
    match field {
        "caFile" => "--etcd-ca",
        "certFile" => "--etcd-cert",
        "keyFile" => "--etcd-key",
        "passwordFile" => "--etcd-password-file",
        other => other,
    }
}

/// Runs a command with `--etcd`.
pub(crate) async fn dispatch(session: &Session, command: &Command) -> Result<(), CliError> {
    let fleet = Fleet::new(&session.global.etcd)?;
    let unsupported = |name: &str| {
        Err(CliError::Usage {
            message: format!("`keelson {name}` calls the agent of this machine and takes no --etcd"),
            hint: "run it on the node itself; apply, delete, logs, exec and get of pods, node, events, secrets, configmaps and config take --etcd"
                .into(),
        })
    };
    match command {
        Command::Apply(args) => apply::run(session, &fleet, &args.files).await,
        Command::Delete(args) => {
            session.without_format("delete", "leave -o out")?;
            match args.what {
                Some(DeleteWhat::Config) => configuration::delete(&fleet).await,
                _ => delete::run(session, &fleet, args).await,
            }
        }
        Command::Get(args) => match &args.what {
            GetWhat::Pods { names, watch } => get::pods(session, &fleet, names, *watch).await,
            GetWhat::Node { name, watch } => get::nodes(session, &fleet, name.as_deref(), *watch).await,
            GetWhat::Events { about, watch } => events::run(session, &fleet, about.as_deref(), *watch).await,
            GetWhat::Secrets { names } => get_objects::run(session, &fleet, ObjectKind::Secret, names).await,
            GetWhat::ConfigMaps { names } => {
                get_objects::run(session, &fleet, ObjectKind::ConfigMap, names).await
            }
            GetWhat::Services { .. } => unsupported("get services"),
            GetWhat::Volumes { .. } => unsupported("get volumes"),
            GetWhat::Images { .. } => unsupported("get images"),
            GetWhat::Sources => unsupported("get sources"),
            GetWhat::Config => configuration::get(session, &fleet).await,
        },
        Command::Up(_) => unsupported("up"),
        Command::Logs(args) => {
            session.without_format("logs", "leave -o out")?;
            pods::logs(session, &fleet, args).await
        }
        Command::Exec(args) => {
            session.without_format("exec", "leave -o out")?;
            pods::exec(session, &fleet, args).await
        }
        Command::Describe(_) => unsupported("describe"),
        Command::Explain(_) => unsupported("explain"),
        Command::Top(_) => unsupported("top"),
        Command::Trace(_) => unsupported("trace"),
        Command::Retry(_) => unsupported("retry"),
        Command::Run(_) => unsupported("run"),
        Command::Services(_) => unsupported("services"),
        Command::Grpc(_) => unsupported("grpc"),
        Command::Config(_) => unsupported("config"),
        Command::Version(_) => unsupported("version"),
        Command::Completion(_) => unsupported("completion"),
        Command::Man(_) => unsupported("man"),
    }
}
