//! Authentication, authorization and TLS of the kubelet API, from the KubeletConfiguration (node-and-api.md §6, §7).
//!
//! The API uses TLS on a node with an API server, and on one whose file names client CAs or a serving certificate; with TLS
//! it may listen on any address. With an API server, tokens and permissions are checked there by default. Without one, only
//! client certificates and anonymous requests are possible.

use std::net::IpAddr;

use keelson_config::{ApiTls, ControlPlane};
use serde_json::Value;

use crate::api_tls::{
    TLS13, list, min_version, refuse_old_version, supported_key_exchanges, supported_suites,
    warn_about_rsa_only_suites,
};
use crate::document::{Reader, Sourced};
use crate::kubelet_file::{KubeletFile, absolute};
use crate::resolve::{Level, Resolver};
use crate::rules;

/// `0.0.0.0`, the default address of a kubelet.
const DEFAULT_ADDRESS: &str = "0.0.0.0";
/// Fields without meaning when TLS is off.
const TLS_FIELDS: [&str; 7] = [
    "authentication",
    "authorization",
    "tlsCertFile",
    "tlsCipherSuites",
    "tlsCurvePreferences",
    "tlsMinVersion",
    "tlsPrivateKeyFile",
];
/// The authorization modes.
const MODES: [&str; 2] = ["AlwaysAllow", "Webhook"];

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct ApiAccessFile {
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
    /// `serverTLSBootstrap`; here it only matters whether it is true. `control_plane` applies it.
    tls_bootstrap: Option<Sourced<bool>>,
    /// The fields of [`TLS_FIELDS`] that the file sets.
    given: Vec<&'static str>,
}

/// A field with the cache time of an API server's answer, the path of its setting, and how to set it.
type Cache = (&'static str, &'static str, fn(&mut ApiTls, u64));

const CACHES: [Cache; 3] = [
    ("authentication.webhook.cacheTTL", "api.tls.tokenCacheMs", |tls, ms| tls.token_cache_ms = ms),
    ("authorization.webhook.cacheAuthorizedTTL", "api.tls.allowedCacheMs", |tls, ms| {
        tls.allowed_cache_ms = ms;
    }),
    ("authorization.webhook.cacheUnauthorizedTTL", "api.tls.deniedCacheMs", |tls, ms| {
        tls.denied_cache_ms = ms;
    }),
];

impl ApiAccessFile {
    /// Reads the fields.
    pub(crate) fn read(reader: &mut Reader<'_>, folder: &str) -> Self {
        let file = |reader: &mut Reader<'_>, field| {
            let path = reader.string(field).filter(|path| !path.value.is_empty());
            path.map(|path| path.map(|path| absolute(folder, &path)))
        };
        let nested = |reader: &mut Reader<'_>, parent, field| {
            if reader.object(parent) { reader.boolean(field) } else { None }
        };
        let mut own = Self {
            given: TLS_FIELDS.into_iter().filter(|field| reader.is_set(field)).collect(),
            cert: file(reader, "tlsCertFile"),
            key: file(reader, "tlsPrivateKeyFile"),
            min_version: min_version(reader),
            cipher_suites: list(reader, "tlsCipherSuites", |suite| suite.as_str().map(ToOwned::to_owned)),
            curves: list(reader, "tlsCurvePreferences", Value::as_i64),
            tls_bootstrap: tls_bootstrap(reader),
            ..Self::default()
        };
        if reader.object("authentication") {
            if reader.object("authentication.x509") {
                own.client_ca = file(reader, "authentication.x509.clientCAFile");
            }
            own.anonymous = nested(reader, "authentication.anonymous", "authentication.anonymous.enabled");
            own.webhook = nested(reader, "authentication.webhook", "authentication.webhook.enabled");
        }
        if reader.object("authorization") {
            own.mode = mode(reader);
        }
        own.caches = CACHES.map(|(field, ..)| cache_ttl_ms(reader, field));
        own
    }

    /// Checks fields that depend on each other, and applies them. Without TLS none has an effect: they are added to
    /// `unsupported`.
    pub(crate) fn resolve(self, resolver: &mut Resolver<'_>, unsupported: &mut Vec<String>) {
        for (one, missing) in [(&self.cert, &self.key), (&self.key, &self.cert)] {
            if let (Some(given), None) = (one, missing) {
                resolver.refuse(given, "tlsCertFile and tlsPrivateKeyFile work only together");
            }
        }
        let is_requested = matches!(
            &resolver.config.control_plane,
            ControlPlane::Kubernetes(api) if api.certificates.serving
        );
        if !self.uses_tls(resolver) {
            unsupported.extend(self.given.iter().map(|field| (*field).to_owned()));
            return;
        }
        let (tokens, reviews, anonymous) = self.access_settings(resolver);
        let Self {
            client_ca,
            anonymous: explicit,
            cert,
            key,
            min_version,
            cipher_suites,
            curves,
            caches,
            ..
        } = self;
        let only_tls13 = min_version.as_ref().is_some_and(|version| version.value == TLS13);
        refuse_old_version(resolver, min_version.as_ref());
        let cipher_suites = supported_suites(resolver, cipher_suites);
        let curves = supported_key_exchanges(resolver, curves);
        if let Some(suites) = cipher_suites.as_ref().filter(|_| cert.is_none() && !only_tls13) {
            warn_about_rsa_only_suites(resolver, suites);
        }
        resolver.config.api.tls =
            Some(ApiTls { tokens, reviews, anonymous, asked_for: is_requested, ..ApiTls::default() });
        DEFAULT_ADDRESS.clone_into(&mut resolver.config.api.address);
        let mut take = |path: &str, value, apply: fn(&mut ApiTls, String)| {
            resolver.set(path, value, |config, value| {
                if let Some(tls) = &mut config.api.tls {
                    apply(tls, value);
                }
            });
        };
        take("api.tls.clientCaFile", client_ca, |tls, v| tls.client_ca_file = Some(v.into()));
        take("api.tls.certFile", cert, |tls, v| tls.cert_file = Some(v.into()));
        take("api.tls.keyFile", key, |tls, v| tls.key_file = Some(v.into()));
        take("api.tls.onlyTls13", min_version, |tls, v| tls.only_tls13 = v == TLS13);
        let cert_dir = flag_folder(resolver, "cert-dir");
        set(resolver, "api.tls.certDir", cert_dir, |tls, v| tls.cert_dir = v.into());
        for ((_, path, apply), value) in CACHES.into_iter().zip(caches) {
            set(resolver, path, value, apply);
        }
        set(resolver, "api.tls.cipherSuites", cipher_suites, |tls, v| tls.cipher_suites = v);
        set(resolver, "api.tls.keyExchanges", curves, |tls, v| tls.key_exchanges = v);
        set(resolver, "api.tls.anonymous", explicit, |tls, v| tls.anonymous = v);
    }

    /// Whether the kubelet API uses TLS: there is an API server, or a field that implies TLS is set.
    fn uses_tls(&self, resolver: &Resolver<'_>) -> bool {
        matches!(resolver.config.control_plane, ControlPlane::Kubernetes(_))
            || self.client_ca.is_some()
            || (self.cert.is_some() && self.key.is_some())
            || self.tls_bootstrap.as_ref().is_some_and(|tls_bootstrap| tls_bootstrap.value)
    }

    /// Whether tokens, access reviews and anonymous requests are enabled. Unset fields have the kubelet's defaults, which are
    /// less strict without a file (node-and-api.md §2.2).
    fn access_settings(&self, resolver: &mut Resolver<'_>) -> (bool, bool, bool) {
        let with_file = resolver.with_file;
        let anonymous = self.anonymous.as_ref().map_or(!with_file, |anonymous| anonymous.value);
        let reviews = self.mode.as_ref().map_or(with_file, |mode| mode.value == "Webhook");
        let (tokens, reviews) = if matches!(resolver.config.control_plane, ControlPlane::Kubernetes(_)) {
            (self.webhook.as_ref().map_or(with_file, |webhook| webhook.value), reviews)
        } else {
            self.refuse_webhooks(resolver, reviews);
            (false, false)
        };
        if self.client_ca.is_none() && !tokens && !anonymous {
            let none = Sourced {
                value: false,
                field: "authentication".to_owned(),
                origin: self.tls_origin(resolver),
            };
            resolver.refuse(
                &none,
                "no authentication method configured: no client could use the kubelet API; set client CAs in \
                 authentication.x509.clientCAFile, or allow tokens (authentication.webhook) or anonymous requests \
                 (authentication.anonymous)",
            );
        }
        if !reviews && anonymous {
            resolver.note(
                Level::Warn,
                "authentication.anonymous gives everybody who reaches the kubelet API access to every container"
                    .to_owned(),
            );
        }
        (tokens, reviews, anonymous)
    }

    /// The origin of the setting that turns TLS on.
    fn tls_origin(&self, resolver: &Resolver<'_>) -> String {
        let files = [&self.client_ca, &self.cert].into_iter().flatten().map(|file| file.origin.clone());
        let tls_bootstrap = self.tls_bootstrap.as_ref().map(|tls_bootstrap| tls_bootstrap.origin.clone());
        let key = resolver.config.provenance.get("controlPlane.kubernetes.kubeconfig").cloned();
        files.chain(tls_bootstrap).chain(key).next().unwrap_or_default()
    }

    /// Without an API server nothing can check tokens or permissions: refuses a configuration that needs it.
    fn refuse_webhooks(&self, resolver: &mut Resolver<'_>, reviews: bool) {
        if let Some(webhook) = self.webhook.as_ref().filter(|webhook| webhook.value) {
            resolver.refuse(
                webhook,
                "no client provided, cannot use webhook authentication: there is no API server to check tokens; \
                 write false, or set --kubeconfig",
            );
        }
        if reviews {
            let unset = || Sourced {
                value: "Webhook".to_owned(),
                field: "authorization.mode".into(),
                origin: self.tls_origin(resolver),
            };
            let mode = self.mode.clone().unwrap_or_else(unset);
            resolver.refuse(
                &mode,
                "no client provided, cannot use webhook authorization: there is no API server to check permissions; \
                 set --kubeconfig, or write AlwaysAllow: then every client with a certificate of \
                 authentication.x509.clientCAFile may do everything",
            );
        }
    }
}

/// Sets a value of the TLS settings.
fn set<T>(
    resolver: &mut Resolver<'_>,
    path: &str,
    value: Option<Sourced<T>>,
    apply: impl FnOnce(&mut ApiTls, T),
) {
    resolver.set(path, value, |config, value| {
        if let Some(tls) = &mut config.api.tls {
            apply(tls, value);
        }
    });
}

/// The folder that a flag names.
fn flag_folder(resolver: &Resolver<'_>, name: &'static str) -> Option<Sourced<String>> {
    let path = resolver.flags.others.get(name).filter(|path| !path.is_empty())?;
    let (origin, field) = ("command line".to_owned(), format!("--{name}"));
    Some(Sourced { value: absolute(&resolver.host.cwd, path), origin, field })
}

/// `serverTLSBootstrap`; `control_plane` applies it.
fn tls_bootstrap(reader: &Reader<'_>) -> Option<Sourced<bool>> {
    const FIELD: &str = "serverTLSBootstrap";
    let value = reader.peek(FIELD)?.as_bool()?;
    Some(Sourced { value, origin: reader.origin(FIELD), field: FIELD.to_owned() })
}

/// `authorization.mode`; an empty string is the default.
fn mode(reader: &mut Reader<'_>) -> Option<Sourced<String>> {
    let mode = reader.string("authorization.mode").filter(|mode| !mode.value.is_empty())?;
    if MODES.contains(&mode.value.as_str()) {
        return Some(mode);
    }
    reader.refuse(&mode, format!("this must be one of: {}", MODES.join(", ")));
    None
}

/// The cache time in milliseconds: zero is the default, a negative value turns the cache off.
fn cache_ttl_ms(reader: &mut Reader<'_>, field: &str) -> Option<Sourced<u64>> {
    let (parent, _) = field.rsplit_once('.')?;
    if !reader.object(parent) {
        return None;
    }
    let text = reader.string(field)?;
    match rules::signed(&text.value) {
        Some(0) => None,
        Some(nanos) => Some(text.map(|_| u64::try_from(nanos.max(0) / 1_000_000).unwrap_or(u64::MAX))),
        None => {
            reader.refuse(&text, rules::NOT_A_DURATION);
            None
        }
    }
}

/// The addresses and ports of the three listeners.
pub(crate) fn listeners(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let with_tls = resolver.config.api.tls.is_some();
    if let Some(address) = kubelet.address.clone() {
        match address.value.parse::<IpAddr>() {
            Ok(ip) if ip.is_loopback() || with_tls => {}
            Ok(_) => resolver.refuse(
                &address,
                "without TLS clients cannot be authenticated, so the API may listen on loopback only; set client CAs \
                 (authentication.x509.clientCAFile), a certificate (tlsCertFile, tlsPrivateKeyFile) or an API server \
                 (--kubeconfig), or write 127.0.0.1 or ::1",
            ),
            Err(_) => resolver.refuse(&address, "this is not a valid IP address"),
        }
    }
    if let Some(address) = kubelet.healthz_address.clone()
        && address.value.parse::<IpAddr>().is_err()
    {
        resolver.refuse(&address, "this is not a valid IP address");
    }
    resolver.set("api.address", kubelet.address.take(), |c, v| c.api.address = v);
    resolver.set("api.port", kubelet.port.take(), |c, v| c.api.port = v);
    if let Some(off) = kubelet.enable_server.take().filter(|enabled| !enabled.value) {
        resolver.set("api.port", Some(off), |c, _| c.api.port = 0);
    }
    let read_only = kubelet.read_only_port.take();
    if let Some(port) =
        read_only.as_ref().filter(|port| port.value != 0 && port.value == resolver.config.api.port)
    {
        resolver.refuse(port, "this is the port of the kubelet API; the read-only port needs another one");
    }
    resolver.set("api.readOnlyPort", read_only, |c, v| c.api.read_only_port = v);
    resolver.set("api.healthzAddress", kubelet.healthz_address.take(), |c, v| c.api.healthz_address = v);
    let healthz = kubelet.healthz_port.take();
    if let Some(port) =
        healthz.as_ref().filter(|port| port.value != 0 && resolver.config.api.ports().contains(&port.value))
    {
        resolver
            .refuse(port, "the kubelet API already listens on this port; the health port needs another one");
    }
    resolver.set("api.healthzPort", healthz, |c, v| c.api.healthz_port = v);
}

#[cfg(test)]
mod tests {
    use keelson_config::{CipherSuite, Config, KeyExchange};
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::document::Document;
    use crate::resolve::{Flags, Host, Inputs, Resolved, resolve};

    const RSA: &str = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";

    fn with(fields: Value) -> Result<Resolved, Vec<String>> {
        let mut root = Map::new();
        root.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
        root.insert("kind".into(), "KubeletConfiguration".into());
        root.extend(fields.as_object().unwrap().clone());
        let document =
            Document { file: "k.yaml".into(), folder: "/etc/k".into(), root, ..Document::default() };
        let host = Host { hostname: "n1".into(), exe_dir: "/usr/libexec".into(), ..Host::default() };
        let inputs = Inputs {
            flags: &Flags::default(),
            kubelet: Some(&document),
            drop_ins: &[],
            keelson: None,
            host: &host,
        };
        resolve(inputs).map_err(|errors| errors.iter().map(ToString::to_string).collect())
    }

    fn with_tls(more: Value) -> Value {
        let mut fields = json!({
            "authentication": {"x509": {"clientCAFile": "pki/ca.crt"}},
            "authorization": {"mode": "AlwaysAllow"},
        });
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields
    }

    #[test]
    fn client_ca_enables_tls_and_the_default_listen_address() {
        let resolved = with(with_tls(json!({}))).unwrap();
        let Config { api, provenance, .. } = resolved.config;
        assert_eq!(api.tls, Some(ApiTls::with_client_ca("/etc/k/pki/ca.crt".into())));
        assert_eq!(api.address, "0.0.0.0", "the default of a kubelet");
        assert!(provenance.contains_key("api.tls.clientCaFile"), "{provenance:?}");
        assert_eq!(resolved.kubelet_configuration["authentication"]["webhook"]["enabled"], false);
        assert!(
            resolved.notes.iter().all(|note| !note.text.contains("authentication")),
            "{:?}",
            resolved.notes
        );

        let more = json!({"tlsCertFile": "/a.crt", "tlsPrivateKeyFile": "a.key", "tlsMinVersion": "VersionTLS13",
            "address": "10.0.0.7", "readOnlyPort": 10255});
        let api = with(with_tls(more)).unwrap().config.api;
        let tls = api.tls.unwrap();
        assert_eq!((api.address.as_str(), api.read_only_port), ("10.0.0.7", 10255));
        assert_eq!((tls.cert_file, tls.key_file), (Some("/a.crt".into()), Some("/etc/k/a.key".into())));
        assert!(tls.only_tls13 && !tls.anonymous);
    }

    #[test]
    fn invalid_authentication_authorization_and_tls_settings_are_refused() {
        let x509 = json!({"clientCAFile": "/ca"});
        let no_mode = json!({"authentication": {"x509": x509}});
        let webhook_mode = with_tls(json!({"authorization": {"mode": "Webhook"}}));
        let tokens = with_tls(json!({"authentication": {"x509": x509, "webhook": {"enabled": true}}}));
        for (fields, what, remedy) in [
            (no_mode, r#"authorization.mode = "Webhook""#, "write AlwaysAllow"),
            (webhook_mode, r#"authorization.mode = "Webhook""#, "write AlwaysAllow"),
            (tokens, "authentication.webhook.enabled = true", "write false"),
            (with_tls(json!({"tlsCertFile": "/a"})), r#"tlsCertFile = "/a""#, "only together"),
            (with_tls(json!({"tlsPrivateKeyFile": "/a"})), r#"tlsPrivateKeyFile = "/a""#, "only together"),
            (
                json!({"authentication": {"x509": x509, "webhook": {"cacheTTL": "2"}}, "authorization": {"mode": "AlwaysAllow"}}),
                r#"cacheTTL = "2""#,
                "not a duration",
            ),
            (with_tls(json!({"tlsMinVersion": "1.3"})), r#"tlsMinVersion = "1.3""#, "VersionTLS13"),
            (
                with_tls(json!({"tlsMinVersion": "VersionTLS10"})),
                r#"tlsMinVersion = "VersionTLS10""#,
                "TLS 1.0 and 1.1 are not supported; write VersionTLS12",
            ),
            (
                with_tls(json!({"tlsMinVersion": "VersionTLS11"})),
                r#"tlsMinVersion = "VersionTLS11""#,
                "or VersionTLS13",
            ),
            (
                with_tls(
                    json!({"tlsCipherSuites": [RSA, "TLS_RSA_WITH_RC4_128_SHA", "TLS_RSA_WITH_AES_128_CBC_SHA"]}),
                ),
                r#"tlsCipherSuites = ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_RSA_WITH_RC4_128_SHA", "#,
                "TLS_RSA_WITH_RC4_128_SHA, TLS_RSA_WITH_AES_128_CBC_SHA are not supported; supported are TLS_AES_128",
            ),
            (
                with_tls(json!({"tlsCipherSuites": [RSA, "x"]})),
                r#"tlsCipherSuites[1] = "x""#,
                "no such cipher suite",
            ),
            (with_tls(json!({"tlsCipherSuites": RSA})), "tlsCipherSuites = ", "a list"),
            (
                with_tls(json!({"tlsCurvePreferences": [4588, 29, 25]})),
                "tlsCurvePreferences = [4588, 29, 25]",
                "X25519MLKEM768 (4588), P-521 (25) are not supported; supported are 23 (P-256), 24 (P-384), 29 (X25519)",
            ),
            (with_tls(json!({"tlsCurvePreferences": [22]})), "tlsCurvePreferences[0] = 22", "a known curve"),
            (
                json!({"tlsCertFile": "/a", "tlsPrivateKeyFile": "/b", "authorization": {"mode": "AlwaysAllow"}}),
                "authentication = false (k.yaml",
                "no authentication method configured",
            ),
            (with_tls(json!({"address": "here"})), r#"address = "here""#, "not a valid IP address"),
            (json!({"authentication": {"x509": {"clientCAFile": 1}}}), "clientCAFile = 1", "quotes"),
            (json!({"tlsCertFile": "/a"}), r#"tlsCertFile = "/a""#, "only together"),
        ] {
            let errors = with(fields.clone()).unwrap_err();
            assert_eq!(errors.len(), 1, "{fields}: {errors:?}");
            assert!(errors[0].contains(what) && errors[0].contains(remedy), "{fields}: {errors:?}");
        }
    }

    #[test]
    fn open_anonymous_access_and_rsa_only_cipher_suites_cause_a_warning() {
        let anonymous =
            json!({"authentication": {"x509": {"clientCAFile": "/ca"}, "anonymous": {"enabled": true}}});
        for (more, text) in [
            (anonymous, "everybody who reaches the kubelet API"),
            (json!({"tlsCipherSuites": [RSA, "TLS_AES_128_GCM_SHA256"]}), "name a suite with ECDSA"),
        ] {
            let resolved = with(with_tls(more)).unwrap();
            assert!(resolved.notes.iter().any(|n| n.level == Level::Warn && n.text.contains(text)), "{text}");
        }
    }

    #[test]
    fn cipher_suites_and_min_tls_version_are_applied_and_default_to_all() {
        let both = [CipherSuite::RsaAes128Gcm, CipherSuite::EcdsaChacha20];
        let old_form = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305";
        let pair = json!({"tlsCertFile": "/a.crt", "tlsPrivateKeyFile": "/a.key", "tlsCipherSuites": [RSA]});
        for (more, suites, only_tls13) in [
            (json!({}), &[][..], false),
            (json!({"tlsCipherSuites": [], "tlsMinVersion": ""}), &[], false),
            (json!({"tlsMinVersion": "VersionTLS12"}), &[], false),
            (json!({"tlsCipherSuites": [RSA, old_form]}), &both, false),
            (pair, &both[..1], false),
            (json!({"tlsCipherSuites": [RSA], "tlsMinVersion": "VersionTLS13"}), &both[..1], true),
            (json!({"tlsCipherSuites": ["TLS_AES_128_GCM_SHA256"]}), &[CipherSuite::Aes128Gcm], false),
            (json!({"tlsCurvePreferences": []}), &[], false),
        ] {
            let resolved = with(with_tls(more.clone())).unwrap();
            assert!(
                resolved.notes.iter().all(|note| !note.text.contains("tls")),
                "{more}: {:?}",
                resolved.notes
            );
            let tls = resolved.config.api.tls.unwrap();
            assert_eq!((tls.cipher_suites.as_slice(), tls.only_tls13), (suites, only_tls13), "{more}");
            let shown = resolved.config.provenance.contains_key("api.tls.cipherSuites");
            assert_eq!(shown, more.get("tlsCipherSuites").is_some(), "{more}");
        }
    }

    #[test]
    fn tls_curve_preferences_are_applied() {
        let tls = with(with_tls(json!({"tlsCurvePreferences": [29, 23]}))).unwrap().config.api.tls.unwrap();
        assert_eq!(tls.key_exchanges, [KeyExchange::X25519, KeyExchange::P256]);
    }

    /// The configuration of a node with an API server.
    fn with_api_server(fields: Option<Value>) -> Resolved {
        let document = fields.map(|fields| {
            let mut root = fields.as_object().unwrap().clone();
            root.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
            root.insert("kind".into(), "KubeletConfiguration".into());
            Document { file: "k.yaml".into(), folder: "/etc/k".into(), root, ..Document::default() }
        });
        let mut flags = Flags::default();
        flags.others.insert("kubeconfig", "/etc/kubernetes/kubelet.conf".to_owned());
        let host = Host { hostname: "n".into(), ..Host::default() };
        let kubelet = document.as_ref();
        resolve(Inputs { flags: &flags, kubelet, drop_ins: &[], keelson: None, host: &host }).unwrap()
    }

    #[test]
    fn with_an_api_server_token_and_webhook_authorization_are_the_default() {
        let x509 = json!({"clientCAFile": "/ca"});
        for (authentication, mode, tokens, reviews) in [
            (json!({"x509": x509}), None, true, true),
            (json!({}), None, true, true),
            (json!({"webhook": {"enabled": true}}), Some(""), true, true),
            (
                json!({"anonymous": {"enabled": true}, "webhook": {"enabled": false}}),
                Some("Webhook"),
                false,
                true,
            ),
            (json!({"x509": x509, "webhook": {"enabled": true}}), Some("Webhook"), true, true),
            (json!({"x509": x509, "webhook": {"enabled": false}}), Some("AlwaysAllow"), false, false),
        ] {
            let mut fields = json!({"authentication": authentication});
            if let Some(mode) = mode {
                fields["authorization"] = json!({"mode": mode});
            }
            let api = with_api_server(Some(fields.clone())).config.api;
            assert_eq!(api.address, "0.0.0.0", "{fields}");
            let tls = api.tls.unwrap();
            assert_eq!((tls.tokens, tls.reviews), (tokens, reviews), "{fields}");
            let ca = authentication.get("x509").map(|_| "/ca".into());
            assert_eq!((tls.client_ca_file, tls.asked_for), (ca, false), "{fields}");
        }
    }

    #[test]
    fn with_an_api_server_and_no_file_anonymous_access_is_open_with_a_warning() {
        let resolved = with_api_server(None);
        let tls = resolved.config.api.tls.unwrap();
        assert_eq!(
            (tls.tokens, tls.reviews, tls.anonymous),
            (false, false, true),
            "the defaults of a kubelet"
        );
        let warns = |n: &crate::Note| n.level == Level::Warn && n.text.contains("everybody who reaches");
        assert!(resolved.notes.iter().any(warns), "{:?}", resolved.notes);
    }

    #[test]
    fn serving_certificate_or_tls_bootstrap_enables_tls_without_client_ca() {
        let anonymous = json!({"authentication": {"anonymous": {"enabled": true}}, "authorization": {"mode": "AlwaysAllow"}});
        for more in [
            json!({"tlsCertFile": "a.crt", "tlsPrivateKeyFile": "/a.key"}),
            json!({"serverTLSBootstrap": true}),
        ] {
            let mut fields = anonymous.clone();
            fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let resolved = with(fields).unwrap();
            let api = resolved.config.api;
            let tls = api.tls.unwrap();
            let named = more.get("tlsCertFile").map(|_| "/etc/k/a.crt".into());
            assert_eq!(
                (api.address.as_str(), tls.cert_file, tls.asked_for),
                ("0.0.0.0", named, false),
                "{more}"
            );
            assert!(tls.anonymous && !tls.tokens && !tls.reviews && tls.client_ca_file.is_none(), "{more}");
            let reported = resolved.notes.iter().any(|note| note.text.contains("serverTLSBootstrap"));
            assert_eq!(
                reported,
                more.get("serverTLSBootstrap").is_some(),
                "without an API server nothing can sign it"
            );
        }
    }

    #[test]
    fn webhook_cache_ttls_are_applied_and_zero_means_the_default() {
        let of = |token: &str, allowed: &str, denied: &str| {
            let resolved = with(json!({
                "authentication": {"x509": {"clientCAFile": "/ca"}, "webhook": {"enabled": false, "cacheTTL": token}},
                "authorization": {"mode": "AlwaysAllow",
                    "webhook": {"cacheAuthorizedTTL": allowed, "cacheUnauthorizedTTL": denied}},
            }))
            .unwrap();
            let tls = resolved.config.api.tls.unwrap();
            (tls.token_cache_ms, tls.allowed_cache_ms, tls.denied_cache_ms)
        };
        assert_eq!(of("0s", "0", "0s"), (120_000, 300_000, 30_000));
        assert_eq!(of("1m", "1.5s", "40ms"), (60_000, 1_500, 40));
        assert_eq!(of("-1s", "1h", "-1ns"), (0, 3_600_000, 0), "not cached");
    }

    #[test]
    fn without_tls_authentication_fields_have_no_effect() {
        for fields in [
            json!({"authentication": {"anonymous": {"enabled": false}}, "tlsMinVersion": "VersionTLS10"}),
            json!({"authentication": {"x509": {"clientCAFile": null}}, "tlsMinVersion": "VersionTLS13", "tlsCertFile": ""}),
        ] {
            let resolved = with(fields).unwrap();
            assert_eq!((resolved.config.api.tls, resolved.config.api.address.as_str()), (None, "127.0.0.1"));
            let reported =
                |name| resolved.notes.iter().any(|n| n.level == Level::Info && n.text.contains(name));
            assert!(reported("authentication") && reported("tlsMinVersion"), "{:?}", resolved.notes);
        }
    }
}
