//! Parses a node's request as received over HTTP.

use std::borrow::Cow;

use axum::http::request::Parts;
use axum::http::{Method, header};
use serde_json::Value;

use super::objects::Denied;
use super::patch::Lists;
use super::request::{Request, Target, fields};

/// Prefix of a node's token; the node's name follows.
pub(super) const NODE_TOKEN: &str = "node:";

/// A request and its user.
pub(super) struct IncomingRequest {
    pub(super) node: String,
    pub(super) request: Request,
    /// How a patch takes lists.
    pub(super) lists: Lists,
    /// Of a watch: from where on.
    pub(super) version: Option<u64>,
    /// Of a watch: how long.
    pub(super) seconds: u64,
}

impl IncomingRequest {
    pub(super) fn of(head: &Parts, body: &[u8]) -> Result<Self, Denied> {
        let header = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let token = header(header::AUTHORIZATION).strip_prefix("Bearer ");
        let Some(node) = token.and_then(|token| token.strip_prefix(NODE_TOKEN)) else {
            return Err(Denied { code: 401, reason: "Unauthorized", message: "Unauthorized".to_owned() });
        };
        let path = head.uri.path();
        let Some(target) = Target::of(path) else {
            return Err(Denied { code: 404, reason: "NotFound", message: format!("{path} is not served") });
        };
        let query: Vec<(Cow<'_, str>, Cow<'_, str>)> =
            form_urlencoded::parse(head.uri.query().unwrap_or_default().as_bytes()).collect();
        let parameter =
            |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_ref());
        let selector = parameter("fieldSelector").unwrap_or_default();
        let Some(fields) = fields(selector).filter(|_| parameter("labelSelector").is_none()) else {
            let message = format!("this server selects by equal fields only: {selector:?}");
            return Err(Denied::bad_request(message));
        };
        let is_watch = parameter("watch").is_some_and(|value| value == "1" || value == "true");
        let body = match body {
            [] => Value::Null,
            body => serde_json::from_slice(body).map_err(|e| Denied::bad_request(e.to_string()))?,
        };
        let verb = match (&head.method, target.name.is_empty()) {
            (&Method::GET, true) if is_watch => "watch",
            (&Method::GET, true) => "list",
            (&Method::GET, false) => "get",
            (&Method::POST, _) => "create",
            (&Method::PUT, false) => "update",
            (&Method::PATCH, false) => "patch",
            (&Method::DELETE, false) => "delete",
            (method, _) => return Err(Denied::bad_request(format!("this server does no {method}"))),
        };
        let lists = match header(header::CONTENT_TYPE) {
            "application/strategic-merge-patch+json" => Lists::Merged,
            _ => Lists::Replaced,
        };
        let version = parameter("resourceVersion").and_then(|text| text.parse().ok());
        let seconds = parameter("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(1800);
        let request = Request { verb, target, fields, body };
        Ok(Self { node: node.to_owned(), request, lists, version, seconds })
    }
}
