//! The tokens of service accounts that drivers want, cached until they are to be renewed (volumes.md §9.6, §11.6).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::time::format_seconds;
use keelson_service_kit::now_unix_nanos;
use keelson_volume_manager_core::csi::error_class::{FailedStep, error_class};
use keelson_volume_manager_core::csi::volume_context::IssuedToken;
use keelson_volume_manager_core::desire::PodRef;
use keelson_volume_manager_core::token::TokenName;
use keelson_volume_manager_core::wait_owner::WaitOwner;

use super::ports::{NewToken, TokenIssuer};
use crate::plugins::PluginError;

/// The tokens of all pods, by pod UID and name.
#[derive(Debug)]
pub(super) struct TokenCache {
    issuer: Arc<dyn TokenIssuer>,
    tokens: Mutex<BTreeMap<(String, TokenName), NewToken>>,
}

/// Seconds since 1970.
fn now() -> i64 {
    now_unix_nanos().div_euclid(1_000_000_000)
}

impl TokenCache {
    pub(super) fn new(issuer: Arc<dyn TokenIssuer>) -> Self {
        Self { issuer, tokens: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, TokenName), NewToken>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A token for a pod. If it cannot be renewed, the old one is used until it expires.
    ///
    /// # Errors
    /// There is none, and nothing was started for the volume.
    pub(super) async fn get(&self, pod: &PodRef, name: &TokenName) -> Result<IssuedToken, PluginError> {
        let key = (pod.uid.clone(), name.clone());
        let cached = self.lock().get(&key).cloned();
        if let Some(token) = cached.as_ref().filter(|token| now() < token.validity.renew_at(0)) {
            return as_issued(token);
        }
        let token = match self.issuer.issue(pod, name).await {
            Ok(token) => token,
            Err(why) => match cached.filter(|token| token.validity.is_valid(now())) {
                Some(token) => {
                    tracing::warn!(uid = pod.uid, token = %name, error = why, "cannot renew a token; the old one is used");
                    return as_issued(&token);
                }
                None => {
                    return Err(PluginError {
                        owner: WaitOwner::ApiServer,
                        ..PluginError::new(format!("cannot create the {name}: {why}"))
                            .of_class(error_class(FailedStep::ApiObject))
                    });
                }
            },
        };
        let mut tokens = self.lock();
        tokens.retain(|_, token| token.validity.is_valid(now()));
        tokens.insert(key, token.clone());
        drop(tokens);
        as_issued(&token)
    }

    /// Forgets the tokens of a pod.
    pub(super) fn forget(&self, pod_uid: &str) {
        self.lock().retain(|(uid, _), _| uid != pod_uid);
    }
}

fn as_issued(token: &NewToken) -> Result<IssuedToken, PluginError> {
    let expiration_timestamp = format_seconds(token.validity.expires).map_err(|error| {
        PluginError::new(format!("a token expires at {}, which is no time: {error}", token.validity.expires))
            .of_class(error_class(FailedStep::ApiObject))
    })?;
    Ok(IssuedToken { token: token.text.clone(), expiration_timestamp })
}
