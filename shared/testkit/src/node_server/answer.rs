//! The server's responses to requests, except watches.

use serde_json::{Value, json};

use super::objects::{Denied, Objects, Selection, now};
use super::patch::Lists;
use super::request::{Request, Target};
use super::rules;

/// The user of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum User<'a> {
    /// May do everything.
    Admin,
    /// `system:node:NAME` in the group `system:nodes`.
    Node(&'a str),
}

/// Refuses requests that the user is not authorized for, with an API server's message.
pub(super) fn authorize(user: User<'_>, request: &Request, objects: &Objects) -> Result<(), Denied> {
    let User::Node(node) = user else { return Ok(()) };
    rules::authorize(node, request, objects).map_err(|reason| {
        let target = &request.target;
        let (resource, group) = (target.whole_resource(), &target.group);
        let name = if request.name().is_empty() { String::new() } else { format!(" {:?}", request.name()) };
        let scope = match target.namespace.as_str() {
            "" => "at the cluster scope".to_owned(),
            namespace => format!("in the namespace {namespace:?}"),
        };
        Denied::forbidden(format!(
            "{}{name} is forbidden: User \"system:node:{node}\" cannot {} resource {resource:?} in API group {group:?} \
             {scope}: {reason}",
            target.resource, request.verb,
        ))
    })
}

fn admit(
    user: User<'_>,
    request: &Request,
    old: Option<&Value>,
    new: &Value,
    objects: &Objects,
) -> Result<(), Denied> {
    let User::Node(node) = user else { return Ok(()) };
    rules::admit(node, request, old, new, objects).map_err(|reason| {
        let target = &request.target;
        Denied::forbidden(format!("{} {:?} is forbidden: {reason}", target.resource, request.name()))
    })
}

/// Refuses requests that admission does not allow for the current objects; changes nothing.
pub(super) fn check(
    user: User<'_>,
    request: &Request,
    lists: Lists,
    objects: &Objects,
) -> Result<(), Denied> {
    authorize(user, request, objects)?;
    let whole = Target { subresource: String::new(), ..request.target.clone() };
    match (request.verb, objects.get(&whole)) {
        ("create", _) => admit(user, request, None, &request.body, objects),
        ("update", old) => admit(user, request, old, &request.body, objects),
        ("patch", Some(old)) => {
            let new = objects.patched(&request.target, &request.body, lists)?;
            admit(user, request, Some(old), &new, objects)
        }
        ("delete", old) => admit(user, request, old, &Value::Null, objects),
        _ => Ok(()),
    }
}

/// The answer to a request that is allowed: its code and body.
pub(super) fn answer(
    user: User<'_>,
    request: &Request,
    lists: Lists,
    objects: &mut Objects,
) -> Result<(u16, Value), Denied> {
    authorize(user, request, objects)?;
    let target = &request.target;
    let whole = Target { subresource: String::new(), ..target.clone() };
    match request.verb {
        "get" => objects.get(&whole).cloned().map(|o| (200, o)).ok_or_else(|| Denied::not_found(target)),
        "list" => Ok((200, list(request, objects))),
        "create" => create(user, request, objects),
        "update" => {
            let old = objects.get(&whole).ok_or_else(|| Denied::not_found(target))?;
            let mut new = request.body.clone();
            for field in ["uid", "creationTimestamp"] {
                new["metadata"][field] = old["metadata"][field].clone();
            }
            admit(user, request, Some(old), &new, objects)?;
            Ok((200, objects.replace(&whole, new)?))
        }
        "patch" => {
            let new = objects.patched(target, &request.body, lists)?;
            admit(user, request, objects.get(&whole), &new, objects)?;
            Ok((200, objects.store(whole, new)))
        }
        "delete" => {
            admit(user, request, objects.get(&whole), &Value::Null, objects)?;
            Ok((200, objects.delete(&whole, &request.body)?))
        }
        verb => Err(Denied::bad_request(format!("this server does no {verb}"))),
    }
}

fn list(request: &Request, objects: &Objects) -> Value {
    let selection = Selection { collection: request.target.clone(), fields: request.fields.clone() };
    json!({
        "kind": "List",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": objects.version.to_string()},
        "items": objects.selected(&selection),
    })
}

fn create(user: User<'_>, request: &Request, objects: &mut Objects) -> Result<(u16, Value), Denied> {
    let target = &request.target;
    admit(user, request, None, &request.body, objects)?;
    match target.whole_resource().as_str() {
        "serviceaccounts/token" => {
            let account = objects.core("serviceaccounts", &target.namespace, &target.name);
            account.ok_or_else(|| Denied::not_found(target))?;
            Ok((201, token(&request.body)))
        }
        // Nobody else is known here.
        "tokenreviews" => Ok((201, with_status(&request.body, json!({"authenticated": false})))),
        "subjectaccessreviews" => Ok((201, with_status(&request.body, json!({"allowed": false})))),
        _ if target.subresource.is_empty() => Ok((201, objects.create(target, request.body.clone())?)),
        other => Err(Denied::bad_request(format!("this server makes no {other}"))),
    }
}

fn with_status(object: &Value, status: Value) -> Value {
    let mut object = object.clone();
    object["status"] = status;
    object
}

/// A token with an expiry, in the form of a JWT without a valid signature.
fn token(request: &Value) -> Value {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    let seconds = request["spec"]["expirationSeconds"].as_i64().unwrap_or(3600);
    let made = jiff::Timestamp::now();
    let expires = made + jiff::SignedDuration::from_secs(seconds);
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let (head, claims) =
        (part(json!({"alg": "none"})), part(json!({"exp": expires.as_second(), "iat": now()})));
    let text = format!("{head}.{claims}.{:016x}", fastrand::u64(..));
    with_status(request, json!({"token": text, "expirationTimestamp": format!("{expires:.0}")}))
}
