//! The order in which pending resizes are tried (§16.2).

use keelson_kube_model::resources::pod_requests;
use keelson_kube_model::{Pod, QosClass, compute_qos};

/// A pod whose resize is pending.
#[derive(Clone, Debug)]
pub struct PendingPod<P> {
    /// Its UID.
    pub uid: String,
    /// The pod with the resources that are allocated to it.
    pub allocated: P,
    /// The pod with the resources that its source asks for.
    pub wanted: P,
    /// Since when the resize is pending, unix nanoseconds.
    pub since_unix_nanos: i64,
}

/// Sorts pending resizes: first those that raise no request, then by priority, then by QoS class, then the longest pending.
pub fn sort_pending<P: AsRef<Pod>>(pending: &mut [PendingPod<P>]) {
    pending.sort_by_cached_key(|pod| {
        let wanted = pod.wanted.as_ref();
        let rank = match compute_qos(wanted) {
            QosClass::Guaranteed => 0,
            QosClass::Burstable => 1,
            QosClass::BestEffort => 2,
        };
        let priority = std::cmp::Reverse(wanted.spec.priority.unwrap_or(0));
        let raises = raises_requests(pod.allocated.as_ref(), wanted);
        (raises, priority, rank, pod.since_unix_nanos, pod.uid.clone())
    });
}

/// Whether the pod as a whole would request more of something.
fn raises_requests(allocated: &Pod, wanted: &Pod) -> bool {
    let before = pod_requests(allocated);
    pod_requests(wanted).iter().any(|(name, amount)| *amount > before.get(name).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    #[test]
    fn shrinking_comes_first_then_priority_then_class_then_the_longest_pending() {
        let pod = |cpu: &str, priority: i32, guaranteed: bool| -> Arc<Pod> {
            let limits = if guaranteed { json!({"cpu": cpu, "memory": "1Mi"}) } else { json!({}) };
            let resources = json!({"requests": {"cpu": cpu, "memory": "1Mi"}, "limits": limits});
            let spec = json!({"priority": priority, "containers": [{"name": "a", "resources": resources}]});
            Arc::new(serde_json::from_value(json!({"spec": spec})).unwrap())
        };
        let entry = |uid: &str, from: &str, to: &str, priority, guaranteed, since| PendingPod {
            uid: uid.to_owned(),
            allocated: pod(from, priority, guaranteed),
            wanted: pod(to, priority, guaranteed),
            since_unix_nanos: since,
        };
        let mut pending = vec![
            entry("new", "1", "2", 0, false, 9),
            entry("old", "1", "2", 0, false, 1),
            entry("guaranteed", "1", "2", 0, true, 9),
            entry("important", "1", "2", 5, false, 9),
            entry("shrinks", "2", "1", -5, false, 9),
        ];
        sort_pending(&mut pending);
        let order: Vec<&str> = pending.iter().map(|pod| pod.uid.as_str()).collect();
        assert_eq!(order, ["shrinks", "important", "guaranteed", "old", "new"]);
    }
}
