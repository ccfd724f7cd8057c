//! `KeelsonConfiguration`: the settings that a kubelet does not have.

use crate::document::{ConfigError, Document, Sourced};
use crate::reader::Reader;
use crate::strict;

/// The API version of the KeelsonConfiguration.
pub const KEELSON_API_VERSION: &str = "keelson/v1";
/// Its kind.
pub const KEELSON_KIND: &str = "KeelsonConfiguration";

/// All fields, for messages.
const FIELDS: &str = "runDir, stateDir, containerLinksDir, binDir, controlPlane, etcd.endpoints, \
                      etcd.caFile, etcd.certFile, etcd.keyFile, etcd.user, etcd.passwordFile, \
                      nodeConfiguration.trialPeriod, offline.startAfterReboot, offline.maxAge, uidBase, operatorGid, \
                      sandboxImage, imagePullProgressTimeout, startParallelism, sourceLimits, relistPeriod, manageHost, \
                      strictVerbs, systemBusAddress, logging.format, logging.level, \
                      tracing.endpoint, tracing.samplingRatePerMillion";

/// Reports fields that no group has read, and fields that occur more than once.
pub(crate) fn check_unread(document: &Document, reader: &Reader<'_>) -> Vec<ConfigError> {
    let unknown = reader.unread_fields().into_iter().map(|field| {
        let unknown = Sourced { value: "…", origin: document.origin(&field), field };
        unknown.error(format!("there is no such field; the fields are {FIELDS}"))
    });
    unknown.chain(document.duplicates.iter().map(strict::duplicate_error)).collect()
}
