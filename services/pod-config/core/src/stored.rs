//! Pods and other objects in etcd, one per key (architecture §6).
//!
//! Parity: a kubelet has no store but the API. A pod in etcd is treated like an API pod: it keeps its name, is evicted and
//! preempted by its priority class, and its image may be changed while it runs. As in the API, the rest of its spec is immutable;
//! here a changed spec is another pod of the same name, which starts when the first one has ended.

use keelson_kube_model::PodFullName;

use crate::error::{ManifestError, ManifestErrorKind};
use crate::manifest::Kind;
use crate::object::ObjectKey;
use crate::parse::{FileContent, parse_file};
use crate::static_pod::StaticRules;

/// The object that a key must contain, from the key's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpectedObject<'a> {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace; empty for a PersistentVolume.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
}

/// Parses the value of `key`: one object as YAML or JSON, which must be the `expected` one. `rules` are those of files;
/// `create_revision` is the etcd revision at which the key was created.
///
/// # Errors
/// Everything that is wrong with the object.
pub fn parse_stored(
    bytes: &[u8],
    key: &str,
    expected: ExpectedObject<'_>,
    create_revision: i64,
    rules: &StaticRules,
) -> Result<FileContent, Vec<ManifestError>> {
    let rules = StaticRules { stored: Some(create_revision), ..rules.clone() };
    let content = parse_file(bytes, key, &rules)?;
    let pods = content.pods.iter().map(|pod| (Kind::Pod, &pod.namespace, &pod.name));
    let objects = content.objects.iter().map(|o| (o.key.kind, &o.key.namespace, &o.key.name));
    let found: Vec<_> = pods.chain(objects).collect();
    let ExpectedObject { kind, namespace, name } = expected;
    match *found.as_slice() {
        [(k, ns, n)] if k == kind && ns == namespace && n == name => Ok(content),
        [(k, ns, n)] => {
            let key = |kind, namespace: &str, name: &str| ObjectKey {
                kind,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            };
            let (wanted, found) = (key(kind, namespace, name), key(k, ns, n));
            let message = format!("the key is for the {wanted}, but the object is the {found}");
            let field = if k != kind {
                "kind"
            } else if ns != namespace {
                "metadata.namespace"
            } else {
                "metadata.name"
            };
            Err(vec![mismatch(expected, field, message)])
        }
        ref several => {
            let message = format!("a key must contain one object, but there are {}", several.len());
            Err(vec![mismatch(expected, "", message)])
        }
    }
}

fn mismatch(expected: ExpectedObject<'_>, field: &str, message: String) -> ManifestError {
    let pod = (expected.kind == Kind::Pod).then(|| PodFullName::new(expected.name, expected.namespace));
    ManifestError { pod, field: field.to_owned(), ..ManifestError::file(ManifestErrorKind::Invalid, message) }
}
