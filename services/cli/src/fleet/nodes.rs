//! The etcd of a fleet, and the nodes that have keys there.

use std::collections::{BTreeMap, BTreeSet};

use keelson_config::{Etcd as Settings, EtcdEndpoint};
use keelson_etcd::keys::{KeyKind, NODES, parse_key};
use keelson_etcd::{Etcd, NodeKeys, Range};

use super::etcd_error::from_etcd_error;
use crate::args::EtcdArgs;
use crate::error::CliError;
use crate::suggest::similar_names;

/// The etcd and the node of a command with `--etcd`.
#[derive(Debug)]
pub(super) struct Fleet {
    pub(super) etcd: Etcd,
    /// The value of `--node`.
    pub(super) node: Option<String>,
}

/// The nodes that have keys.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    /// Every node with a key, and whether it has a lease.
    pub(super) alive: BTreeMap<String, bool>,
}

impl Fleet {
    pub(super) fn new(args: &EtcdArgs) -> Result<Self, CliError> {
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
    pub(super) async fn nodes(&self) -> Result<Nodes, CliError> {
        let keys = self.etcd.keys(&Range::prefix(NODES)).await.map_err(from_etcd_error)?;
        let mut nodes = Nodes::default();
        for (node, named) in keys.iter().filter_map(|key| parse_key(key)) {
            *nodes.alive.entry(node.to_owned()).or_default() |= named == KeyKind::Lease;
        }
        Ok(nodes)
    }

    /// The nodes of a read command: the one of `--node`, else all.
    pub(super) async fn selected_nodes(&self) -> Result<Nodes, CliError> {
        let Some(node) = &self.node else { return self.nodes().await };
        let alive = self.etcd.get(&NodeKeys::new(node).lease()).await.map_err(from_etcd_error)?.is_some();
        Ok(Nodes { alive: [(node.clone(), alive)].into() })
    }

    /// The requested node: `--node`, else the one that the object names.
    pub(super) fn requested_node<'a>(&'a self, named: &'a str) -> Result<Option<&'a str>, CliError> {
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
    pub(super) async fn target_node(
        &self,
        named: &str,
        nodes: &mut Option<Nodes>,
    ) -> Result<String, CliError> {
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
    pub(super) fn names(&self) -> BTreeSet<String> {
        self.alive.keys().cloned().collect()
    }

    pub(super) fn is_alive(&self, node: &str) -> bool {
        self.alive.get(node).copied().unwrap_or(false)
    }

    /// The hint for an unknown node name.
    pub(super) fn suggestion(&self, name: &str) -> String {
        let similar = similar_names(name, self.alive.keys().map(String::as_str));
        if similar.is_empty() {
            "`keelson get node --etcd …` lists the nodes".into()
        } else {
            format!("did you mean {}?", similar.join(" or "))
        }
    }
}
