//! etcd as the control plane.

use keelson_config::{ControlPlane, Etcd, EtcdEndpoint};

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::reader::Reader;

/// The fields below `etcd`; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(super) struct EtcdAccess {
    endpoints: Option<Sourced<Vec<String>>>,
    ca: Option<Sourced<String>>,
    cert: Option<Sourced<String>>,
    key: Option<Sourced<String>>,
    user: Option<Sourced<String>>,
    password: Option<Sourced<String>>,
}

impl EtcdAccess {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        if !reader.object("etcd") {
            return Self::default();
        }
        Self {
            endpoints: reader.strings("etcd.endpoints"),
            ca: reader.path("etcd.caFile"),
            cert: reader.path("etcd.certFile"),
            key: reader.path("etcd.keyFile"),
            password: reader.path("etcd.passwordFile"),
            user: reader.string("etcd.user"),
        }
    }

    /// Makes etcd the control plane if `name` chooses it.
    pub(super) fn resolve(
        self,
        out: &mut Outcome<'_>,
        name: Option<Sourced<String>>,
        lease_seconds: Option<Sourced<u32>>,
    ) {
        let Some(name) = name.filter(|name| name.value == "etcd") else { return };
        let Some(endpoints) = self.endpoints.clone() else {
            out.refuse(&name, "etcd.endpoints lists the members of etcd and is missing");
            return;
        };
        self.check(out, &endpoints);
        let Self { ca, cert, key, user, password, .. } = self;
        out.set("controlPlane", Some(name), |_, _| ());
        out.set("controlPlane.etcd.endpoints", Some(endpoints), |c, v| {
            c.control_plane = ControlPlane::Etcd(Etcd::plain(v));
        });
        let mut text = |path: &str, value, apply: fn(&mut Etcd, String)| set(out, path, value, apply);
        text("controlPlane.etcd.caFile", ca, |etcd, v| etcd.ca_file = Some(v.into()));
        text("controlPlane.etcd.certFile", cert, |etcd, v| etcd.cert_file = Some(v.into()));
        text("controlPlane.etcd.keyFile", key, |etcd, v| etcd.key_file = Some(v.into()));
        text("controlPlane.etcd.user", user, |etcd, v| etcd.user = Some(v));
        text("controlPlane.etcd.passwordFile", password, |etcd, v| etcd.password_file = Some(v.into()));
        set(out, "controlPlane.etcd.leaseSeconds", lease_seconds, |etcd, v| etcd.lease_seconds = v);
    }

    /// Checks the endpoints, and the fields that need each other.
    fn check(&self, out: &mut Outcome<'_>, endpoints: &Sourced<Vec<String>>) {
        let Self { ca, cert, key, user, password, .. } = self;
        for endpoint in endpoints.value.iter().filter(|text| EtcdEndpoint::parse(text).is_none()) {
            out.refuse(endpoints, format!("{endpoint:?} {}", EtcdEndpoint::RULE));
        }
        if endpoints.value.is_empty() {
            out.refuse(endpoints, "list at least one member of etcd");
        }
        let secure = |text: &String| EtcdEndpoint::parse(text).is_some_and(|endpoint| endpoint.secure);
        if endpoints.value.iter().any(secure) && ca.is_none() {
            out.refuse(endpoints, "members with https need etcd.caFile, the CA of their certificates");
        }
        for (one, field, other, missing) in [
            (cert, "etcd.certFile", key, "etcd.keyFile"),
            (key, "etcd.keyFile", cert, "etcd.certFile"),
            (user, "etcd.user", password, "etcd.passwordFile"),
            (password, "etcd.passwordFile", user, "etcd.user"),
        ] {
            if let (Some(given), None) = (one, other) {
                out.refuse(given, format!("{field} works only with {missing}, which is missing"));
            }
        }
    }
}

fn set<T>(out: &mut Outcome<'_>, path: &str, value: Option<Sourced<T>>, apply: impl FnOnce(&mut Etcd, T)) {
    out.set(path, value, |config, value| {
        if let ControlPlane::Etcd(etcd) = &mut config.control_plane {
            apply(etcd, value);
        }
    });
}
