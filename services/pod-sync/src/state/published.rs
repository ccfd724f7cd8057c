//! What has been published of a pod.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use keelson_kube_model::PodStatus;

/// A status, and its JSON once something has asked for it.
#[derive(Debug, Default)]
pub struct SharedStatus {
    status: PodStatus,
    json: OnceLock<Bytes>,
}

impl SharedStatus {
    /// Without JSON yet.
    pub fn new(status: PodStatus) -> Self {
        Self { status, json: OnceLock::new() }
    }

    /// The status as JSON. It is serialised once, however many callers there are, and kept without spare capacity.
    pub fn json(&self) -> Bytes {
        let serialise = || {
            // An empty object, because an empty `status_json` would mean that the status is in `pod_json`.
            let json = serde_json::to_vec(&self.status).unwrap_or_else(|_| b"{}".to_vec());
            Bytes::from(json.into_boxed_slice())
        };
        self.json.get_or_init(serialise).clone()
    }
}

impl Deref for SharedStatus {
    type Target = PodStatus;

    fn deref(&self) -> &PodStatus {
        &self.status
    }
}

/// What the documents of a pod have shown.
#[derive(Debug, Default)]
pub struct Published {
    /// The status that was published last.
    pub status: Arc<SharedStatus>,
    /// Counts the published documents.
    pub version: u64,
    /// A document has said that none of its containers runs or will be started.
    pub stopped: bool,
    /// A document has said that everything of it is released. No later document takes that back.
    pub released: bool,
    /// It was rejected at admission. Its status says why and does not change any more.
    pub rejected: bool,
}

impl Published {
    /// The last status; `None` for a pod that has none yet, in this process or an earlier one.
    pub fn previous(&self) -> Option<Arc<SharedStatus>> {
        (self.version > 0 || !self.status.phase.is_empty()).then(|| Arc::clone(&self.status))
    }

    /// Replaces the status.
    pub fn set_status(&mut self, status: PodStatus) {
        self.status = Arc::new(SharedStatus::new(status));
    }

    /// A new incarnation of the UID begins: nothing of it has ended.
    pub fn begin_again(&mut self) {
        (self.stopped, self.released) = (false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_serialised_once() {
        let status = SharedStatus::new(PodStatus { phase: "Running".into(), ..PodStatus::default() });
        let (first, second) = (status.json(), status.json());
        assert_eq!(first, serde_json::to_vec(&*status).unwrap());
        assert_eq!(first.as_ptr(), second.as_ptr(), "both are the same bytes");
    }
}
