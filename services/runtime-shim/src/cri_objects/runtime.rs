//! The runtime itself: its version, conditions and features.

use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::runtime_conditions::{Condition, Readiness, readiness};
use tonic::Status;

use super::response_checks;

/// The runtime's name and version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeVersion {
    /// Its name, for example `containerd`.
    pub name: String,
    /// Its version.
    pub version: String,
}

impl RuntimeVersion {
    /// Translates the response.
    ///
    /// # Errors
    /// INTERNAL, with the names of the mandatory fields that are missing.
    pub fn parse(response: cri::VersionResponse) -> Result<Self, Status> {
        response_checks::check_version(&response)?;
        Ok(Self { name: response.runtime_name, version: response.runtime_version })
    }
}

/// The runtime's two conditions and its features.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RuntimeStatus {
    /// Whether the runtime and its network are ready.
    pub readiness: Readiness,
    /// The runtime handlers by name.
    pub handlers: Vec<pb::RuntimeHandler>,
    /// Whether `supplementalGroupsPolicy` is supported; `None`: not reported.
    pub supplemental_groups_policy: Option<bool>,
}

impl From<cri::StatusResponse> for RuntimeStatus {
    fn from(response: cri::StatusResponse) -> Self {
        let reported = response.status.map(|status| status.conditions).unwrap_or_default();
        let conditions: Vec<Condition<'_>> = reported
            .iter()
            .map(|c| Condition { kind: &c.r#type, status: c.status, reason: &c.reason, message: &c.message })
            .collect();
        let mut handlers: Vec<pb::RuntimeHandler> =
            response.runtime_handlers.into_iter().map(handler).collect();
        handlers.sort_by(|one, other| one.name.cmp(&other.name));
        Self {
            readiness: readiness(&conditions),
            handlers,
            supplemental_groups_policy: response.features.map(|features| features.supplemental_groups_policy),
        }
    }
}

fn handler(listed: cri::RuntimeHandler) -> pb::RuntimeHandler {
    let features = listed.features.unwrap_or_default();
    pb::RuntimeHandler {
        name: listed.name,
        recursive_read_only_mounts: features.recursive_read_only_mounts,
        user_namespaces: features.user_namespaces,
    }
}

/// The sandbox image in the runtime's own configuration, which containerd shows in the verbose status as JSON.
pub(crate) fn sandbox_image(response: &cri::StatusResponse) -> Option<String> {
    let config: serde_json::Value = serde_json::from_str(response.info.get("config")?).ok()?;
    let name = config.get("sandboxImage")?.as_str()?;
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_image_is_read_from_the_runtimes_configuration() {
        for (config, expected) in [
            (Some(r#"{"sandboxImage":"pause:1"}"#), Some("pause:1")),
            (Some(r#"{"sandboxImage":""}"#), None),
            (Some(r#"{"sandboxImage":7}"#), None),
            (Some("{}"), None),
            (Some("no JSON"), None),
            (None, None),
        ] {
            let info = config.map(|config| ("config".to_owned(), config.to_owned())).into_iter().collect();
            let response = cri::StatusResponse { info, ..Default::default() };
            assert_eq!(sandbox_image(&response).as_deref(), expected, "{config:?}");
        }
    }
}
