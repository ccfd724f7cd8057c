//! How the node of an API server gets its certificates, from the KubeletConfiguration and flags (node-and-api.md §6).

use keelson_config::{Certificates as ResolvedCertificates, ControlPlane};

use crate::document::Sourced;
use crate::inputs::given;
use crate::outcome::Outcome;
use crate::paths::absolute;
use crate::settings::{Files, Settings};

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct Certificates {
    rotate: Option<Sourced<bool>>,
    serving: Option<Sourced<bool>>,
}

impl Settings for Certificates {
    fn read(files: &mut Files<'_>) -> Self {
        Self {
            rotate: files.kubelet.boolean("rotateCertificates"),
            serving: files.kubelet.boolean("serverTLSBootstrap"),
        }
    }

    /// Only the API server signs certificates: without one, the fields have no effect.
    fn resolve(self, out: &mut Outcome<'_>) {
        let Self { rotate, serving } = self;
        if !matches!(out.config.control_plane, ControlPlane::Kubernetes(_)) {
            let fields = [rotate, serving].into_iter().flatten().map(|given| given.field);
            out.without_effect.extend(fields);
            return;
        }
        let file = |name: &str| {
            let path = out.flags.others.get(name).filter(|path| !path.is_empty());
            given(&format!("--{name}"), path).map(|path| path.map(|path| absolute(&out.host.cwd, &path)))
        };
        let (bootstrap, dir) = (file("bootstrap-kubeconfig"), file("cert-dir"));
        let mut set = |path: &str, value, apply: fn(&mut ResolvedCertificates, String)| {
            out.set(path, value, |config, value| {
                if let ControlPlane::Kubernetes(api) = &mut config.control_plane {
                    apply(&mut api.certificates, value);
                }
            });
        };
        set("controlPlane.kubernetes.certificates.bootstrapKubeconfig", bootstrap, |own, v| {
            own.bootstrap_kubeconfig = Some(v.into());
        });
        set("controlPlane.kubernetes.certificates.dir", dir, |own, v| own.dir = v.into());
        let mut set_field = |value, apply: fn(&mut ResolvedCertificates, bool)| {
            out.set_field(value, |config, value| {
                if let ControlPlane::Kubernetes(api) = &mut config.control_plane {
                    apply(&mut api.certificates, value);
                }
            });
        };
        set_field(rotate, |own, v| own.rotate = v);
        set_field(serving, |own, v| own.serving = v);
    }
}
