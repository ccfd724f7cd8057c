//! Calls to the API server about one object.

use std::time::{Duration, Instant};

use http::header::{ACCEPT, CONTENT_TYPE, USER_AGENT};
use http::{Method, Request};
use serde_json::Value;

use crate::connect::{Connected, KubeApi};
use crate::error::KubeError;
use crate::resource::{Object, Resource};

/// How long a call may take, including its answer. A watch must start within the same time.
pub const CALL_ENDS_WITHIN: Duration = Duration::from_secs(30);

/// The type of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patch {
    /// Lists are merged by their keys (`application/strategic-merge-patch+json`).
    Strategic,
    /// Lists are replaced (`application/merge-patch+json`).
    Merge,
}

impl KubeApi {
    /// Gets an object; `None` if it does not exist.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn get(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<Object>, KubeError> {
        let path = format!("{}/{name}", resource.path(namespace));
        let what = resource.named(namespace, name);
        match self.call(Method::GET, &path, &what, None).await {
            Ok(value) => Ok(Some(Object(value))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates an object. Returns it as the server has stored it.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] if the object exists.
    pub async fn create(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        object: &Value,
    ) -> Result<Object, KubeError> {
        let what = match object["metadata"]["name"].as_str() {
            Some(name) => resource.named(namespace, name),
            None => format!("one of its {}", resource.plural),
        };
        let body = Some(("application/json", object));
        Ok(Object(self.call(Method::POST, &resource.path(namespace), &what, body).await?))
    }

    /// Posts to a subresource of an object. Returns the answer.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn create_below(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        (name, subresource): (&str, &str),
        body: &Value,
    ) -> Result<Object, KubeError> {
        let path = format!("{}/{name}/{subresource}", resource.path(namespace));
        let what = format!("{}/{subresource}", resource.named(namespace, name));
        Ok(Object(self.call(Method::POST, &path, &what, Some(("application/json", body))).await?))
    }

    /// Replaces the object whose version it names.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] if the version differs.
    pub async fn replace(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        object: &Value,
    ) -> Result<Object, KubeError> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let path = format!("{}/{name}", resource.path(namespace));
        let body = Some(("application/json", object));
        Ok(Object(self.call(Method::PUT, &path, &resource.named(namespace, name), body).await?))
    }

    /// Patches an object or its `subresource`.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn patch(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        name: &str,
        subresource: Option<&str>,
        (kind, patch): (Patch, &Value),
    ) -> Result<Object, KubeError> {
        let below = subresource.map(|part| format!("/{part}")).unwrap_or_default();
        let path = format!("{}/{name}{below}", resource.path(namespace));
        let what = format!("{}{below}", resource.named(namespace, name));
        let content_type = match kind {
            Patch::Strategic => "application/strategic-merge-patch+json",
            Patch::Merge => "application/merge-patch+json",
        };
        Ok(Object(self.call(Method::PATCH, &path, &what, Some((content_type, patch))).await?))
    }

    /// Deletes an object with `options` (a `DeleteOptions`). Returns whether it existed.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] if a precondition fails.
    pub async fn delete(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        name: &str,
        options: &Value,
    ) -> Result<bool, KubeError> {
        let path = format!("{}/{name}", resource.path(namespace));
        let body = Some(("application/json", options));
        match self.call(Method::DELETE, &path, &resource.named(namespace, name), body).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// An error about `what` on this connection that does not come from a call.
    pub fn unreachable(&self, what: &str, message: String) -> KubeError {
        KubeError::unreachable(&self.server(), what, message)
    }

    /// Waits for the rate limiter.
    pub(crate) async fn take_turn(&self, verb: &str, host: &str) {
        if let Some(limiter) = &self.limiter {
            let waited = limiter.pass().await;
            self.inner.metrics.limited(verb, host, waited);
        }
    }

    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        what: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Value, KubeError> {
        let Connected { client, server, host, credential, .. } = self.connected().await?;
        self.take_turn(method.as_str(), &host).await;
        let request = self.request(method.clone(), path, &server, what, body)?;
        let (began, sent) = (Instant::now(), request.body().len());
        let answer = within(&server, what, client.request_text(request)).await;
        let received = answer.as_ref().ok().map(String::len);
        self.inner.metrics.ended(method.as_str(), &host, began.elapsed(), sent, received);
        let text = answer.inspect_err(|error| self.report_refusal(error, credential.as_deref()))?;
        serde_json::from_str(&text).map_err(|error| {
            KubeError::unreachable(&server, what, format!("the answer is no Kubernetes object: {error}"))
        })
    }

    pub(crate) fn request(
        &self,
        method: Method,
        path: &str,
        server: &str,
        what: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Request<Vec<u8>>, KubeError> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, &self.inner.user_agent);
        if let Some((content_type, _)) = body {
            request = request.header(CONTENT_TYPE, content_type);
        }
        let body = body.map(|(_, value)| value.to_string().into_bytes()).unwrap_or_default();
        request.body(body).map_err(|error| KubeError::unreachable(server, what, error.to_string()))
    }
}

/// Ends a call after [`CALL_ENDS_WITHIN`].
pub(crate) async fn within<T>(
    server: &str,
    what: &str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, KubeError> {
    match tokio::time::timeout(CALL_ENDS_WITHIN, call).await {
        Ok(done) => done.map_err(|error| KubeError::of(server, what, error)),
        Err(_) => {
            let message = format!("not within {} s", CALL_ENDS_WITHIN.as_secs());
            Err(KubeError::unreachable(server, what, message))
        }
    }
}
