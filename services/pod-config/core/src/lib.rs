//! The pure decisions of pod-config: no clock, no I/O, no runtime.
//!
//! | module | what it decides |
//! |---|---|
//! | [`desired_pod`] | the record of a pod, from its source to the wire |
//! | [`manifest`] | which objects a manifest contains, and where |
//! | [`static_pod`] | how a Pod of a manifest is defaulted, named and validated for this node (pod-lifecycle.md §2.1) |
//! | [`api_pod`] | how a pod of an API server is read (pod-lifecycle.md §2.4) |
//! | [`object`] | how a Secret or ConfigMap of a manifest is defaulted and validated |
//! | `object_rules` | how an API server validates a Secret or ConfigMap at its creation |
//! | `volume_object` | how a PersistentVolume or claim of a manifest is defaulted and validated |
//! | [`binder`] | which PersistentVolume each claim is bound to on a node without an API server |
//! | [`stored`] | how the value of an etcd key is read (architecture §6) |
//! | [`files`] | how the files of one source are combined: duplicates, last good versions, errors |
//! | [`merge`] | which changes a new set of a source makes (pod-lifecycle.md §2.5) |
//! | [`sent_record`] | the version of each sent pod, which is stored so that a restart sends the same again |
//! | [`scan`] | which files of a folder to read, and when a missing folder counts as empty |
//! | [`offline`] | which pods start after a reboot without the control plane (architecture §5) |
//! | [`service_env`] | the environment variables of services (runtime-and-resources.md §3.4) |
//! | [`pod_certificate`] | the request for a certificate of a pod (volumes.md §9.6) |
//! | [`token`] | the request for a service account token and its response (volumes.md §9.6) |
//! | [`error`] | the errors of a manifest, with their positions |
//! | [`redirect`] | which HTTP redirects are followed, and with which headers |
//! | [`mutation`] | which service may change which objects at the API server |
//! | [`node`] | the Node object until a control plane has one |
//!
//! [`parse_file`], in `parse`, combines [`manifest`], [`static_pod`], [`object`] and the private `volume_object`.

pub mod api_pod;
pub mod binder;
pub mod desired_pod;
pub mod error;
pub mod files;
pub mod manifest;
pub mod merge;
pub mod mutation;
pub mod node;
pub mod object;
mod object_rules;
pub mod offline;
mod parse;
pub mod pod_certificate;
pub mod redirect;
pub mod scan;
pub mod sent_record;
pub mod service_env;
pub mod static_pod;
pub mod stored;
pub mod token;
mod volume_object;

pub use error::{ManifestError, ManifestErrorKind};
pub use parse::{FileContent, ManifestWarning, parse_file, validate_documents};
