use keelson_config::SystemCgroups;
use serde_json::{Value, json};

use crate::document::Document;
use crate::inputs::{Flags, Host, Inputs};
use crate::outcome::WITHOUT_EFFECT;
use crate::resolve::{Resolved, resolve};

fn resolved(fields: Value, runtime: Option<&str>) -> Result<Resolved, Vec<String>> {
    let mut root = json!({"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"});
    root.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let document =
        Document { file: "k.yaml".into(), root: root.as_object().unwrap().clone(), ..Document::default() };
    let host = Host { hostname: "edge".into(), ..Host::default() };
    let flags = Flags { runtime_cgroups: runtime.map(str::to_owned), ..Flags::default() };
    resolve(Inputs { flags: &flags, kubelet: Some(&document), drop_ins: &[], keelson: None, host: &host })
        .map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

#[test]
fn kubelet_runtime_and_system_cgroups_are_applied() {
    let fields = json!({"kubeletCgroups": "/agent.slice", "systemCgroups": "misc.slice", "cgroupRoot": "/"});
    let found = resolved(fields, Some("/system.slice/containerd.service")).unwrap();
    let expected = SystemCgroups {
        kubelet: "/agent.slice".into(),
        runtime: "/system.slice/containerd.service".into(),
        misc: "/misc.slice".into(),
    };
    assert_eq!(found.config.resources.system_cgroups, expected);
    assert_eq!(found.config.provenance["resources.systemCgroups.runtime"], "--runtime-cgroups");
    assert!(found.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", found.notes);
    for fields in [json!({}), json!({"kubeletCgroups": "", "systemCgroups": ""})] {
        let none = resolved(fields, Some("")).unwrap().config.resources.system_cgroups;
        assert_eq!(none, SystemCgroups::default());
    }
}

#[test]
fn invalid_values_are_refused_with_a_remedy() {
    for (fields, runtime, part) in [
        (json!({"systemCgroups": "/misc"}), None, "needs cgroupRoot"),
        (json!({"systemCgroups": "/", "cgroupRoot": "/"}), None, "the whole machine"),
        (json!({"kubeletCgroups": "/a/../b"}), None, "kubeletCgroups"),
        (json!({}), Some("/a//b"), "--runtime-cgroups"),
    ] {
        let errors = resolved(fields, runtime).unwrap_err();
        assert!(errors.len() == 1 && errors[0].contains(part), "{part}: {errors:?}");
    }
}

#[test]
fn kubelet_cgroups_outside_kube_reserved_cgroup_cause_a_warning() {
    for (own, reserved, warned) in
        [("/kube.slice/agent", "/kube.slice", false), ("/agent", "/kube.slice", true), ("/agent", "", false)]
    {
        let fields = json!({"kubeletCgroups": own, "kubeReservedCgroup": reserved});
        let notes = resolved(fields, None).unwrap().notes;
        let found = notes.iter().any(|note| {
            note.text.starts_with("unsupported configuration:KubeletCgroups is not within KubeReservedCgroup")
        });
        assert_eq!(found, warned, "{own} {reserved}");
    }
}
