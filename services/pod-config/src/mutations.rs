//! Changes of objects at the API server, for services that have to wait for the outcome. What may be changed is
//! [`keelson_pod_config_core::mutation`]'s to say.

use keelson_kube_api::{KubeApi, KubeError, Object, Patch, Resource};
use keelson_pod_config_core::mutation::{Mutation, NotAllowed, Rule, Verb, judge};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::mutate_request::Verb as WireVerb;
use keelson_service_kit::status::{chain, error};
use serde_json::{Value, json};
use tonic::{Code, Status};

/// Why nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum MutateError {
    /// The caller may not do it.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    /// The request cannot be meant.
    #[error("{0}")]
    Invalid(String),
    /// There is no API server.
    #[error("objects are changed at an API server, and the control plane of this node is {0}")]
    NoApiServer(&'static str),
    /// The API server does not answer or refuses.
    #[error(transparent)]
    Server(#[from] KubeError),
}

/// Makes a change that one of `callers` asks for, and gives the object as it is then; nothing after a deletion.
///
/// # Errors
/// It may not be made, cannot be meant, or the server has not made it.
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
    let rule = judge(callers, node_name, &mutation)?;
    let body = if verb == Verb::Delete { json!({}) } else { object(&body_json)? };
    check(rule, &mutation, &body, &uid)?;
    let Some(api) = api else { return Err(MutateError::NoApiServer(control_plane)) };
    let Some(resource) = resource(rule) else {
        return Err(MutateError::Invalid(format!("{kind} is not known to pod-config")));
    };
    let namespace = rule.namespaced.then_some(namespace.as_str());
    tracing::debug!(callers = callers.join(","), verb = verb.as_str(), kind, name, "an object is changed");
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
        .map_err(|error| MutateError::Invalid(format!("body_json is no JSON: {error}")))?;
    if value.is_object() { Ok(value) } else { Err(MutateError::Invalid("body_json is no object".to_owned())) }
}

/// The body must be about the object that was judged.
fn check(rule: &Rule, mutation: &Mutation<'_>, body: &Value, uid: &str) -> Result<(), MutateError> {
    let Mutation { kind, namespace, name, verb, .. } = *mutation;
    let metadata = &body["metadata"];
    let wrong = |what: String| Err(MutateError::Invalid(what));
    let whole = matches!(verb, Verb::Create | Verb::Update);
    for (field, found, expected) in [
        ("kind", &body["kind"], kind),
        ("metadata.name", &metadata["name"], name),
        ("metadata.namespace", &metadata["namespace"], namespace),
    ] {
        let missing_is_well = !whole || (field == "metadata.namespace" && !rule.namespaced);
        match found.as_str() {
            Some(text) if text == expected => {}
            None if found.is_null() && missing_is_well => {}
            _ => return wrong(format!("{field} of body_json is {found}, and {expected:?} was named")),
        }
    }
    if verb == Verb::Update && metadata["resourceVersion"].as_str().is_none_or(str::is_empty) {
        return wrong(
            "metadata.resourceVersion of body_json says which version is replaced, and is missing".to_owned(),
        );
    }
    if verb == Verb::Delete && uid.is_empty() {
        return wrong("uid says which object of the name is deleted, and is missing".to_owned());
    }
    Ok(())
}

/// Where the objects of a rule are.
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

/// What a caller is told.
pub fn status(cause: &MutateError) -> Status {
    let (code, reason) = match cause {
        MutateError::NotAllowed(NotAllowed::Name { .. }) => (Code::InvalidArgument, "BAD_FIELD"),
        MutateError::NotAllowed(_) => (Code::PermissionDenied, "MUTATION_NOT_ALLOWED"),
        MutateError::Invalid(_) => (Code::InvalidArgument, "BAD_FIELD"),
        MutateError::NoApiServer(_) => (Code::FailedPrecondition, "NO_API_SERVER"),
        MutateError::Server(error) => match error.code() {
            None | Some(408 | 429 | 500..) => (Code::Unavailable, "CONTROL_PLANE_AWAY"),
            Some(404) => (Code::NotFound, "OBJECT_UNKNOWN"),
            // Another version, another UID, or one of the name is there.
            Some(409) => (Code::Aborted, "CONFLICT"),
            Some(_) => (Code::FailedPrecondition, "MUTATION_REFUSED"),
        },
    };
    error(code, reason, chain(cause))
}

#[cfg(test)]
#[path = "mutations_tests.rs"]
mod tests;
