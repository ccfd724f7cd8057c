//! Owner and mode of service account tokens in volumes (volumes.md §9.6).

use keelson_kube_model::Pod;

/// Only its owner may read it.
const PRIVATE: u32 = 0o600;

/// The mode and the owner of a token's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenAccess {
    /// Permission bits; `None`: those of the volume. Applying an `fsGroup` adds permissions of the group.
    pub mode: Option<u32>,
    /// Uid; `None`: root.
    pub owner: Option<i64>,
}

/// A token belongs to the user that all containers of the pod run as, if the spec has the same one for each. With such a user
/// or an `fsGroup` the file is private.
pub fn token_access(pod: &Pod) -> TokenAccess {
    let context = pod.spec.security_context.as_ref();
    let of_pod = context.and_then(|context| context.run_as_user);
    let mut users = pod.containers().map(|(_, container)| {
        container.security_context.as_ref().and_then(|context| context.run_as_user).or(of_pod)
    });
    let first = users.next().flatten();
    let owner = first.filter(|first| users.all(|user| user == Some(*first)));
    let is_private = owner.is_some() || context.is_some_and(|context| context.fs_group.is_some());
    TokenAccess { mode: is_private.then_some(PRIVATE), owner }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn access(pod: Value, containers: [Value; 2]) -> (Option<u32>, Option<i64>) {
        let [init, main] = containers;
        let pod = serde_json::from_value(json!({"metadata": {}, "spec": {
            "securityContext": pod,
            "initContainers": [{"name": "i", "securityContext": init}],
            "containers": [{"name": "c", "securityContext": main}],
        }}));
        let TokenAccess { mode, owner } = token_access(&pod.unwrap());
        (mode, owner)
    }

    #[test]
    fn a_token_is_private_with_a_common_user_or_an_fsgroup() {
        let user = |uid: i64| json!({"runAsUser": uid});
        let none = || json!({});
        for (pod, containers, expected) in [
            (none(), [none(), none()], (None, None)),
            (user(7), [none(), none()], (Some(0o600), Some(7))),
            (none(), [user(7), user(7)], (Some(0o600), Some(7))),
            (user(7), [none(), user(8)], (None, None)),
            (user(8), [user(7), user(7)], (Some(0o600), Some(7))),
            (none(), [none(), user(7)], (None, None)),
            (none(), [user(7), none()], (None, None)),
            (json!({"fsGroup": 5}), [none(), none()], (Some(0o600), None)),
            (json!({"fsGroup": 5, "runAsUser": 0}), [none(), none()], (Some(0o600), Some(0))),
        ] {
            assert_eq!(access(pod.clone(), containers.clone()), expected, "{pod} {containers:?}");
        }
    }
}
