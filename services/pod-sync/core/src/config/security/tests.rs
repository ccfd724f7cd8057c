use serde_json::{Value, json};

use super::*;
use crate::testing::pod;

fn inputs() -> SecurityInputs<'static> {
    SecurityInputs {
        image_user: ImageUser::default(),
        settings: SecuritySettings { seccomp_dir: "/root-dir/seccomp/", ..SecuritySettings::default() },
        volume_groups: &[],
        target_id: None,
        users: None,
    }
}

fn of(
    pod_context: Value,
    context: Value,
    inputs: &SecurityInputs<'_>,
) -> Result<ContainerSecurity, ConfigError> {
    let pod = pod(
        json!({"securityContext": pod_context, "containers": [{"name": "a", "securityContext": context}]}),
    );
    of_container(&pod, &pod.spec.containers[0], inputs)
}

fn good(pod_context: Value, context: Value) -> ContainerSecurity {
    of(pod_context, context, &inputs()).unwrap()
}

#[test]
fn container_security_context_overrides_pod_and_image() {
    let image = ImageUser { uid: Some(7), username: "" };
    let named = ImageUser { uid: None, username: "app" };
    for (pods, own, image, user, name) in [
        (json!({}), json!({}), ImageUser::default(), Some(0), ""),
        (json!({}), json!({}), image, Some(7), ""),
        (json!({}), json!({}), named, None, "app"),
        (json!({"runAsUser": 5}), json!({}), named, Some(5), ""),
        (json!({"runAsUser": 5}), json!({"runAsUser": 6}), image, Some(6), ""),
    ] {
        let got = of(pods.clone(), own.clone(), &SecurityInputs { image_user: image, ..inputs() }).unwrap();
        assert_eq!((got.run_as_user, got.run_as_username.as_str()), (user, name), "{pods} {own} {image:?}");
    }
    assert_eq!(good(json!({"runAsGroup": 3}), json!({})).run_as_group, Some(3));
    assert_eq!(good(json!({"runAsGroup": 3}), json!({"runAsGroup": 4})).run_as_group, Some(4));
}

#[test]
fn run_as_non_root_is_verified() {
    let root = "container has runAsNonRoot and image will run as root";
    let image = |uid, username| ImageUser { uid, username };
    for (own, image, detail) in [
        (json!({"runAsUser": 0}), image(Some(5), ""), Some("container's runAsUser breaks non-root policy")),
        (json!({"runAsUser": 5}), image(Some(0), ""), None),
        (json!({}), image(Some(0), ""), Some(root)),
        (json!({}), image(None, ""), Some(root)),
        (json!({}), image(Some(5), ""), None),
        (
            json!({}),
            image(None, "app"),
            Some(
                "container has runAsNonRoot and image has non-numeric user (app), cannot verify user is non-root",
            ),
        ),
    ] {
        let got = of(json!({"runAsNonRoot": true}), own, &SecurityInputs { image_user: image, ..inputs() });
        let expected = detail.map(|detail| format!("{detail} (pod: \"web_shop(u-1)\", container: a)"));
        assert_eq!(got.err().map(|error| error.to_string()), expected);
    }
    assert!(of(json!({"runAsNonRoot": true}), json!({"runAsNonRoot": false}), &inputs()).is_ok());
}

#[test]
fn supplemental_groups_are_fsgroup_pod_groups_and_volume_groups() {
    let context = json!({"fsGroup": 1, "supplementalGroups": [2, 3], "supplementalGroupsPolicy": "Strict"});
    let with = SecurityInputs { volume_groups: &[9], ..inputs() };
    let got = of(context.clone(), json!({}), &with).unwrap();
    assert_eq!((got.supplemental_groups, got.strict_groups), (vec![1, 2, 3, 9], true));
    let pod = pod(json!({"securityContext": context, "containers": [{"name": "a"}]}));
    assert_eq!(of_sandbox(&pod, &[9], None).supplemental_groups, [1, 9, 2, 3]);
}

#[test]
fn a_volume_group_is_added_once_and_only_if_the_pod_lacks_it() {
    let context = json!({"fsGroup": 1, "supplementalGroups": [2, 3]});
    let volumes = [9, 3, 1, 9, 8];
    let with = SecurityInputs { volume_groups: &volumes, ..inputs() };
    assert_eq!(of(context.clone(), json!({}), &with).unwrap().supplemental_groups, [1, 2, 3, 9, 8]);
    let with_context = pod(json!({"securityContext": context, "containers": [{"name": "a"}]}));
    assert_eq!(of_sandbox(&with_context, &volumes, None).supplemental_groups, [1, 9, 8, 2, 3]);
    let plain = pod(json!({"containers": [{"name": "a"}]}));
    assert_eq!(of_sandbox(&plain, &[9, 9], None).supplemental_groups, [9]);
}

#[test]
fn seccomp_is_unconfined_by_default() {
    let profile = |type_: &str| match type_ {
        "Localhost" => json!({"seccompProfile": {"type": type_, "localhostProfile": "p.json"}}),
        _ => json!({"seccompProfile": {"type": type_}}),
    };
    let local = SecurityProfile::Localhost("/root-dir/seccomp/p.json".to_owned());
    for (pods, own, default, expected) in [
        (json!({}), json!({}), false, SecurityProfile::Unconfined),
        (json!({}), json!({}), true, SecurityProfile::RuntimeDefault),
        (profile("RuntimeDefault"), json!({}), false, SecurityProfile::RuntimeDefault),
        (profile("RuntimeDefault"), profile("Localhost"), false, local),
        (json!({}), profile("Unconfined"), true, SecurityProfile::Unconfined),
    ] {
        let settings = SecuritySettings { seccomp_default: default, ..inputs().settings };
        let inputs = SecurityInputs { settings, ..inputs() };
        assert_eq!(of(pods, own, &inputs).unwrap().seccomp, expected);
    }
}

#[test]
fn apparmor_profile_is_field_then_annotation_then_pod_field() {
    let field = |type_: &str| match type_ {
        "Localhost" => json!({"appArmorProfile": {"type": type_, "localhostProfile": "p"}}),
        _ => json!({"appArmorProfile": {"type": type_}}),
    };
    let run = |pods: Value, own: Value, annotation: Option<&str>| {
        let mut pod =
            pod(json!({"securityContext": pods, "containers": [{"name": "a", "securityContext": own}]}));
        if let Some(text) = annotation {
            pod.metadata.annotations.insert(format!("{APPARMOR_ANNOTATION}a"), text.to_owned());
        }
        let made = of_container(&pod, &pod.spec.containers[0], &inputs());
        made.map(|made| made.apparmor.map(|p| p.apparmor_text())).map_err(|error| error.to_string())
    };
    let text = |text: &str| Ok(Some(text.to_owned()));
    assert_eq!(run(json!({}), json!({}), None), Ok(None));
    assert_eq!(run(field("RuntimeDefault"), json!({}), None), text("runtime/default"));
    assert_eq!(run(field("RuntimeDefault"), json!({}), Some("unconfined")), text("unconfined"));
    assert_eq!(run(json!({}), field("Localhost"), Some("localhost/p")), text("localhost/p"));
    let refused = run(json!({}), field("Localhost"), Some("unconfined")).unwrap_err();
    assert!(refused.contains("apparmor type in annotation and field must match"), "{refused}");
    assert_eq!(run(json!({}), json!({}), Some("localhost/q")), text("localhost/q"));
    assert_eq!(run(json!({}), json!({}), Some("runtime/default")), text("runtime/default"));
    assert_eq!(run(json!({}), field("Unconfined"), None), text("unconfined"));
}

#[test]
fn capabilities_and_flags_are_passed_unchanged() {
    let got = good(
        json!({}),
        json!({"privileged": true, "readOnlyRootFilesystem": true,
            "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]}}),
    );
    assert!(got.privileged && got.readonly_rootfs);
    assert!(good(json!({}), json!({"allowPrivilegeEscalation": false})).no_new_privs);
    assert_eq!((got.capabilities_add, got.capabilities_drop), (vec!["NET_ADMIN".into()], vec!["ALL".into()]));
    let plain = good(json!({}), json!({"allowPrivilegeEscalation": true}));
    assert!(!plain.privileged && !plain.readonly_rootfs && !plain.no_new_privs);
    assert!(!good(json!({}), json!({})).no_new_privs, "only an explicit false forbids");
}

#[test]
fn selinux_options_of_the_container_override_the_pods() {
    let label = |level: &str| json!({"seLinuxOptions": {"level": level}});
    let level = |pods, own| good(pods, own).selinux.map(|selinux| selinux.level);
    assert_eq!(level(label("s0"), json!({})).as_deref(), Some("s0"));
    assert_eq!(level(label("s0"), label("s1")).as_deref(), Some("s1"));
    assert_eq!(level(json!({}), json!({})), None);
}

#[test]
fn paths_are_masked_unless_proc_mount_is_unmasked() {
    let further = ["/sys/devices/system/cpu/cpu0/thermal_throttle".to_owned()];
    let settings = SecuritySettings { masked_paths: &further, ..inputs().settings };
    let with = SecurityInputs { settings, ..inputs() };
    let got = of(json!({}), json!({}), &with).unwrap();
    assert_eq!(got.masked_paths.len(), MASKED_PATHS.len() + 1);
    assert_eq!(got.readonly_paths, READONLY_PATHS);
    let own_users = pod(json!({
        "hostUsers": false, "containers": [{"name": "a", "securityContext": {"procMount": "Unmasked"}}],
    }));
    let bare = of_container(&own_users, &own_users.spec.containers[0], &with).unwrap();
    assert!(bare.masked_paths.is_empty() && bare.readonly_paths.is_empty());
}

#[test]
fn namespaces_follow_the_pod_spec() {
    use NamespaceMode::{Container, Node, Pod};
    for (spec, network, ipc, pid) in [
        (json!({}), Pod, Pod, Container),
        (json!({"hostNetwork": true}), Node, Pod, Container),
        (json!({"hostIPC": true}), Pod, Node, Container),
        (json!({"hostPID": true}), Pod, Pod, Node),
        (json!({"shareProcessNamespace": true}), Pod, Pod, Pod),
    ] {
        let got = namespaces(&pod(spec.clone()), None);
        assert_eq!((got.network, got.ipc, got.pid), (network, ipc, pid), "{spec}");
    }
}

#[test]
fn an_ephemeral_container_joins_the_pid_namespace_of_its_target() {
    let target = SecurityInputs { target_id: Some("cid"), ..inputs() };
    let got = of(json!({}), json!({}), &target).unwrap().namespaces;
    assert_eq!((got.pid, got.target_id.as_str()), (NamespaceMode::Target, "cid"));
    let shared = pod(json!({"shareProcessNamespace": true, "containers": [{"name": "a"}]}));
    let got = of_container(&shared, &shared.spec.containers[0], &target).unwrap().namespaces;
    assert_eq!((got.pid, got.target_id.as_str()), (NamespaceMode::Pod, ""));
}

#[test]
fn the_sandbox_is_privileged_if_any_container_is() {
    let privileged = json!({"name": "p", "securityContext": {"privileged": true}});
    for (spec, expected) in [
        (json!({"containers": [{"name": "a"}]}), false),
        (json!({"containers": [{"name": "a"}, privileged]}), true),
        (json!({"containers": [{"name": "a"}], "initContainers": [privileged]}), true),
    ] {
        assert_eq!(of_sandbox(&pod(spec), &[], None).privileged, expected);
    }
}

#[test]
fn run_as_group_of_the_sandbox_needs_a_user() {
    let run = |context: Value| {
        let got = of_sandbox(&pod(json!({ "securityContext": context })), &[], None);
        (got.run_as_user, got.run_as_group)
    };
    assert_eq!(run(json!({"runAsGroup": 3})), (None, None));
    assert_eq!(run(json!({"runAsUser": 2, "runAsGroup": 3})), (Some(2), Some(3)));
}

#[test]
fn unknown_security_values_are_errors_never_the_weaker_choice() {
    for (pods, own, expected) in [
        (
            json!({"seccompProfile": {"type": "Localhost"}}),
            json!({}),
            "spec.securityContext.seccompProfile.localhostProfile: Required value",
        ),
        (
            json!({"seccompProfile": {"type": "runtimeDefault"}}),
            json!({}),
            "spec.securityContext.seccompProfile.type: Unsupported value: \"runtimeDefault\"",
        ),
        (
            json!({}),
            json!({"seccompProfile": {"type": ""}}),
            "spec.containers[0].securityContext.seccompProfile.type: Required value",
        ),
        (
            json!({}),
            json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "../../etc/p"}}),
            "spec.containers[0].securityContext.seccompProfile.localhostProfile: Invalid value",
        ),
        (
            json!({}),
            json!({"appArmorProfile": {"type": "runtime/default"}}),
            "spec.containers[0].securityContext.appArmorProfile.type: Unsupported value",
        ),
        (
            json!({}),
            json!({"procMount": "Unmasked"}),
            "spec.containers[0].securityContext.procMount: Invalid value",
        ),
        (
            json!({"supplementalGroupsPolicy": "strict"}),
            json!({}),
            "spec.securityContext.supplementalGroupsPolicy",
        ),
        (json!({"runAsUser": -1}), json!({}), "spec.securityContext.runAsUser: Invalid value: -1"),
        (
            json!({}),
            json!({"privileged": true, "allowPrivilegeEscalation": false}),
            "spec.containers[0].securityContext: Invalid value",
        ),
    ] {
        let error = of(pods.clone(), own.clone(), &inputs()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{pods} {own}: {error}");
        let pod =
            pod(json!({"securityContext": pods, "containers": [{"name": "a", "securityContext": own}]}));
        assert!(refuse_unsafe(&pod).is_err(), "the sandbox is refused, too");
    }
}

#[test]
fn an_unknown_profile_kind_is_an_error_even_without_admission() {
    let own = |field: &str, kind: &str| -> SecurityContext {
        serde_json::from_value(json!({ field: {"type": kind} })).unwrap()
    };
    let pod = pod(json!({"containers": [{"name": "a"}]}));
    for kind in ["Localhost", "runtimeDefault", ""] {
        assert!(seccomp(&own("seccompProfile", kind), &pod, &inputs()).is_err(), "{kind}");
        assert!(apparmor(&own("appArmorProfile", kind), &pod, &pod.spec.containers[0]).is_err(), "{kind}");
    }
}
