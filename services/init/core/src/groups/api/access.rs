//! Authentication, authorization and TLS of the kubelet API, from the KubeletConfiguration (node-and-api.md §6, §7).
//!
//! The API uses TLS on a node with an API server, and on one whose file names client CAs or a serving certificate; with TLS
//! it may listen on any address. With an API server, tokens and permissions are checked there by default. Without one, only
//! client certificates and anonymous requests are possible.

use keelson_config::{ApiTls, ControlPlane, kubelet_fields};
use serde_json::Value;

use super::tls::{
    TLS13, list, refuse_old_version, supported_key_exchanges, supported_suites, warn_about_rsa_only_suites,
};
use crate::document::Sourced;
use crate::durations::{NOT_A_DURATION, signed_nanos};
use crate::outcome::{Level, Outcome};
use crate::paths::absolute;
use crate::reader::Reader;

/// `0.0.0.0`, the default address of a kubelet.
const DEFAULT_ADDRESS: &str = "0.0.0.0";
/// The part of the resolved configuration with the TLS settings.
const TLS: &str = "api.tls";

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(super) struct Access {
    client_ca: Option<Sourced<String>>,
    anonymous: Option<Sourced<bool>>,
    webhook: Option<Sourced<bool>>,
    mode: Option<Sourced<String>>,
    cert: Option<Sourced<String>>,
    key: Option<Sourced<String>>,
    min_version: Option<Sourced<String>>,
    cipher_suites: Option<Sourced<Vec<String>>>,
    curves: Option<Sourced<Vec<i64>>>,
    caches: [Option<Sourced<u64>>; 3],
    /// `serverTLSBootstrap`; here it only matters whether it is true.
    tls_bootstrap: Option<Sourced<bool>>,
    /// The fields that the file sets and that have no effect without TLS.
    given: Vec<&'static str>,
}

/// A field with the cache time of an API server's answer, and how to set it.
type Cache = (&'static str, fn(&mut ApiTls, u64));

const CACHES: [Cache; 3] = [
    ("authentication.webhook.cacheTTL", |tls, ms| tls.token_cache_ms = ms),
    ("authorization.webhook.cacheAuthorizedTTL", |tls, ms| tls.allowed_cache_ms = ms),
    ("authorization.webhook.cacheUnauthorizedTTL", |tls, ms| tls.denied_cache_ms = ms),
];

impl Access {
    /// Reads the fields.
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let nested = |reader: &mut Reader<'_>, parent, field| {
            if reader.object(parent) { reader.boolean(field) } else { None }
        };
        let mut own = Self {
            given: tls_fields().filter(|field| reader.is_set(field)).collect(),
            cert: reader.path_field("tlsCertFile"),
            key: reader.path_field("tlsPrivateKeyFile"),
            min_version: reader.choice_field("tlsMinVersion"),
            cipher_suites: list(reader, "tlsCipherSuites", |suite| suite.as_str().map(ToOwned::to_owned)),
            curves: list(reader, "tlsCurvePreferences", Value::as_i64),
            tls_bootstrap: tls_bootstrap(reader),
            ..Self::default()
        };
        if reader.object("authentication") {
            if reader.object("authentication.x509") {
                own.client_ca = reader.path_field("authentication.x509.clientCAFile");
            }
            own.anonymous = nested(reader, "authentication.anonymous", "authentication.anonymous.enabled");
            own.webhook = nested(reader, "authentication.webhook", "authentication.webhook.enabled");
        }
        if reader.object("authorization") {
            own.mode = reader.choice_field("authorization.mode");
        }
        own.caches = CACHES.map(|(field, _)| cache_ttl_ms(reader, field));
        own
    }

    /// Checks fields that depend on each other, and applies them. Without TLS none has an effect.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        for (one, missing) in [(&self.cert, &self.key), (&self.key, &self.cert)] {
            if let (Some(given), None) = (one, missing) {
                out.refuse(given, "tlsCertFile and tlsPrivateKeyFile work only together");
            }
        }
        if !self.uses_tls(out) {
            out.without_effect.extend(self.given.iter().map(|field| (*field).to_owned()));
            return;
        }
        let is_requested = matches!(
            &out.config.control_plane,
            ControlPlane::Kubernetes(api) if api.certificates.serving
        );
        let (tokens, reviews, anonymous) = self.access_settings(out);
        out.config.api.tls =
            Some(ApiTls { tokens, reviews, anonymous, asked_for: is_requested, ..ApiTls::default() });
        DEFAULT_ADDRESS.clone_into(&mut out.config.api.address);
        self.apply(out);
    }

    /// Applies the fields to the TLS settings.
    fn apply(self, out: &mut Outcome<'_>) {
        let Self { client_ca, cert, key, min_version, cipher_suites, curves, caches, anonymous, .. } = self;
        let only_tls13 = min_version.as_ref().is_some_and(|version| version.value == TLS13);
        refuse_old_version(out, min_version.as_ref());
        let cipher_suites = supported_suites(out, cipher_suites);
        let curves = supported_key_exchanges(out, curves);
        if let Some(suites) = cipher_suites.as_ref().filter(|_| cert.is_none() && !only_tls13) {
            warn_about_rsa_only_suites(out, suites);
        }
        set_field(out, client_ca, |tls, v| tls.client_ca_file = Some(v.into()));
        set_field(out, cert, |tls, v| tls.cert_file = Some(v.into()));
        set_field(out, key, |tls, v| tls.key_file = Some(v.into()));
        set_field(out, min_version, |tls, v| tls.only_tls13 = v == TLS13);
        let cert_dir = flag_folder(out, "cert-dir");
        out.set("api.tls.certDir", cert_dir, |config, dir| {
            if let Some(tls) = &mut config.api.tls {
                tls.cert_dir = dir.into();
            }
        });
        for ((_, apply), value) in CACHES.into_iter().zip(caches) {
            set_field(out, value, apply);
        }
        set_field(out, cipher_suites, |tls, v| tls.cipher_suites = v);
        set_field(out, curves, |tls, v| tls.key_exchanges = v);
        set_field(out, anonymous, |tls, v| tls.anonymous = v);
    }

    /// Whether the kubelet API uses TLS: there is an API server, or a field that implies TLS is set.
    fn uses_tls(&self, out: &Outcome<'_>) -> bool {
        matches!(out.config.control_plane, ControlPlane::Kubernetes(_))
            || self.client_ca.is_some()
            || (self.cert.is_some() && self.key.is_some())
            || self.tls_bootstrap.as_ref().is_some_and(|tls_bootstrap| tls_bootstrap.value)
    }

    /// Whether tokens, access reviews and anonymous requests are enabled. Unset fields have the kubelet's defaults, which are
    /// less strict without a file (node-and-api.md §2.2).
    fn access_settings(&self, out: &mut Outcome<'_>) -> (bool, bool, bool) {
        let with_file = out.with_file;
        let anonymous = self.anonymous.as_ref().map_or(!with_file, |anonymous| anonymous.value);
        let reviews = self.mode.as_ref().map_or(with_file, |mode| mode.value == "Webhook");
        let (tokens, reviews) = if matches!(out.config.control_plane, ControlPlane::Kubernetes(_)) {
            (self.webhook.as_ref().map_or(with_file, |webhook| webhook.value), reviews)
        } else {
            self.refuse_webhooks(out, reviews);
            (false, false)
        };
        if self.client_ca.is_none() && !tokens && !anonymous {
            let none =
                Sourced { value: false, field: "authentication".to_owned(), origin: self.tls_origin(out) };
            out.refuse(
                &none,
                "no authentication method configured: no client could use the kubelet API; set client CAs in \
                 authentication.x509.clientCAFile, or allow tokens (authentication.webhook) or anonymous requests \
                 (authentication.anonymous)",
            );
        }
        if !reviews && anonymous {
            out.note(
                Level::Warn,
                "authentication.anonymous gives everybody who reaches the kubelet API access to every container"
                    .to_owned(),
            );
        }
        (tokens, reviews, anonymous)
    }

    /// The origin of the setting that turns TLS on.
    fn tls_origin(&self, out: &Outcome<'_>) -> String {
        let files = [&self.client_ca, &self.cert].into_iter().flatten().map(|file| file.origin.clone());
        let tls_bootstrap = self.tls_bootstrap.as_ref().map(|tls_bootstrap| tls_bootstrap.origin.clone());
        let key = out.config.provenance.get("controlPlane.kubernetes.kubeconfig").cloned();
        files.chain(tls_bootstrap).chain(key).next().unwrap_or_default()
    }

    /// Without an API server nothing can check tokens or permissions: refuses a configuration that needs it.
    fn refuse_webhooks(&self, out: &mut Outcome<'_>, reviews: bool) {
        if let Some(webhook) = self.webhook.as_ref().filter(|webhook| webhook.value) {
            out.refuse(
                webhook,
                "no client provided, cannot use webhook authentication: there is no API server to check tokens; \
                 write false, or set --kubeconfig",
            );
        }
        if reviews {
            let unset = || Sourced {
                value: "Webhook".to_owned(),
                field: "authorization.mode".into(),
                origin: self.tls_origin(out),
            };
            let mode = self.mode.clone().unwrap_or_else(unset);
            out.refuse(
                &mode,
                "no client provided, cannot use webhook authorization: there is no API server to check permissions; \
                 set --kubeconfig, or write AlwaysAllow: then every client with a certificate of \
                 authentication.x509.clientCAFile may do everything",
            );
        }
    }
}

/// The fields at the top level that set something of TLS.
fn tls_fields() -> impl Iterator<Item = &'static str> {
    let is_in_tls =
        |path: &&str| path.strip_prefix(TLS).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let fields = kubelet_fields().iter().filter(|field| !field.path.contains('.'));
    fields.filter(move |field| field.sets.iter().any(is_in_tls)).map(|field| field.path)
}

/// Applies a field to the TLS settings.
fn set_field<T>(out: &mut Outcome<'_>, value: Option<Sourced<T>>, apply: impl FnOnce(&mut ApiTls, T)) {
    out.set_field(value, |config, value| {
        if let Some(tls) = &mut config.api.tls {
            apply(tls, value);
        }
    });
}

/// The folder that a flag names.
fn flag_folder(out: &Outcome<'_>, name: &'static str) -> Option<Sourced<String>> {
    let path = out.flags.others.get(name).filter(|path| !path.is_empty())?;
    let (origin, field) = ("command line".to_owned(), format!("--{name}"));
    Some(Sourced { value: absolute(&out.host.cwd, path), origin, field })
}

/// `serverTLSBootstrap`, which turns TLS on.
fn tls_bootstrap(reader: &Reader<'_>) -> Option<Sourced<bool>> {
    const FIELD: &str = "serverTLSBootstrap";
    let value = reader.peek(FIELD)?.as_bool()?;
    Some(Sourced { value, origin: reader.origin(FIELD), field: FIELD.to_owned() })
}

/// The cache time in milliseconds: zero is the default, a negative value turns the cache off.
fn cache_ttl_ms(reader: &mut Reader<'_>, field: &str) -> Option<Sourced<u64>> {
    let (parent, _) = field.rsplit_once('.')?;
    if !reader.object(parent) {
        return None;
    }
    let text = reader.string(field)?;
    match signed_nanos(&text.value) {
        Some(0) => None,
        Some(nanos) => Some(text.map(|_| u64::try_from(nanos.max(0) / 1_000_000).unwrap_or(u64::MAX))),
        None => {
            reader.refuse(&text, NOT_A_DURATION);
            None
        }
    }
}
