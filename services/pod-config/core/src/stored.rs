//! Pods, Secrets and ConfigMaps that stand in a store, each under a key of its own (architecture §6).
//!
//! Parity: a kubelet knows no store but the API's. A pod of a store is treated as one of the API: it keeps its name, is
//! evicted and preempted as its class says, and an image may be changed while it runs. The rest of its spec cannot
//! change, as in the API; here a change makes another pod of the same name, which starts when the first one is gone.

use keelson_kube_model::PodFullName;

use crate::error::{ManifestError, Why};
use crate::manifest::Kind;
use crate::parse::{FileContent, parse_file};
use crate::static_pod::StaticRules;

/// What a key promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredName<'a> {
    /// Pod, Secret or ConfigMap.
    pub kind: Kind,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
}

/// Reads the value of `key`, one object as YAML or JSON, which must be the one that the key promises. `rules` are those of
/// files; `create_revision` is the revision of the store that made the key.
///
/// # Errors
/// Everything that is wrong with the object.
pub fn parse_stored(
    bytes: &[u8],
    key: &str,
    promised: StoredName<'_>,
    create_revision: i64,
    rules: &StaticRules,
) -> Result<FileContent, Vec<ManifestError>> {
    let rules = StaticRules { stored: Some(create_revision), ..rules.clone() };
    let content = parse_file(bytes, key, &rules)?;
    let pods = content.pods.iter().map(|pod| (Kind::Pod, &pod.namespace, &pod.name));
    let objects = content.objects.iter().map(|o| (o.key.kind, &o.key.namespace, &o.key.name));
    let found: Vec<_> = pods.chain(objects).collect();
    let StoredName { kind, namespace, name } = promised;
    match *found.as_slice() {
        [(k, ns, n)] if k == kind && ns == namespace && n == name => Ok(content),
        [(k, ns, n)] => {
            let message = format!(
                "the key is that of the {} {namespace}/{name}, and the object is the {} {ns}/{n}",
                kind.as_str(),
                k.as_str()
            );
            let field = if k != kind {
                "kind"
            } else if ns != namespace {
                "metadata.namespace"
            } else {
                "metadata.name"
            };
            Err(vec![refused(promised, field, message)])
        }
        ref several => {
            let message = format!("one key holds one object, and there are {}", several.len());
            Err(vec![refused(promised, "", message)])
        }
    }
}

fn refused(promised: StoredName<'_>, field: &str, message: String) -> ManifestError {
    let pod = (promised.kind == Kind::Pod).then(|| PodFullName::new(promised.name, promised.namespace));
    ManifestError { pod, field: field.to_owned(), ..ManifestError::file(Why::Invalid, message) }
}
