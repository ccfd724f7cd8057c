//! A fleet over etcd: the nodes behind `--etcd`, without their agents.
//!
//! `keelson apply`, `get` and `delete` read and write the keys of the nodes (architecture §6), so they work for a node that
//! is away, too; it does what is wanted when it is back. `logs` and `exec` go to the node's own API.

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
use keelson_etcd::keys::{NODES, Named, of_any_node};
use keelson_etcd::{Etcd, EtcdError, NodeKeys, Range};

use crate::args::{Command, DeleteWhat, EtcdArgs, GetWhat};
use crate::cmd::Session;
use crate::cmd::manifests::ObjectKind;
use crate::error::Failure;
use crate::near::near;

/// What a command with `--etcd` works on.
#[derive(Debug)]
pub(crate) struct Fleet {
    etcd: Etcd,
    /// `--node`.
    node: Option<String>,
}

/// What the keys alone say of the nodes.
#[derive(Debug, Default)]
struct Nodes {
    /// Every node with a key, and whether it lives.
    alive: BTreeMap<String, bool>,
}

impl Fleet {
    fn new(args: &EtcdArgs) -> Result<Self, Failure> {
        for endpoint in &args.etcd {
            if EtcdEndpoint::parse(endpoint).is_none() {
                return Err(Failure::Usage {
                    message: format!("{endpoint:?} is no endpoint of etcd: it {}", EtcdEndpoint::RULE),
                    hint: "name the members with commas between them".into(),
                });
            }
        }
        if let Some(node) = args.node.as_deref().filter(|node| node.is_empty() || node.contains('/')) {
            return Err(Failure::Usage {
                message: format!("--node {node:?} is no name of a node"),
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

    /// The nodes that have any key.
    async fn nodes(&self) -> Result<Nodes, Failure> {
        let keys = self.etcd.keys(&Range::prefix(NODES)).await.map_err(failure)?;
        let mut nodes = Nodes::default();
        for (node, named) in keys.iter().filter_map(|key| of_any_node(key)) {
            *nodes.alive.entry(node.to_owned()).or_default() |= named == Named::Lease;
        }
        Ok(nodes)
    }

    /// The nodes that a reading command is about: the one of `--node`, else all.
    async fn chosen(&self) -> Result<Nodes, Failure> {
        let Some(node) = &self.node else { return self.nodes().await };
        let alive = self.etcd.get(&NodeKeys::new(node).lease()).await.map_err(failure)?.is_some();
        Ok(Nodes { alive: [(node.clone(), alive)].into() })
    }

    /// The node that somebody has said: `--node`, else the one that the object names.
    fn said<'a>(&'a self, named: &'a str) -> Result<Option<&'a str>, Failure> {
        let named = Some(named).filter(|named| !named.is_empty());
        match (self.node.as_deref(), named) {
            (Some(node), Some(named)) if named != node => Err(Failure::Usage {
                message: format!("spec.nodeName is {named:?} and --node is {node:?}"),
                hint: "one of the two".into(),
            }),
            (node, named) => Ok(node.or(named)),
        }
    }

    /// The node that an object goes to: the one that is said, else the only one there is.
    async fn target(&self, named: &str, nodes: &mut Option<Nodes>) -> Result<String, Failure> {
        if let Some(node) = self.said(named)? {
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
                Err(Failure::Usage {
                    message: "it is not said which node this is for".into(),
                    hint: match list.as_slice() {
                        [] => "--node NAME; no node has any key yet".into(),
                        list => format!("--node with one of: {}", list.join(", ")),
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

    /// Which of the nodes somebody may have meant.
    fn meant(&self, name: &str) -> String {
        let near = near(name, self.alive.keys().map(String::as_str));
        if near.is_empty() {
            "`keelson get node --etcd …` lists the nodes".into()
        } else {
            format!("did you mean {}?", near.join(" or "))
        }
    }
}

/// What a failed call means for the person.
fn failure(error: EtcdError) -> Failure {
    let message = error.to_string();
    match error {
        EtcdError::Unreachable { .. } => Failure::NoEtcd {
            message,
            hint: "look whether the members run and --etcd names their client ports".into(),
        },
        EtcdError::Refused { .. } => Failure::Answer {
            message,
            hint: Some("--etcd-cert and --etcd-key, or --etcd-user, say who you are; a role on the node's keys is needed".into()),
        },
        EtcdError::TooLarge { .. } => Failure::Answer {
            message,
            hint: Some(
                "make the object smaller: etcd takes 1.5 MiB in one request, unless --max-request-bytes of its members says otherwise"
                    .into(),
            ),
        },
        EtcdError::Credential { field, path, message } => {
            let (flag, path) = (flag(field), path.display());
            Failure::Usage {
                message: format!("cannot use {path} that {flag} names: {message}"),
                hint: format!("name another file with {flag}"),
            }
        }
        EtcdError::Missing { field, message } => {
            let flag = flag(field);
            Failure::Usage {
                message: format!("{flag} is not given: {message}"),
                hint: format!("add {flag} FILE"),
            }
        }
        EtcdError::Endpoint { .. } => {
            Failure::Usage { message, hint: "`keelson help` lists the flags of --etcd".into() }
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

/// Carries out a command with `--etcd`.
pub(crate) async fn dispatch(session: &Session, command: &Command) -> Result<(), Failure> {
    let fleet = Fleet::new(&session.global.etcd)?;
    let other = |name: &str| {
        Err(Failure::Usage {
            message: format!("`keelson {name}` asks the agent of this machine; it has no --etcd"),
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
            GetWhat::Services { .. } => other("get services"),
            GetWhat::Volumes { .. } => other("get volumes"),
            GetWhat::Images { .. } => other("get images"),
            GetWhat::Sources => other("get sources"),
            GetWhat::Config => configuration::get(session, &fleet).await,
        },
        Command::Up(_) => other("up"),
        Command::Logs(args) => {
            session.without_format("logs", "leave -o out")?;
            pods::logs(session, &fleet, args).await
        }
        Command::Exec(args) => {
            session.without_format("exec", "leave -o out")?;
            pods::exec(session, &fleet, args).await
        }
        Command::Describe(_) => other("describe"),
        Command::Explain(_) => other("explain"),
        Command::Top(_) => other("top"),
        Command::Trace(_) => other("trace"),
        Command::Retry(_) => other("retry"),
        Command::Run(_) => other("run"),
        Command::Services(_) => other("services"),
        Command::Grpc(_) => other("grpc"),
        Command::Config(_) => other("config"),
        Command::Version(_) => other("version"),
        Command::Completion(_) => other("completion"),
        Command::Man(_) => other("man"),
    }
}
