//! Token reviews and access reviews of the API server, for clients of this node (node-and-api.md §7). Nothing is cached here; the
//! caller does that.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use keelson_kube_api::{KubeApi, KubeError, Resource};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::Metrics;
use serde_json::{Map, Value, json};

use crate::review_metrics::{ReviewCounters, ReviewMetrics};

/// Maximum number of attempts.
const ATTEMPTS: u32 = 5;
/// The delay before the second attempt.
const INITIAL_BACKOFF: Duration = Duration::from_millis(500);
/// Factor between successive delays.
const BACKOFF_FACTOR: f64 = 1.5;
/// Maximum random part of a delay, relative to its length.
const JITTER: f64 = 0.2;

const TOKEN_REVIEWS: Resource =
    Resource { group: "authentication.k8s.io", version: "v1", plural: "tokenreviews", namespaced: false };
const ACCESS_REVIEWS: Resource = Resource {
    group: "authorization.k8s.io",
    version: "v1",
    plural: "subjectaccessreviews",
    namespaced: false,
};

/// Sends reviews to the API server.
#[derive(Debug, Clone)]
pub struct Reviewer {
    api: KubeApi,
    metrics: ReviewMetrics,
}

impl Reviewer {
    /// Sends reviews to this server and counts them in `metrics`.
    pub fn new(api: KubeApi, metrics: &Metrics) -> Self {
        Self { api, metrics: ReviewMetrics::registered(metrics) }
    }

    /// Returns the user of a token, for the default audience of the server.
    ///
    /// # Errors
    /// The server is unreachable, also after retries, or refuses.
    pub async fn review_token(&self, token: &str) -> Result<pb::ReviewTokenResponse, KubeError> {
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
        Ok(token_response(&self.create_review(TOKEN_REVIEWS, &review, &self.metrics.tokens).await?))
    }

    /// Returns whether a user may do something.
    ///
    /// # Errors
    /// As for [`Reviewer::review_token`].
    pub async fn review_access(
        &self,
        request: &pb::ReviewAccessRequest,
    ) -> Result<pb::ReviewAccessResponse, KubeError> {
        let status =
            self.create_review(ACCESS_REVIEWS, &access_review(request), &self.metrics.access).await?;
        // A contradictory review, allowed and denied, is not allowed.
        let allowed = status["allowed"] == true && status["denied"] != true;
        Ok(pb::ReviewAccessResponse { allowed, reason: text(&status["reason"]) })
    }

    /// Creates a review and returns its status.
    async fn create_review(
        &self,
        resource: Resource,
        review: &Value,
        counters: &ReviewCounters,
    ) -> Result<Value, KubeError> {
        let mut attempt = 1;
        loop {
            let started_at = Instant::now();
            let result = self.api.create(resource, None, review).await;
            counters.record(&result, started_at.elapsed());
            match result {
                Ok(mut object) => return Ok(object.0["status"].take()),
                Err(error) if attempt < ATTEMPTS && is_retryable(&error) => {
                    let backoff = backoff(attempt, fastrand::f64());
                    let retry_after = Duration::from_secs(u64::from(error.retry_after()));
                    tracing::debug!(%error, attempt, "retrying a review");
                    tokio::time::sleep(backoff.max(retry_after)).await;
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The delay after so many attempts; `random` is between 0 and 1.
fn backoff(attempts: u32, random: f64) -> Duration {
    let factor = BACKOFF_FACTOR.powi(i32::try_from(attempts).unwrap_or(1) - 1);
    INITIAL_BACKOFF.mul_f64(factor * (1.0 + JITTER * random))
}

/// Whether a retry may succeed; a refusal for permissions or content is final.
fn is_retryable(error: &KubeError) -> bool {
    match error {
        KubeError::Kubeconfig { .. } | KubeError::Awaited { .. } => false,
        KubeError::Unreachable { .. } => true,
        KubeError::Refused { code, retry_after, .. } => *code == 429 || *code >= 500 || *retry_after > 0,
    }
}

fn access_review(request: &pb::ReviewAccessRequest) -> Value {
    let pb::ReviewAccessRequest { user, verb, resource, subresource, name } = request;
    let user = user.clone().unwrap_or_default();
    let extra: Map<String, Value> =
        user.extra.into_iter().map(|(key, values)| (key, values.values.into())).collect();
    json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "verb": verb, "version": "v1", "resource": resource, "subresource": subresource, "name": name,
            },
            "user": user.name, "uid": user.uid, "groups": user.groups, "extra": extra,
        },
    })
}

/// Converts the status of a TokenReview.
fn token_response(status: &Value) -> pb::ReviewTokenResponse {
    let user = &status["user"];
    let result = if status["authenticated"] == true {
        pb::review_token_response::Result::User(pb::User {
            name: text(&user["username"]),
            uid: text(&user["uid"]),
            groups: texts(&user["groups"]),
            extra: extra(&user["extra"]),
        })
    } else {
        pb::review_token_response::Result::Rejected(text(&status["error"]))
    };
    pb::ReviewTokenResponse { result: Some(result) }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(text).collect()
}

fn extra(value: &Value) -> HashMap<String, pb::ExtraValues> {
    let pairs = value.as_object().into_iter().flatten();
    pairs.map(|(key, values)| (key.clone(), pb::ExtraValues { values: texts(values) })).collect()
}

#[cfg(test)]
#[path = "reviews_tests.rs"]
mod tests;
