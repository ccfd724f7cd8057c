//! Who may use an image that is already there (runtime-and-resources.md §6.5): records of pulls in the kubelet's own
//! form, so that one can go from kubelet to keelson and back.
//!
//! A record holds no credential: only where it came from, and its SHA-256.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::keyring::{Credential, Origin, hex};

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
const RECORD_KIND: &str = "ImagePulledRecord";
const INTENT_KIND: &str = "ImagePullIntent";
/// Secrets that are kept of one image of one record; the oldest go.
const MOST_SECRETS: usize = 100;

/// The name of an image's file in both folders.
pub fn file_name(image: &str) -> String {
    format!("sha256-{}", hex(image.as_bytes()))
}

/// What is written before a pull and removed after it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Intent {
    kind: String,
    api_version: String,
    /// The image as it is asked for.
    pub image: String,
}

impl Intent {
    /// Of a pull that is to begin.
    pub fn of(image: &str) -> Self {
        Self { kind: INTENT_KIND.into(), api_version: API_VERSION.into(), image: image.to_owned() }
    }

    /// The intent in a file; `None`: it is none of this version.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let intent: Self = serde_json::from_slice(text).ok()?;
        (intent.kind == INTENT_KIND && intent.api_version == API_VERSION).then_some(intent)
    }
}

/// What is known of the pulls of one image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    kind: String,
    api_version: String,
    /// RFC 3339.
    pub last_updated_time: String,
    /// The runtime's id of the image.
    pub image_ref: String,
    /// By `host/path`, without tag and digest.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub credential_mapping: BTreeMap<String, Users>,
}

/// Who has shown that it may pull the image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Users {
    /// Every pod: pulled without credentials or with the node's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub node_pods_accessible: bool,
    /// Pods with one of these Secrets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_secrets: Vec<SecretUse>,
    /// Pods of one of these service accounts; kept as it is found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_service_accounts: Vec<serde_json::Value>,
}

/// A Secret that an image was pulled with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretUse {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// SHA-256 of the credential.
    pub credential_hash: String,
}

impl Record {
    /// An image of which nobody has shown anything yet.
    pub fn of(image_ref: &str, now: &str) -> Self {
        Self {
            kind: RECORD_KIND.into(),
            api_version: API_VERSION.into(),
            last_updated_time: now.to_owned(),
            image_ref: image_ref.to_owned(),
            credential_mapping: BTreeMap::new(),
        }
    }

    /// The record in a file; `None`: it is none of this version.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(text).ok()?;
        (record.kind == RECORD_KIND && record.api_version == API_VERSION).then_some(record)
    }

    /// Notes that `repository` may be used by who has this credential, or by everybody without one. Whether that is new.
    pub fn note(&mut self, repository: &str, used: Option<&(Credential, Origin)>, now: &str) -> bool {
        let users = self.credential_mapping.entry(repository.to_owned()).or_default();
        if users.node_pods_accessible {
            return false;
        }
        match used {
            Some((credential, Origin::Secret { uid, namespace, name })) => {
                let secret = SecretUse {
                    uid: uid.clone(),
                    namespace: namespace.clone(),
                    name: name.clone(),
                    credential_hash: credential.hash(),
                };
                if users.kubernetes_secrets.contains(&secret) {
                    return false;
                }
                // A Secret that has changed stands there once.
                users.kubernetes_secrets.retain(|s| !same_place(s, &secret));
                users.kubernetes_secrets.push(secret);
                let spare = users.kubernetes_secrets.len().saturating_sub(MOST_SECRETS);
                users.kubernetes_secrets.drain(..spare);
            }
            Some((_, Origin::Node)) | None => {
                *users = Users { node_pods_accessible: true, ..Users::default() };
            }
        }
        now.clone_into(&mut self.last_updated_time);
        true
    }
}

fn same_place(a: &SecretUse, b: &SecretUse) -> bool {
    (&a.uid, &a.namespace, &a.name) == (&b.uid, &b.namespace, &b.name)
}

/// `imagePullCredentialsVerificationPolicy`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Policy {
    /// Whoever runs here may use what is here.
    Never,
    /// Images that were not pulled by the agent are for everybody.
    #[default]
    NeverPreloaded,
    /// These repositories are for everybody: whole ones, or with `/*` at the end all below.
    NeverAllowlisted(Vec<String>),
    /// Every image is asked for.
    Always,
}

impl Policy {
    /// By its name in the KubeletConfiguration; an unknown one is the strictest.
    pub fn parse(name: &str, allowlist: &[String]) -> Self {
        match name {
            "NeverVerify" => Self::Never,
            "" | "NeverVerifyPreloadedImages" => Self::NeverPreloaded,
            "NeverVerifyAllowlistedImages" => Self::NeverAllowlisted(allowlist.to_vec()),
            _ => Self::Always,
        }
    }

    fn exempts(&self, repository: &str, pulled_here: bool) -> bool {
        match self {
            Self::Never => true,
            Self::NeverPreloaded => !pulled_here,
            Self::NeverAllowlisted(list) => list.iter().any(|allowed| {
                let below = allowed.strip_suffix("/*");
                below.map_or(allowed == repository, |folder| {
                    repository.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
                })
            }),
            Self::Always => false,
        }
    }
}

/// Whether a pod may use an image that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Nobody has to show anything.
    Open,
    /// It has shown a credential that the image was pulled with; `note` is one that the record lacks.
    Verified {
        /// To be noted in the record.
        note: Option<(Credential, Origin)>,
    },
    /// Only a pull can tell.
    Unknown,
}

/// Decides whether the owner of `credentials` may use `repository`'s image as it is.
///
/// `record` is the image's; `intended` says that a pull of it was cut off by a crash or goes on.
pub fn access(
    policy: &Policy,
    repository: &str,
    record: Option<&Record>,
    intended: bool,
    credentials: &[(Credential, Origin)],
) -> Access {
    if policy.exempts(repository, record.is_some() || intended) {
        return Access::Open;
    }
    let Some(users) = record.and_then(|record| record.credential_mapping.get(repository)) else {
        return Access::Unknown;
    };
    if users.node_pods_accessible {
        return Access::Verified { note: None };
    }
    let known = |place: &dyn Fn(&SecretUse) -> bool| users.kubernetes_secrets.iter().any(place);
    for found @ (credential, origin) in credentials {
        let Origin::Secret { uid, namespace, name } = origin else { continue };
        // Without a UID, as of a manifest, another Secret may have the name: only its content tells.
        let here =
            |s: &SecretUse| !uid.is_empty() && (&s.uid, &s.namespace, &s.name) == (uid, namespace, name);
        if known(&here) {
            return Access::Verified { note: None };
        }
        let hash = credential.hash();
        if known(&|s: &SecretUse| s.credential_hash == hash) {
            return Access::Verified { note: Some(found.clone()) };
        }
    }
    Access::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPO: &str = "r.example/team/a";

    fn credential(password: &str) -> Credential {
        Credential { username: "u".into(), password: password.into(), ..Credential::default() }
    }

    fn secret(name: &str, password: &str) -> (Credential, Origin) {
        let origin =
            Origin::Secret { uid: format!("uid-{name}"), namespace: "default".into(), name: name.into() };
        (credential(password), origin)
    }

    fn record(used: Option<&(Credential, Origin)>) -> Record {
        let mut record = Record::of("sha256:1", "then");
        assert!(record.note(REPO, used, "now"));
        record
    }

    fn ask(policy: &Policy, record: Option<&Record>, credentials: &[(Credential, Origin)]) -> Access {
        access(policy, REPO, record, false, credentials)
    }

    #[test]
    fn what_was_never_pulled_here_is_open_unless_the_policy_says_otherwise() {
        let list = |entry: &str| Policy::NeverAllowlisted(vec![entry.into()]);
        for (policy, expected) in [
            (Policy::Never, Access::Open),
            (Policy::NeverPreloaded, Access::Open),
            (list(REPO), Access::Open),
            (list("r.example/team/*"), Access::Open),
            (list("r.example/*"), Access::Open),
            (list("r.example/te*"), Access::Unknown),
            (list("r.example/team"), Access::Unknown),
            (Policy::Always, Access::Unknown),
        ] {
            assert_eq!(ask(&policy, None, &[]), expected, "{policy:?}");
        }
        assert_eq!(access(&Policy::NeverPreloaded, REPO, None, true, &[]), Access::Unknown);
    }

    #[test]
    fn what_was_pulled_without_credentials_or_with_the_nodes_is_for_everybody() {
        for used in [None, Some(&(credential("p"), Origin::Node))] {
            let record = record(used);
            for policy in [Policy::NeverPreloaded, Policy::Always] {
                assert_eq!(ask(&policy, Some(&record), &[]), Access::Verified { note: None });
            }
        }
    }

    #[test]
    fn what_was_pulled_with_a_secret_is_for_who_has_it_by_name_or_by_content() {
        let used = secret("a", "p");
        let record = record(Some(&used));
        let verified = Access::Verified { note: None };
        assert_eq!(ask(&Policy::NeverPreloaded, Some(&record), &[]), Access::Unknown);
        assert_eq!(ask(&Policy::Never, Some(&record), &[]), Access::Open);
        assert_eq!(ask(&Policy::Always, Some(&record), &[secret("b", "q")]), Access::Unknown);
        assert_eq!(
            ask(&Policy::Always, Some(&record), &[secret("b", "q"), secret("a", "changed")]),
            verified
        );
        let same = secret("b", "p");
        let expected = Access::Verified { note: Some(same.clone()) };
        assert_eq!(ask(&Policy::Always, Some(&record), std::slice::from_ref(&same)), expected);
        let nameless = |password: &str| {
            let origin = Origin::Secret { uid: String::new(), namespace: "default".into(), name: "a".into() };
            (credential(password), origin)
        };
        let of_manifest = self::record(Some(&nameless("p")));
        assert_eq!(ask(&Policy::Always, Some(&of_manifest), &[nameless("changed")]), Access::Unknown);
        let shown = ask(&Policy::Always, Some(&of_manifest), &[nameless("p")]);
        assert!(matches!(shown, Access::Verified { .. }));
        // The node's credentials are nobody's in particular.
        let node = (credential("p"), Origin::Node);
        assert_eq!(ask(&Policy::Always, Some(&record), &[node]), Access::Unknown);
        // Another repository with the same content has to be shown anew.
        let other = access(&Policy::Always, "r.example/other", Some(&record), false, &[used]);
        assert_eq!(other, Access::Unknown);
    }

    #[test]
    fn a_record_has_the_kubelets_form_and_no_credential() {
        let record = record(Some(&secret("a", "hunter2")));
        let text = serde_json::to_string(&record).unwrap();
        let hash = credential("hunter2").hash();
        let expected = format!(
            "{{\"kind\":\"ImagePulledRecord\",\"apiVersion\":\"kubelet.config.k8s.io/v1beta1\",\"lastUpdatedTime\":\"now\",\
             \"imageRef\":\"sha256:1\",\"credentialMapping\":{{\"{REPO}\":{{\"kubernetesSecrets\":[{{\"uid\":\"uid-a\",\
             \"namespace\":\"default\",\"name\":\"a\",\"credentialHash\":\"{hash}\"}}]}}}}}}"
        );
        assert_eq!(text, expected);
        assert_eq!(Record::parse(text.as_bytes()), Some(record));
        assert_eq!(Record::parse(text.replace("v1beta1", "v9").as_bytes()), None);
        assert_eq!(Record::parse(text.replace("ImagePulledRecord", "Other").as_bytes()), None);
        let intent = serde_json::to_string(&Intent::of("a:1")).unwrap();
        let expected =
            r#"{"kind":"ImagePullIntent","apiVersion":"kubelet.config.k8s.io/v1beta1","image":"a:1"}"#;
        assert_eq!(intent, expected);
        assert_eq!(Intent::parse(intent.as_bytes()), Some(Intent::of("a:1")));
        assert_eq!(Record::parse(intent.as_bytes()), None);
        assert_eq!(Intent::parse(b"{"), None);
        assert_eq!(Intent::parse(intent.replace("v1beta1", "v9").as_bytes()), None);
        let open = "sha256-e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(file_name(""), open);
    }

    #[test]
    fn what_others_have_written_about_service_accounts_survives() {
        let text = r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","lastUpdatedTime":"t","imageRef":"r","credentialMapping":{"r.example/team/a":{"kubernetesServiceAccounts":[{"uid":"1","namespace":"n","name":"s"}]}}}"#;
        let mut record = Record::parse(text.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        assert!(record.note(REPO, Some(&secret("a", "p")), "now"));
        assert!(
            serde_json::to_string(&record).unwrap().contains(r#"{"uid":"1","namespace":"n","name":"s"}"#)
        );
    }

    #[test]
    fn notes_are_made_once_and_the_oldest_of_many_secrets_go() {
        let mut record = record(Some(&secret("a", "p")));
        assert!(!record.note(REPO, Some(&secret("a", "p")), "later"));
        assert_eq!(record.last_updated_time, "now");
        assert!(record.note(REPO, Some(&secret("a", "q")), "later"));
        assert_eq!(record.credential_mapping[REPO].kubernetes_secrets.len(), 1);
        for n in 0..100 {
            assert!(record.note(REPO, Some(&secret(&format!("s{n}"), "p")), "later"));
        }
        let names = &record.credential_mapping[REPO].kubernetes_secrets;
        assert_eq!((names.len(), names[0].name.as_str()), (100, "s0"));
        assert!(record.note(REPO, None, "later"));
        assert!(record.credential_mapping[REPO].kubernetes_secrets.is_empty());
        assert!(!record.note(REPO, Some(&secret("a", "p")), "later"));
    }

    #[test]
    fn a_policy_has_its_name_and_an_unknown_one_is_strict() {
        let list = ["r.example/*".to_owned()];
        for (name, policy) in [
            ("", Policy::NeverPreloaded),
            ("NeverVerify", Policy::Never),
            ("NeverVerifyPreloadedImages", Policy::NeverPreloaded),
            ("NeverVerifyAllowlistedImages", Policy::NeverAllowlisted(list.to_vec())),
            ("AlwaysVerify", Policy::Always),
            ("?", Policy::Always),
        ] {
            assert_eq!(Policy::parse(name, &list), policy, "{name:?}");
        }
    }
}
