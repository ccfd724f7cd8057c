//! Follows ClusterTrustBundles: one by name, or all of a signer (volumes.md §9.6). They are read in the version `v1beta1` of the API,
//! or `v1alpha1` if the server does not have it.

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_kube_api::{Change, Follower, KubeApi, KubeError, Object, Range, Resource, WatchEvent};
use serde_json::{Value, json};

use crate::control_plane::ObjectRequest;
use crate::followed_objects::{TRUST_BUNDLE, TRUST_BUNDLES};

/// How long to wait before the versions are tried again if the server has none of them.
const PAUSE: Duration = Duration::from_secs(30);

/// The resource in each version, the preferred one first.
const VERSIONS: [Resource; 2] = [
    Resource {
        group: "certificates.k8s.io",
        version: "v1beta1",
        plural: "clustertrustbundles",
        namespaced: false,
    },
    Resource {
        group: "certificates.k8s.io",
        version: "v1alpha1",
        plural: "clustertrustbundles",
        namespaced: false,
    },
];

/// Whether objects of this kind are ClusterTrustBundles.
pub fn is_trust_bundle(kind: &str) -> bool {
    matches!(kind, TRUST_BUNDLE | TRUST_BUNDLES)
}

/// Follows one ClusterTrustBundle, or those of a signer.
pub struct TrustBundles {
    api: KubeApi,
    wanted: ObjectRequest,
    /// Index of the version that is tried, or in use.
    version: usize,
    /// The server has no version: the next call waits.
    is_paused: bool,
    follower: Follower,
    /// By name.
    bundles: BTreeMap<String, Value>,
}

impl TrustBundles {
    /// Follows the bundle or the list that `wanted` names.
    pub fn new(api: KubeApi, wanted: &ObjectRequest) -> Self {
        let follower = follower(&api, wanted, 0);
        let bundles = BTreeMap::new();
        Self { api, wanted: wanted.clone(), version: 0, is_paused: false, follower, bundles }
    }

    /// The next state: the bundle, or the list of bundles; `None` if the bundle does not exist. Not cancel-safe, except to end.
    ///
    /// # Errors
    /// The server is unreachable or refuses. The next call tries again.
    pub async fn next(&mut self) -> Result<Option<Object>, KubeError> {
        loop {
            if std::mem::take(&mut self.is_paused) {
                tokio::time::sleep(PAUSE).await;
                self.use_version(0);
            }
            match self.follower.next().await {
                WatchEvent::Listed(objects) => {
                    self.bundles.clear();
                    objects.into_iter().for_each(|object| self.put(object));
                }
                WatchEvent::Changed(Change::Put(object)) => self.put(object),
                WatchEvent::Changed(Change::Deleted(object)) => drop(self.bundles.remove(object.name())),
                WatchEvent::Contact => continue,
                WatchEvent::Lost(error) if error.code() == Some(404) => {
                    if self.version + 1 < VERSIONS.len() {
                        self.use_version(self.version + 1);
                        continue;
                    }
                    self.is_paused = true;
                    return Err(error);
                }
                WatchEvent::Lost(error) => return Err(error),
            }
            return Ok(self.state());
        }
    }

    fn use_version(&mut self, version: usize) {
        self.version = version;
        self.follower = follower(&self.api, &self.wanted, version);
    }

    fn put(&mut self, Object(mut object): Object) {
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
        }
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        self.bundles.insert(name, object);
    }

    fn state(&self) -> Option<Object> {
        if self.wanted.kind == TRUST_BUNDLE {
            return self.bundles.get(&self.wanted.name).cloned().map(Object);
        }
        let items: Vec<&Value> = self.bundles.values().collect();
        Some(Object(json!({"items": items})))
    }
}

fn follower(api: &KubeApi, wanted: &ObjectRequest, version: usize) -> Follower {
    let resource = VERSIONS[version];
    let range = if wanted.kind == TRUST_BUNDLE {
        Range::one(resource, None, &wanted.name)
    } else {
        Range::of_fields(resource, format!("spec.signerName={}", wanted.name))
    };
    Follower::new(api.clone(), range)
}

#[cfg(test)]
#[path = "trust_bundles_tests.rs"]
mod tests;
