//! Who may use the kubelet API over the network, and how it shows itself, as the KubeletConfiguration says it
//! (node-and-api.md §6, §7).
//!
//! A node of an API server speaks TLS, and so does one whose file names authorities of clients or a certificate of its own; with it
//! the API may listen on any address. An API server is asked whose token it is and what somebody may do, unless the file says
//! otherwise; without one there are certificates and anonymous requests.

use std::net::IpAddr;

use keelson_config::{ApiTls, ControlPlane};
use serde_json::Value;

use crate::api_tls::{
    TLS13, list, min_version, refuse_old_version, spoken_curves, spoken_suites, warn_of_suites,
};
use crate::document::{Reader, Sourced};
use crate::kubelet_file::{KubeletFile, absolute};
use crate::resolve::{Level, Resolver};
use crate::rules;

/// `0.0.0.0`, where a kubelet listens unless it is told otherwise.
const ANYWHERE: &str = "0.0.0.0";
/// Fields that mean nothing without TLS.
const OF_TLS: [&str; 7] = [
    "authentication",
    "authorization",
    "tlsCertFile",
    "tlsCipherSuites",
    "tlsCurvePreferences",
    "tlsMinVersion",
    "tlsPrivateKeyFile",
];
/// How the API server is asked what somebody may do, and that nobody is.
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
    /// A certificate is to be asked for; who does that is no matter of this part.
    asks: Option<Sourced<bool>>,
    /// Those of [`OF_TLS`] that the file has.
    given: Vec<&'static str>,
}

/// A field that says for how long an answer of the API server is remembered, the setting that it becomes, and how.
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
            given: OF_TLS.into_iter().filter(|field| reader.is_set(field)).collect(),
            cert: file(reader, "tlsCertFile"),
            key: file(reader, "tlsPrivateKeyFile"),
            min_version: min_version(reader),
            cipher_suites: list(reader, "tlsCipherSuites", |suite| suite.as_str().map(ToOwned::to_owned)),
            curves: list(reader, "tlsCurvePreferences", Value::as_i64),
            asks: asks(reader),
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
        own.caches = CACHES.map(|(field, ..)| remembered_for(reader, field));
        own
    }

    /// Checks what belongs together, and takes it. Without TLS none of it means anything, and is told in `not_acted_on`.
    pub(crate) fn resolve(self, resolver: &mut Resolver<'_>, not_acted_on: &mut Vec<String>) {
        for (one, missing) in [(&self.cert, &self.key), (&self.key, &self.cert)] {
            if let (Some(given), None) = (one, missing) {
                resolver.refuse(given, "tlsCertFile and tlsPrivateKeyFile are of use only together");
            }
        }
        let is_asked_for = matches!(
            &resolver.config.control_plane,
            ControlPlane::Kubernetes(api) if api.certificates.serving
        );
        if !self.is_secured(resolver) {
            not_acted_on.extend(self.given.iter().map(|field| (*field).to_owned()));
            return;
        }
        let (tokens, reviews, anonymous) = self.who_is_let_in(resolver);
        let Self {
            client_ca, anonymous: told, cert, key, min_version, cipher_suites, curves, caches, ..
        } = self;
        let only_tls13 = min_version.as_ref().is_some_and(|version| version.value == TLS13);
        refuse_old_version(resolver, min_version.as_ref());
        let cipher_suites = spoken_suites(resolver, cipher_suites);
        let curves = spoken_curves(resolver, curves);
        if let Some(suites) = cipher_suites.as_ref().filter(|_| cert.is_none() && !only_tls13) {
            warn_of_suites(resolver, suites);
        }
        resolver.config.api.tls =
            Some(ApiTls { tokens, reviews, anonymous, asked_for: is_asked_for, ..ApiTls::default() });
        ANYWHERE.clone_into(&mut resolver.config.api.address);
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
        set(resolver, "api.tls.anonymous", told, |tls, v| tls.anonymous = v);
    }

    /// Whether the kubelet API speaks TLS: there is an API server, or something that is of use with TLS alone.
    fn is_secured(&self, resolver: &Resolver<'_>) -> bool {
        matches!(resolver.config.control_plane, ControlPlane::Kubernetes(_))
            || self.client_ca.is_some()
            || (self.cert.is_some() && self.key.is_some())
            || self.asks.as_ref().is_some_and(|asks| asks.value)
    }

    /// Whether tokens, reviews and anonymous requests count: what is not said is as the kubelet has it, which without a file is
    /// less safe (node-and-api.md §2.2).
    fn who_is_let_in(&self, resolver: &mut Resolver<'_>) -> (bool, bool, bool) {
        let with_file = resolver.with_file;
        let anonymous = self.anonymous.as_ref().map_or(!with_file, |anonymous| anonymous.value);
        let reviews = self.mode.as_ref().map_or(with_file, |mode| mode.value == "Webhook");
        let (tokens, reviews) = if matches!(resolver.config.control_plane, ControlPlane::Kubernetes(_)) {
            (self.webhook.as_ref().map_or(with_file, |webhook| webhook.value), reviews)
        } else {
            self.nobody_is_asked(resolver, reviews);
            (false, false)
        };
        if self.client_ca.is_none() && !tokens && !anonymous {
            let none =
                Sourced { value: false, field: "authentication".to_owned(), origin: self.because(resolver) };
            resolver.refuse(
                &none,
                "no authentication method configured: nobody could use the kubelet API; name authorities of clients in \
                 authentication.x509.clientCAFile, or allow tokens (authentication.webhook) or anonymous requests \
                 (authentication.anonymous)",
            );
        }
        if !reviews && anonymous {
            resolver.note(
                Level::Warn,
                "authentication.anonymous lets everybody who reaches the kubelet API into every container"
                    .to_owned(),
            );
        }
        (tokens, reviews, anonymous)
    }

    /// Where it stands that the API speaks TLS.
    fn because(&self, resolver: &Resolver<'_>) -> String {
        let files = [&self.client_ca, &self.cert].into_iter().flatten().map(|file| file.origin.clone());
        let asks = self.asks.as_ref().map(|asks| asks.origin.clone());
        let key = resolver.config.provenance.get("controlPlane.kubernetes.kubeconfig").cloned();
        files.chain(asks).chain(key).next().unwrap_or_default()
    }

    /// Without an API server nobody can say whose token it is, or what somebody may do: who counts on that is refused.
    fn nobody_is_asked(&self, resolver: &mut Resolver<'_>, reviews: bool) {
        if let Some(webhook) = self.webhook.as_ref().filter(|webhook| webhook.value) {
            resolver.refuse(
                webhook,
                "no client provided, cannot use webhook authentication: there is no API server that could say whose token it is; \
                 write false, or name one with --kubeconfig",
            );
        }
        if reviews {
            let unset = || Sourced {
                value: "Webhook".to_owned(),
                field: "authorization.mode".into(),
                origin: self.because(resolver),
            };
            let mode = self.mode.clone().unwrap_or_else(unset);
            resolver.refuse(
                &mode,
                "no client provided, cannot use webhook authorization: there is no API server to ask what somebody may do; \
                 name one with --kubeconfig, or write AlwaysAllow: then whoever is known, by a certificate of \
                 authentication.x509.clientCAFile, may do everything",
            );
        }
    }
}

/// Takes a value into TLS.
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

/// `serverTLSBootstrap`, which is taken elsewhere.
fn asks(reader: &Reader<'_>) -> Option<Sourced<bool>> {
    const FIELD: &str = "serverTLSBootstrap";
    let value = reader.look(FIELD)?.as_bool()?;
    Some(Sourced { value, origin: reader.origin(FIELD), field: FIELD.to_owned() })
}

/// `authorization.mode`; empty text is the default.
fn mode(reader: &mut Reader<'_>) -> Option<Sourced<String>> {
    let mode = reader.string("authorization.mode").filter(|mode| !mode.value.is_empty())?;
    if MODES.contains(&mode.value.as_str()) {
        return Some(mode);
    }
    reader.refuse(&mode, format!("this must be one of: {}", MODES.join(", ")));
    None
}

/// Milliseconds that an answer is remembered: zero is the default, and below zero is not at all.
fn remembered_for(reader: &mut Reader<'_>, field: &str) -> Option<Sourced<u64>> {
    let (parent, _) = field.rsplit_once('.')?;
    if !reader.object(parent) {
        return None;
    }
    let text = reader.string(field)?;
    match rules::signed(&text.value) {
        Some(0) => None,
        Some(nanos) => Some(text.map(|_| u64::try_from(nanos.max(0) / 1_000_000).unwrap_or(u64::MAX))),
        None => {
            reader.refuse(&text, rules::NO_DURATION);
            None
        }
    }
}

/// The addresses and ports of the three listeners.
pub(crate) fn listeners(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let secured = resolver.config.api.tls.is_some();
    if let Some(address) = kubelet.address.clone() {
        match address.value.parse::<IpAddr>() {
            Ok(ip) if ip.is_loopback() || secured => {}
            Ok(_) => resolver.refuse(
                &address,
                "without TLS nobody could tell who asks, so the API may listen on loopback only; name authorities of clients \
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
        resolver.refuse(port, "the API listens on this port already; the read-only port needs another one");
    }
    resolver.set("api.readOnlyPort", read_only, |c, v| c.api.read_only_port = v);
    resolver.set("api.healthzAddress", kubelet.healthz_address.take(), |c, v| c.api.healthz_address = v);
    let healthz = kubelet.healthz_port.take();
    if let Some(port) =
        healthz.as_ref().filter(|port| port.value != 0 && resolver.config.api.ports().contains(&port.value))
    {
        resolver.refuse(port, "the API listens on this port already; the health port needs another one");
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
        resolve(inputs).map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    fn secured(more: Value) -> Value {
        let mut fields = json!({
            "authentication": {"x509": {"clientCAFile": "pki/ca.crt"}},
            "authorization": {"mode": "AlwaysAllow"},
        });
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields
    }

    #[test]
    fn authorities_of_clients_turn_tls_on_and_open_the_api() {
        let resolved = with(secured(json!({}))).unwrap();
        let Config { api, provenance, .. } = resolved.config;
        assert_eq!(api.tls, Some(ApiTls::with_client_ca("/etc/k/pki/ca.crt".into())));
        assert_eq!(api.address, "0.0.0.0", "as a kubelet");
        assert!(provenance.contains_key("api.tls.clientCaFile"), "{provenance:?}");
        assert_eq!(resolved.kubelet_configuration["authentication"]["webhook"]["enabled"], false);
        assert!(
            resolved.notes.iter().all(|note| !note.text.contains("authentication")),
            "{:?}",
            resolved.notes
        );

        let more = json!({"tlsCertFile": "/a.crt", "tlsPrivateKeyFile": "a.key", "tlsMinVersion": "VersionTLS13",
            "address": "10.0.0.7", "readOnlyPort": 10255});
        let api = with(secured(more)).unwrap().config.api;
        let tls = api.tls.unwrap();
        assert_eq!((api.address.as_str(), api.read_only_port), ("10.0.0.7", 10255));
        assert_eq!((tls.cert_file, tls.key_file), (Some("/a.crt".into()), Some("/etc/k/a.key".into())));
        assert!(tls.only_tls13 && !tls.anonymous);
    }

    #[test]
    fn what_would_leave_nobody_or_somebody_unknown_in_is_refused() {
        let x509 = json!({"clientCAFile": "/ca"});
        let no_mode = json!({"authentication": {"x509": x509}});
        let webhook_mode = secured(json!({"authorization": {"mode": "Webhook"}}));
        let tokens = secured(json!({"authentication": {"x509": x509, "webhook": {"enabled": true}}}));
        for (fields, what, way_out) in [
            (no_mode, r#"authorization.mode = "Webhook""#, "write AlwaysAllow"),
            (webhook_mode, r#"authorization.mode = "Webhook""#, "write AlwaysAllow"),
            (tokens, "authentication.webhook.enabled = true", "write false"),
            (secured(json!({"tlsCertFile": "/a"})), r#"tlsCertFile = "/a""#, "only together"),
            (secured(json!({"tlsPrivateKeyFile": "/a"})), r#"tlsPrivateKeyFile = "/a""#, "only together"),
            (
                json!({"authentication": {"x509": x509, "webhook": {"cacheTTL": "2"}}, "authorization": {"mode": "AlwaysAllow"}}),
                r#"cacheTTL = "2""#,
                "no duration",
            ),
            (secured(json!({"tlsMinVersion": "1.3"})), r#"tlsMinVersion = "1.3""#, "VersionTLS13"),
            (
                secured(json!({"tlsMinVersion": "VersionTLS10"})),
                r#"tlsMinVersion = "VersionTLS10""#,
                "TLS 1.0 and 1.1 are not spoken here; write VersionTLS12",
            ),
            (
                secured(json!({"tlsMinVersion": "VersionTLS11"})),
                r#"tlsMinVersion = "VersionTLS11""#,
                "or VersionTLS13",
            ),
            (
                secured(
                    json!({"tlsCipherSuites": [RSA, "TLS_RSA_WITH_RC4_128_SHA", "TLS_RSA_WITH_AES_128_CBC_SHA"]}),
                ),
                r#"tlsCipherSuites = ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_RSA_WITH_RC4_128_SHA", "#,
                "TLS_RSA_WITH_RC4_128_SHA, TLS_RSA_WITH_AES_128_CBC_SHA cannot be spoken here; possible are TLS_AES_128",
            ),
            (
                secured(json!({"tlsCipherSuites": [RSA, "x"]})),
                r#"tlsCipherSuites[1] = "x""#,
                "no such cipher suite",
            ),
            (secured(json!({"tlsCipherSuites": RSA})), "tlsCipherSuites = ", "a list"),
            (
                secured(json!({"tlsCurvePreferences": [4588, 29, 25]})),
                "tlsCurvePreferences = [4588, 29, 25]",
                "X25519MLKEM768 (4588), P-521 (25) cannot be spoken here; possible are 23 (P-256), 24 (P-384), 29 (X25519)",
            ),
            (
                secured(json!({"tlsCurvePreferences": [22]})),
                "tlsCurvePreferences[0] = 22",
                "a curve that is known",
            ),
            (
                json!({"tlsCertFile": "/a", "tlsPrivateKeyFile": "/b", "authorization": {"mode": "AlwaysAllow"}}),
                "authentication = false (k.yaml",
                "no authentication method configured",
            ),
            (secured(json!({"address": "here"})), r#"address = "here""#, "not a valid IP address"),
            (json!({"authentication": {"x509": {"clientCAFile": 1}}}), "clientCAFile = 1", "quotes"),
            (json!({"tlsCertFile": "/a"}), r#"tlsCertFile = "/a""#, "only together"),
        ] {
            let problems = with(fields.clone()).unwrap_err();
            assert_eq!(problems.len(), 1, "{fields}: {problems:?}");
            assert!(problems[0].contains(what) && problems[0].contains(way_out), "{fields}: {problems:?}");
        }
    }

    #[test]
    fn what_is_dangerous_or_shuts_clients_out_is_a_warning() {
        let anonymous =
            json!({"authentication": {"x509": {"clientCAFile": "/ca"}, "anonymous": {"enabled": true}}});
        for (more, text) in [
            (anonymous, "everybody who reaches the kubelet API"),
            (json!({"tlsCipherSuites": [RSA, "TLS_AES_128_GCM_SHA256"]}), "name a suite with ECDSA"),
        ] {
            let resolved = with(secured(more)).unwrap();
            assert!(resolved.notes.iter().any(|n| n.level == Level::Warn && n.text.contains(text)), "{text}");
        }
    }

    #[test]
    fn suites_and_the_lowest_version_of_tls_arrive_and_nothing_set_is_all_of_them() {
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
            let resolved = with(secured(more.clone())).unwrap();
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
    fn ways_to_agree_on_keys_arrive_in_whatever_order() {
        let tls = with(secured(json!({"tlsCurvePreferences": [29, 23]}))).unwrap().config.api.tls.unwrap();
        assert_eq!(tls.key_exchanges, [KeyExchange::X25519, KeyExchange::P256]);
    }

    /// The same for a node of an API server.
    fn in_a_cluster(fields: Option<Value>) -> Resolved {
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
    fn with_an_api_server_it_is_asked_whose_token_it_is_and_what_somebody_may_do() {
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
            let api = in_a_cluster(Some(fields.clone())).config.api;
            assert_eq!(api.address, "0.0.0.0", "{fields}");
            let tls = api.tls.unwrap();
            assert_eq!((tls.tokens, tls.reviews), (tokens, reviews), "{fields}");
            let ca = authentication.get("x509").map(|_| "/ca".into());
            assert_eq!((tls.client_ca_file, tls.asked_for), (ca, false), "{fields}");
        }
    }

    #[test]
    fn an_api_server_without_a_file_lets_everybody_in_and_that_is_told() {
        let resolved = in_a_cluster(None);
        let tls = resolved.config.api.tls.unwrap();
        assert_eq!((tls.tokens, tls.reviews, tls.anonymous), (false, false, true), "as a kubelet");
        let told = |n: &crate::Note| n.level == Level::Warn && n.text.contains("everybody who reaches");
        assert!(resolved.notes.iter().any(told), "{:?}", resolved.notes);
    }

    #[test]
    fn a_certificate_of_its_own_or_one_to_be_asked_for_turn_tls_on_without_authorities_of_clients() {
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
            let idle = resolved.notes.iter().any(|note| note.text.contains("serverTLSBootstrap"));
            assert_eq!(idle, more.get("serverTLSBootstrap").is_some(), "nobody is there to sign it");
        }
    }

    #[test]
    fn for_how_long_answers_are_remembered_is_a_setting_and_zero_is_the_default() {
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
        assert_eq!(of("-1s", "1h", "-1ns"), (0, 3_600_000, 0), "not at all");
    }

    #[test]
    fn without_tls_the_fields_are_not_acted_on() {
        for fields in [
            json!({"authentication": {"anonymous": {"enabled": false}}, "tlsMinVersion": "VersionTLS10"}),
            json!({"authentication": {"x509": {"clientCAFile": null}}, "tlsMinVersion": "VersionTLS13", "tlsCertFile": ""}),
        ] {
            let resolved = with(fields).unwrap();
            assert_eq!((resolved.config.api.tls, resolved.config.api.address.as_str()), (None, "127.0.0.1"));
            let told = |name| resolved.notes.iter().any(|n| n.level == Level::Info && n.text.contains(name));
            assert!(told("authentication") && told("tlsMinVersion"), "{:?}", resolved.notes);
        }
    }
}
