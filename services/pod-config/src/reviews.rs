//! What the API server says of somebody who asks something of this node: whose token it is, and what somebody may do
//! (node-and-api.md §7). Nothing is remembered here; who asks does that.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use keelson_kube_api::{KubeApi, KubeError, Resource};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::Metrics;
use serde_json::{Map, Value, json};

use crate::review_metrics::{Asked, ReviewMetrics};

/// How often a question is put, until it is answered.
const ATTEMPTS: u32 = 5;
/// The pause before the second time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// How much longer each pause is than the one before.
const LONGER: f64 = 1.5;
/// By how much of its length a pause is longer at random, at most.
const JITTER: f64 = 0.2;

const TOKEN_REVIEWS: Resource =
    Resource { group: "authentication.k8s.io", version: "v1", plural: "tokenreviews", namespaced: false };
const ACCESS_REVIEWS: Resource = Resource {
    group: "authorization.k8s.io",
    version: "v1",
    plural: "subjectaccessreviews",
    namespaced: false,
};

/// Puts the questions.
#[derive(Debug, Clone)]
pub struct Reviewer {
    api: KubeApi,
    metrics: ReviewMetrics,
}

impl Reviewer {
    /// One that asks this server, and counts what it asks among the metrics of a service.
    pub fn new(api: KubeApi, metrics: &Metrics) -> Self {
        Self { api, metrics: ReviewMetrics::registered(metrics) }
    }

    /// Whose token it is, for whatever audience the server itself has.
    ///
    /// # Errors
    /// The server does not answer, also when asked again, or refuses.
    pub async fn token(&self, token: &str) -> Result<pb::ReviewTokenResponse, KubeError> {
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
        Ok(whose(&self.ask(TOKEN_REVIEWS, &review, &self.metrics.tokens).await?))
    }

    /// Whether somebody may do something.
    ///
    /// # Errors
    /// As [`Reviewer::token`].
    pub async fn access(
        &self,
        asked: &pb::ReviewAccessRequest,
    ) -> Result<pb::ReviewAccessResponse, KubeError> {
        let status = self.ask(ACCESS_REVIEWS, &access_review(asked), &self.metrics.access).await?;
        // What is both allowed and denied contradicts itself: it is not allowed.
        let allowed = status["allowed"] == true && status["denied"] != true;
        Ok(pb::ReviewAccessResponse { allowed, reason: text(&status["reason"]) })
    }

    /// The status of the review that the server makes of `review`.
    async fn ask(&self, resource: Resource, review: &Value, counted: &Asked) -> Result<Value, KubeError> {
        let mut attempt = 1;
        loop {
            let began = Instant::now();
            let answer = self.api.create(resource, None, review).await;
            counted.ended(&answer, began.elapsed());
            match answer {
                Ok(mut object) => return Ok(object.0["status"].take()),
                Err(error) if attempt < ATTEMPTS && may_be_answered_later(&error) => {
                    let pause = pause(attempt, fastrand::f64());
                    let wanted = Duration::from_secs(u64::from(error.retry_after()));
                    tracing::debug!(%error, attempt, "a review is asked for again");
                    tokio::time::sleep(pause.max(wanted)).await;
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The pause after so many attempts; `random` is from 0 to 1.
fn pause(attempts: u32, random: f64) -> Duration {
    let longer = LONGER.powi(i32::try_from(attempts).unwrap_or(1) - 1);
    FIRST_PAUSE.mul_f64(longer * (1.0 + JITTER * random))
}

/// Whether it is worth while to ask again: a refusal by what somebody may, or of what was asked, stays one.
fn may_be_answered_later(error: &KubeError) -> bool {
    match error {
        KubeError::Kubeconfig { .. } | KubeError::Awaited { .. } => false,
        KubeError::Unreachable { .. } => true,
        KubeError::Refused { code, retry_after, .. } => *code == 429 || *code >= 500 || *retry_after > 0,
    }
}

fn access_review(asked: &pb::ReviewAccessRequest) -> Value {
    let pb::ReviewAccessRequest { user, verb, resource, subresource, name } = asked;
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

/// Whose token it is, from the status of a TokenReview.
fn whose(status: &Value) -> pb::ReviewTokenResponse {
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
