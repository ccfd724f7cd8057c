//! What has been published of a pod.

use std::sync::Arc;

use keelson_kube_model::PodStatus;

/// What the documents of a pod have shown.
#[derive(Debug, Default)]
pub struct Published {
    /// The status that was published last. Its JSON is not kept: it is made for each message that contains it, which is one per
    /// change for node-status, and one per pod for each `ListPods`.
    pub status: Arc<PodStatus>,
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
    pub fn previous(&self) -> Option<Arc<PodStatus>> {
        (self.version > 0 || !self.status.phase.is_empty()).then(|| Arc::clone(&self.status))
    }

    /// Replaces the status.
    pub fn set_status(&mut self, mut status: PodStatus) {
        status.shrink_to_fit();
        self.status = Arc::new(status);
    }

    /// A new incarnation of the UID begins: nothing of it has ended.
    pub fn begin_again(&mut self) {
        (self.stopped, self.released) = (false, false);
    }
}

#[cfg(test)]
mod tests {
    use keelson_kube_model::PodCondition;

    use super::*;

    #[test]
    fn a_published_status_has_no_spare_capacity() {
        let mut conditions = Vec::with_capacity(8);
        conditions.push(PodCondition::default());
        let mut published = Published::default();
        published.set_status(PodStatus { conditions, ..PodStatus::default() });
        assert_eq!((published.status.conditions.len(), published.status.conditions.capacity()), (1, 1));
    }
}
