//! The cgroups outside the pods whose statistics are collected, from the KubeletConfiguration and a flag (node-and-api.md
//! §2.5, §4.1).

use crate::document::{Reader, Sourced};
use crate::kubelet_file::KubeletFile;
use crate::resolve::{Level, Resolver, flag, is_clean};

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct SystemCgroupsFile {
    kubelet: Option<Sourced<String>>,
    misc: Option<Sourced<String>>,
}

impl SystemCgroupsFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        Self { kubelet: reader.string("kubeletCgroups"), misc: reader.string("systemCgroups") }
    }
}

/// Applies the fields to the configuration; call it before `cgroupRoot` is read from the file.
pub(crate) fn resolve(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let file = std::mem::take(&mut kubelet.system_cgroups);
    let own = path(resolver, file.kubelet);
    let runtime = flag("--runtime-cgroups", resolver.flags.runtime_cgroups.as_ref());
    let runtime = path(resolver, runtime);
    let misc = path(resolver, file.misc);
    if let Some(misc) = &misc {
        if misc.value == "/" {
            resolver.refuse(misc, "this is the whole machine; set a cgroup below it");
        }
        if kubelet.cgroup_root.as_ref().is_none_or(|root| root.value.is_empty()) {
            resolver.refuse(misc, "this needs cgroupRoot, the parent cgroup of the pods, such as /");
        }
    }
    if let (Some(own), Some(reserved)) = (&own, kubelet.eviction.kube_reserved_cgroup())
        && !own.value.starts_with(reserved)
    {
        let text = format!(
            "unsupported configuration:KubeletCgroups is not within KubeReservedCgroup: kubeletCgroups ({}) is not below {reserved}",
            own.origin
        );
        resolver.note(Level::Warn, text);
    }
    resolver.set("resources.systemCgroups.kubelet", own, |c, v| c.resources.system_cgroups.kubelet = v);
    resolver.set("resources.systemCgroups.runtime", runtime, |c, v| c.resources.system_cgroups.runtime = v);
    resolver.set("resources.systemCgroups.misc", misc, |c, v| c.resources.system_cgroups.misc = v);
}

/// The path from the root of the cgroup tree; `None` for an empty string.
fn path(resolver: &mut Resolver<'_>, given: Option<Sourced<String>>) -> Option<Sourced<String>> {
    let given = given.filter(|given| !given.value.is_empty())?;
    let path = format!("/{}", given.value.trim_start_matches('/'));
    if path != "/" && !is_clean(&path) {
        resolver.refuse(
            &given,
            "this must be a path in the cgroup tree, such as /system.slice/containerd.service",
        );
        return None;
    }
    Some(given.map(|_| path))
}

#[cfg(test)]
mod tests {
    use keelson_config::SystemCgroups;
    use serde_json::{Value, json};

    use crate::document::Document;
    use crate::resolve::{Flags, Host, Inputs, Resolved, resolve};

    fn resolved(fields: Value, runtime: Option<&str>) -> Result<Resolved, Vec<String>> {
        let mut root = json!({"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"});
        root.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let document = Document {
            file: "k.yaml".into(),
            root: root.as_object().unwrap().clone(),
            ..Document::default()
        };
        let host = Host { hostname: "edge".into(), ..Host::default() };
        let flags = Flags { runtime_cgroups: runtime.map(str::to_owned), ..Flags::default() };
        resolve(Inputs { flags: &flags, kubelet: Some(&document), drop_ins: &[], keelson: None, host: &host })
            .map_err(|errors| errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn kubelet_runtime_and_system_cgroups_are_applied() {
        let fields =
            json!({"kubeletCgroups": "/agent.slice", "systemCgroups": "misc.slice", "cgroupRoot": "/"});
        let found = resolved(fields, Some("/system.slice/containerd.service")).unwrap();
        let expected = SystemCgroups {
            kubelet: "/agent.slice".into(),
            runtime: "/system.slice/containerd.service".into(),
            misc: "/misc.slice".into(),
        };
        assert_eq!(found.config.resources.system_cgroups, expected);
        assert_eq!(found.config.provenance["resources.systemCgroups.runtime"], "--runtime-cgroups");
        assert!(found.notes.iter().all(|note| !note.text.contains("no effect yet")), "{:?}", found.notes);
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
        for (own, reserved, warned) in [
            ("/kube.slice/agent", "/kube.slice", false),
            ("/agent", "/kube.slice", true),
            ("/agent", "", false),
        ] {
            let fields = json!({"kubeletCgroups": own, "kubeReservedCgroup": reserved});
            let notes = resolved(fields, None).unwrap().notes;
            let found = notes.iter().any(|note| {
                note.text
                    .starts_with("unsupported configuration:KubeletCgroups is not within KubeReservedCgroup")
            });
            assert_eq!(found, warned, "{own} {reserved}");
        }
    }
}
