//! Changes objects at the API server for services that have to wait for the outcome. [`keelson_pod_config_core::mutation`] has
//! the rules.

use keelson_kube_api::{KubeApi, KubeError, Object, Patch, Resource};
use keelson_pod_config_core::mutation::{Mutation, PermissionError, Rule, Verb, authorize};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::mutate_request::Verb as WireVerb;
use keelson_service_kit::status::{chain, error};
use serde_json::{Value, json};
use tonic::{Code, Status};

/// Why nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum MutateError {
    /// The caller may not make this change.
    #[error(transparent)]
    Permission(#[from] PermissionError),
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// There is no API server.
    #[error("changing objects needs an API server, and the control plane of this node is {0}")]
    NoApiServer(&'static str),
    /// The API server is unreachable or refuses.
    #[error(transparent)]
    Server(#[from] KubeError),
}

/// Makes a change for a caller that may be any of `callers`. Returns the changed object; `None` after a deletion.
///
/// # Errors
/// The change is not allowed, is invalid, or failed at the server.
pub async fn mutate(
    api: Option<&KubeApi>,
    control_plane: &'static str,
    callers: &[&str],
    node_name: &str,
    request: pb::MutateRequest,
) -> Result<Option<Object>, MutateError> {
    let verb = match request.verb() {
        WireVerb::Create => Verb::Create,
        WireVerb::Update => Verb::Update,
        WireVerb::StrategicPatch | WireVerb::MergePatch => Verb::Patch,
        WireVerb::Delete => Verb::Delete,
        WireVerb::Unspecified => return Err(MutateError::Invalid("verb must be given".to_owned())),
    };
    let wire_verb = request.verb();
    let pb::MutateRequest { kind, subresource, namespace, name, body_json, uid, .. } = request;
    let mutation =
        Mutation { kind: &kind, subresource: &subresource, namespace: &namespace, name: &name, verb };
    let rule = authorize(callers, node_name, &mutation)?;
    let body = if verb == Verb::Delete { json!({}) } else { object(&body_json)? };
    check(rule, &mutation, &body, &uid)?;
    let Some(api) = api else { return Err(MutateError::NoApiServer(control_plane)) };
    let Some(resource) = resource(rule) else {
        return Err(MutateError::Invalid(format!("{kind} is not known to pod-config")));
    };
    let namespace = rule.namespaced.then_some(namespace.as_str());
    tracing::debug!(callers = callers.join(","), verb = verb.as_str(), kind, name, "changing an object");
    let part = (!subresource.is_empty()).then_some(subresource.as_str());
    let changed = match wire_verb {
        WireVerb::Create => api.create(resource, namespace, &body).await?,
        WireVerb::Update => api.replace(resource, namespace, &body).await?,
        WireVerb::StrategicPatch => {
            api.patch(resource, namespace, &name, part, (Patch::Strategic, &body)).await?
        }
        WireVerb::MergePatch => api.patch(resource, namespace, &name, part, (Patch::Merge, &body)).await?,
        WireVerb::Delete | WireVerb::Unspecified => {
            api.delete(resource, namespace, &name, &json!({"preconditions": {"uid": uid}})).await?;
            return Ok(None);
        }
    };
    Ok(Some(changed))
}

fn object(json: &[u8]) -> Result<Value, MutateError> {
    let value: Value = serde_json::from_slice(json)
        .map_err(|error| MutateError::Invalid(format!("body_json is not JSON: {error}")))?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(MutateError::Invalid("body_json is not an object".to_owned()))
    }
}

/// Checks that the body is about the object that was authorized.
fn check(rule: &Rule, mutation: &Mutation<'_>, body: &Value, uid: &str) -> Result<(), MutateError> {
    let Mutation { kind, namespace, name, verb, .. } = *mutation;
    let metadata = &body["metadata"];
    let invalid = |what: String| Err(MutateError::Invalid(what));
    let is_whole_object = matches!(verb, Verb::Create | Verb::Update);
    for (field, found, expected) in [
        ("kind", &body["kind"], kind),
        ("metadata.name", &metadata["name"], name),
        ("metadata.namespace", &metadata["namespace"], namespace),
    ] {
        let may_be_missing = !is_whole_object || (field == "metadata.namespace" && !rule.namespaced);
        match found.as_str() {
            Some(text) if text == expected => {}
            None if found.is_null() && may_be_missing => {}
            _ => {
                return invalid(format!(
                    "{field} of body_json is {found}, but the request names {expected:?}"
                ));
            }
        }
    }
    if verb == Verb::Update && metadata["resourceVersion"].as_str().is_none_or(str::is_empty) {
        return invalid(
            "metadata.resourceVersion of body_json is missing; it must name the version to replace"
                .to_owned(),
        );
    }
    if verb == Verb::Delete && uid.is_empty() {
        return invalid("uid is missing; it must name the object to delete".to_owned());
    }
    Ok(())
}

/// The API resource of a rule.
fn resource(rule: &Rule) -> Option<Resource> {
    match rule.kind {
        "CSINode" => Some(Resource {
            group: "storage.k8s.io",
            version: "v1",
            plural: "csinodes",
            namespaced: rule.namespaced,
        }),
        "PersistentVolumeClaim" => Some(Resource {
            group: "",
            version: "v1",
            plural: "persistentvolumeclaims",
            namespaced: rule.namespaced,
        }),
        _ => None,
    }
}

/// The gRPC status of an error.
pub fn status(cause: &MutateError) -> Status {
    let (code, reason) = match cause {
        MutateError::Permission(PermissionError::InvalidName { .. }) => (Code::InvalidArgument, "BAD_FIELD"),
        MutateError::Permission(_) => (Code::PermissionDenied, "MUTATION_NOT_ALLOWED"),
        MutateError::Invalid(_) => (Code::InvalidArgument, "BAD_FIELD"),
        MutateError::NoApiServer(_) => (Code::FailedPrecondition, "NO_API_SERVER"),
        MutateError::Server(error) => match error.code() {
            None | Some(408 | 429 | 500..) => (Code::Unavailable, "CONTROL_PLANE_AWAY"),
            Some(404) => (Code::NotFound, "OBJECT_UNKNOWN"),
            // The version or UID differs, or the name exists already.
            Some(409) => (Code::Aborted, "CONFLICT"),
            Some(_) => (Code::FailedPrecondition, "MUTATION_REFUSED"),
        },
    };
    error(code, reason, chain(cause))
}

#[cfg(test)]
#[path = "mutations_tests.rs"]
mod tests;
