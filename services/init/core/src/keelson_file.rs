//! `KeelsonConfiguration`: the settings that a kubelet does not have.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::control_plane::ControlPlaneFile;
use crate::document::{ConfigError, Document, Reader, Sourced};
use crate::kubelet_file::{absolute, is_kind};
use crate::source_limits::SourceLimitsFile;
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
                      strictVerbs, logging.format, logging.level, \
                      tracing.endpoint, tracing.samplingRatePerMillion";

/// The largest user ID: 2^32 - 1 means "no user" (chown(2)).
const MAX_ID: u32 = u32::MAX - 1;

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct KeelsonFile {
    /// Folders, by their dotted path in the resolved configuration.
    pub(crate) folders: BTreeMap<&'static str, Sourced<String>>,
    pub(crate) control_plane: ControlPlaneFile,
    pub(crate) uid_base: Option<Sourced<u32>>,
    pub(crate) operator_gid: Option<Sourced<u32>>,
    pub(crate) sandbox_image: Option<Sourced<String>>,
    pub(crate) pull_progress_timeout: Option<Sourced<Duration>>,
    pub(crate) start_parallelism: Option<Sourced<u32>>,
    pub(crate) source_limits: SourceLimitsFile,
    pub(crate) relist_period: Option<Sourced<Duration>>,
    pub(crate) manage_host: Option<Sourced<bool>>,
    pub(crate) strict_verbs: Option<Sourced<bool>>,
    pub(crate) log_format: Option<Sourced<String>>,
    pub(crate) log_level: Option<Sourced<String>>,
    pub(crate) trace_endpoint: Option<Sourced<String>>,
    pub(crate) trace_rate: Option<Sourced<u32>>,
}

/// Reads the fields of a KeelsonConfiguration; an unknown field is an error.
pub(crate) fn read(document: &Document, errors: &mut Vec<ConfigError>) -> KeelsonFile {
    if !is_kind(document, KEELSON_API_VERSION, KEELSON_KIND, errors) {
        return KeelsonFile::default();
    }
    let mut reader = Reader::new(document, errors);
    let _ = (reader.string("apiVersion"), reader.string("kind"));
    let mut file = KeelsonFile::default();
    for (field, path) in [
        ("runDir", "paths.runDir"),
        ("stateDir", "paths.stateDir"),
        ("containerLinksDir", "paths.containerLinksDir"),
        ("binDir", "paths.binDir"),
    ] {
        if let Some(folder) = reader.string(field) {
            file.folders.insert(path, folder.map(|folder| absolute(&document.folder, &folder)));
        }
    }
    file.control_plane = ControlPlaneFile::read(&mut reader, &document.folder);
    file.uid_base = reader.u32("uidBase", 1..=MAX_ID - 16);
    file.operator_gid = reader.u32("operatorGid", 0..=MAX_ID);
    file.sandbox_image = reader.string("sandboxImage");
    file.pull_progress_timeout =
        reader.duration("imagePullProgressTimeout", Duration::from_secs(1)..=Duration::from_secs(24 * 3600));
    file.start_parallelism = reader.u32("startParallelism", 1..=1024);
    file.source_limits = SourceLimitsFile::read(&mut reader);
    file.relist_period = reader.duration("relistPeriod", Duration::from_secs(1)..=Duration::from_secs(3600));
    file.manage_host = reader.boolean("manageHost");
    file.strict_verbs = reader.boolean("strictVerbs");
    if reader.object("logging") {
        file.log_format = reader.choice("logging.format", &["text", "json"]);
        file.log_level = reader.string("logging.level");
    }
    if reader.object("tracing") {
        file.trace_endpoint = reader.string("tracing.endpoint");
        file.trace_rate = reader.u32("tracing.samplingRatePerMillion", 0..=1_000_000);
    }
    for field in reader.unread_fields() {
        let unknown = Sourced { value: "…", origin: document.origin(&field), field };
        errors.push(unknown.error(format!("there is no such field; the fields are {FIELDS}")));
    }
    errors.extend(document.duplicates.iter().map(strict::duplicate_error));
    file
}
