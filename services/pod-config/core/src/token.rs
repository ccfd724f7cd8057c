//! The request for a service account token, and its response (volumes.md §9.6).

use keelson_kube_model::time::parse_seconds;
use serde_json::{Value, json};

/// A requested token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRequest {
    /// Namespace of the account and of the pod.
    pub namespace: String,
    /// Name of the account.
    pub service_account: String,
    /// The pod to which the token is bound.
    pub pod_name: String,
    /// Its UID.
    pub pod_uid: String,
    /// Intended audiences; the API server if empty.
    pub audiences: Vec<String>,
    /// Requested lifetime in seconds.
    pub expiration_seconds: i64,
}

/// An issued token.
#[derive(Clone, PartialEq, Eq)]
pub struct IssuedToken {
    /// The token itself, a secret.
    pub token: String,
    /// When it expires, seconds since 1970.
    pub expires: i64,
    /// Its lifetime in seconds; the server may choose another one than requested.
    pub lifetime: i64,
}

// The token is never printed.
impl std::fmt::Debug for IssuedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MadeToken")
            .field("expires", &self.expires)
            .field("lifetime", &self.lifetime)
            .finish_non_exhaustive()
    }
}

/// Builds the `TokenRequest` object (`authentication.k8s.io/v1`).
pub fn request_object(wanted: &TokenRequest) -> Value {
    let TokenRequest { pod_name, pod_uid, audiences, expiration_seconds, .. } = wanted;
    json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": audiences,
            "expirationSeconds": expiration_seconds,
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": pod_uid},
        },
    })
}

/// Parses the server's response; `None` if it has no token or no expiration. If it has no lifetime, `wanted` is used.
pub fn parse_response(object: &Value, wanted: i64) -> Option<IssuedToken> {
    let status = &object["status"];
    let token = status["token"].as_str().filter(|token| !token.is_empty())?.to_owned();
    let expires = parse_seconds(status["expirationTimestamp"].as_str()?).ok()?;
    let lifetime = object["spec"]["expirationSeconds"].as_i64().filter(|seconds| *seconds > 0);
    Some(IssuedToken { token, expires, lifetime: lifetime.unwrap_or(wanted) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_binds_the_token_to_the_pod() {
        let wanted = TokenRequest {
            namespace: "a".to_owned(),
            service_account: "default".to_owned(),
            pod_name: "web".to_owned(),
            pod_uid: "u".to_owned(),
            audiences: vec!["vault".to_owned()],
            expiration_seconds: 3607,
        };
        let spec = request_object(&wanted)["spec"].clone();
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u"});
        let expected = json!({"audiences": ["vault"], "expirationSeconds": 3607, "boundObjectRef": bound});
        assert_eq!(spec, expected);
    }

    #[test]
    fn a_token_response_needs_a_token_and_an_expiration() {
        let status = json!({"token": "hunter2", "expirationTimestamp": "1970-01-01T01:00:00Z"});
        let made =
            parse_response(&json!({"spec": {"expirationSeconds": 600}, "status": status}), 3607).unwrap();
        assert_eq!((made.expires, made.lifetime), (3600, 600));
        assert!(!format!("{made:?}").contains("hunter2"));
        assert_eq!(parse_response(&json!({"status": status}), 3607).unwrap().lifetime, 3607);
        for wrong in [
            json!({}),
            json!({"status": {"token": "x"}}),
            json!({"status": {"token": "", "expirationTimestamp": "1970-01-01T01:00:00Z"}}),
            json!({"status": {"token": "x", "expirationTimestamp": "soon"}}),
        ] {
            assert_eq!(parse_response(&wrong, 1), None, "{wrong}");
        }
    }
}
