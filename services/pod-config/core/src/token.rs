//! What is asked of the API server for a token of a service account, and what it answers (volumes.md §9.6).

use keelson_kube_model::time::parse_seconds;
use serde_json::{Value, json};

/// A token that somebody wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedToken {
    /// The account's and the pod's.
    pub namespace: String,
    /// The account.
    pub service_account: String,
    /// The pod that it ends with.
    pub pod_name: String,
    /// Its UID.
    pub pod_uid: String,
    /// Who is to accept it; without any the API server.
    pub audiences: Vec<String>,
    /// How long it is to be good.
    pub expiration_seconds: i64,
}

/// A token.
#[derive(Clone, PartialEq, Eq)]
pub struct MadeToken {
    /// Its text.
    pub token: String,
    /// When it ends, seconds since 1970.
    pub expires: i64,
    /// For how many seconds it was made; the server may choose another time than the wanted one.
    pub lifetime: i64,
}

// Never its text.
impl std::fmt::Debug for MadeToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MadeToken")
            .field("expires", &self.expires)
            .field("lifetime", &self.lifetime)
            .finish_non_exhaustive()
    }
}

/// The `TokenRequest` (`authentication.k8s.io/v1`).
pub fn request(wanted: &WantedToken) -> Value {
    let WantedToken { pod_name, pod_uid, audiences, expiration_seconds, .. } = wanted;
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

/// The token of an answer; none where the answer has no token or does not say when it ends. Without a word on the
/// lifetime it is the `wanted` one.
pub fn answer(object: &Value, wanted: i64) -> Option<MadeToken> {
    let status = &object["status"];
    let token = status["token"].as_str().filter(|token| !token.is_empty())?.to_owned();
    let expires = parse_seconds(status["expirationTimestamp"].as_str()?).ok()?;
    let lifetime = object["spec"]["expirationSeconds"].as_i64().filter(|seconds| *seconds > 0);
    Some(MadeToken { token, expires, lifetime: lifetime.unwrap_or(wanted) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_binds_the_token_to_the_pod() {
        let wanted = WantedToken {
            namespace: "a".to_owned(),
            service_account: "default".to_owned(),
            pod_name: "web".to_owned(),
            pod_uid: "u".to_owned(),
            audiences: vec!["vault".to_owned()],
            expiration_seconds: 3607,
        };
        let spec = request(&wanted)["spec"].clone();
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u"});
        let expected = json!({"audiences": ["vault"], "expirationSeconds": 3607, "boundObjectRef": bound});
        assert_eq!(spec, expected);
    }

    #[test]
    fn an_answer_has_a_token_and_its_end_or_is_none() {
        let status = json!({"token": "hunter2", "expirationTimestamp": "1970-01-01T01:00:00Z"});
        let made = answer(&json!({"spec": {"expirationSeconds": 600}, "status": status}), 3607).unwrap();
        assert_eq!((made.expires, made.lifetime), (3600, 600));
        assert!(!format!("{made:?}").contains("hunter2"));
        assert_eq!(answer(&json!({"status": status}), 3607).unwrap().lifetime, 3607);
        for wrong in [
            json!({}),
            json!({"status": {"token": "x"}}),
            json!({"status": {"token": "", "expirationTimestamp": "1970-01-01T01:00:00Z"}}),
            json!({"status": {"token": "x", "expirationTimestamp": "soon"}}),
        ] {
            assert_eq!(answer(&wrong, 1), None, "{wrong}");
        }
    }
}
