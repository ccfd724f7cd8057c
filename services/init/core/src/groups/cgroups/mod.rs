//! The cgroups of the pods, and those whose statistics are collected, from the KubeletConfiguration and a flag
//! (node-and-api.md §2.5, §4.1).

use serde_json::Value;

use crate::document::Sourced;
use crate::inputs::given;
use crate::outcome::{Level, Outcome};
use crate::paths::is_clean;
use crate::settings::{Files, Settings};

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct Cgroups {
    root: Option<Sourced<String>>,
    driver: Option<Sourced<String>>,
    kubelet: Option<Sourced<String>>,
    misc: Option<Sourced<String>>,
    /// `kubeReservedCgroup`, which should contain that of the kubelet.
    kube_reserved: Option<String>,
}

impl Settings for Cgroups {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        let kube_reserved = reader.peek("kubeReservedCgroup").and_then(Value::as_str);
        Self {
            root: reader.text_field("cgroupRoot"),
            driver: reader.choice_field("cgroupDriver"),
            kubelet: reader.text_field("kubeletCgroups"),
            misc: reader.text_field("systemCgroups"),
            kube_reserved: kube_reserved.filter(|cgroup| !cgroup.is_empty()).map(ToOwned::to_owned),
        }
    }

    fn resolve(mut self, out: &mut Outcome<'_>) {
        self.statistics(out);
        if let Some(root) = self.root.as_ref().filter(|root| root.value != "/" && !is_clean(&root.value)) {
            out.refuse(root, "this must be / or an absolute path in the cgroup tree, such as /pods.slice");
        }
        out.set_field(self.root, |c, v| c.runtime.cgroup_root = v);
        out.set_field(self.driver, |c, v| c.runtime.cgroup_driver = v);
    }
}

impl Cgroups {
    /// Applies the cgroups whose statistics are collected.
    fn statistics(&mut self, out: &mut Outcome<'_>) {
        let own = path(out, self.kubelet.take());
        let runtime = given("--runtime-cgroups", out.flags.runtime_cgroups.as_ref());
        let runtime = path(out, runtime);
        let misc = path(out, self.misc.take());
        if let Some(misc) = &misc {
            if misc.value == "/" {
                out.refuse(misc, "this is the whole machine; set a cgroup below it");
            }
            if self.root.is_none() {
                out.refuse(misc, "this needs cgroupRoot, the parent cgroup of the pods, such as /");
            }
        }
        if let (Some(own), Some(reserved)) = (&own, &self.kube_reserved)
            && !own.value.starts_with(reserved)
        {
            let text = format!(
                "unsupported configuration:KubeletCgroups is not within KubeReservedCgroup: kubeletCgroups ({}) is not below {reserved}",
                own.origin
            );
            out.note(Level::Warn, text);
        }
        out.set_field(own, |c, v| c.resources.system_cgroups.kubelet = v);
        out.set("resources.systemCgroups.runtime", runtime, |c, v| c.resources.system_cgroups.runtime = v);
        out.set_field(misc, |c, v| c.resources.system_cgroups.misc = v);
    }
}

/// The path from the root of the cgroup tree; `None` for an empty string.
fn path(out: &mut Outcome<'_>, given: Option<Sourced<String>>) -> Option<Sourced<String>> {
    let given = given.filter(|given| !given.value.is_empty())?;
    let path = format!("/{}", given.value.trim_start_matches('/'));
    if path != "/" && !is_clean(&path) {
        out.refuse(
            &given,
            "this must be a path in the cgroup tree, such as /system.slice/containerd.service",
        );
        return None;
    }
    Some(given.map(|_| path))
}

#[cfg(test)]
mod tests;
