//! Whoever asks, as Kubernetes names them.

use std::collections::BTreeMap;

use keelson_proto::keelson::pod_config::v1 as pb;
use rustls::pki_types::CertificateDer;
use sha2::{Digest as _, Sha256};
use x509_parser::asn1_rs::{Oid, oid};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::kept::Key;
use super::reviews::digest;

/// The group of everybody who has shown who they are.
const AUTHENTICATED: &str = "system:authenticated";
/// The group of everybody else.
const UNAUTHENTICATED: &str = "system:unauthenticated";
/// The name of everybody else.
const ANONYMOUS: &str = "system:anonymous";
/// The part of a certificate's subject that is the user's uid (`X509UID` of k8s.io/apimachinery).
const UID: Oid<'static> = oid!(1.3.6.1.4.1.57683.2);
/// What is known of a certificate beside whom it names.
const CREDENTIAL: &str = "authentication.kubernetes.io/credential-id";

/// Whoever asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// The common name of the certificate, or whose token it is.
    pub name: String,
    /// Empty: no authenticator has given one.
    pub uid: String,
    /// The certificate's organisations, or the token's groups, and `system:authenticated`.
    pub groups: Vec<String>,
    /// What else an authenticator knows.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// Who shows nothing.
    pub(super) fn anonymous() -> Self {
        let groups = vec![UNAUTHENTICATED.to_owned()];
        Self { name: ANONYMOUS.to_owned(), groups, ..Self::default() }
    }

    /// The user that a certificate names; none without a common name, or with a uid that is no text, empty, or one of several.
    pub(super) fn of_certificate(der: &CertificateDer<'_>) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let subject = certificate.subject();
        let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
        let groups =
            subject.iter_organization().filter_map(|o| o.as_str().ok()).map(ToOwned::to_owned).collect();
        let mut uids = subject.iter_by_oid(&UID);
        let uid = match uids.next() {
            Some(uid) => uid.as_str().ok().filter(|uid| !uid.is_empty())?.to_owned(),
            None => String::new(),
        };
        if name.is_empty() || uids.next().is_some() {
            return None;
        }
        let digest: String = Sha256::digest(der).iter().map(|byte| format!("{byte:02x}")).collect();
        let extra = [(CREDENTIAL.to_owned(), vec![format!("X509SHA256={digest}")])].into();
        Some(Self { name, uid, groups, extra }.authenticated())
    }

    /// The same in the group of everybody who has shown who they are; not who says to have shown nothing.
    pub(super) fn authenticated(mut self) -> Self {
        let is_grouped = |group: &String| [AUTHENTICATED, UNAUTHENTICATED].contains(&group.as_str());
        if self.name != ANONYMOUS && !self.groups.iter().any(is_grouped) {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }

    /// A digest of all of it, and of what it is about.
    pub(super) fn digest(&self, about: &[&str]) -> Key {
        let (groups, extra) = (self.groups.len().to_string(), self.extra.len().to_string());
        let mut texts: Vec<String> = vec![self.name.clone(), self.uid.clone(), groups];
        texts.extend(self.groups.iter().cloned());
        texts.push(extra);
        for (key, values) in &self.extra {
            texts.extend([key.clone(), values.len().to_string()]);
            texts.extend(values.iter().cloned());
        }
        digest(texts.iter().map(String::as_str).chain(about.iter().copied()))
    }
}

impl From<pb::User> for User {
    fn from(user: pb::User) -> Self {
        let pb::User { name, uid, groups, extra } = user;
        Self {
            name,
            uid,
            groups,
            extra: extra.into_iter().map(|(key, values)| (key, values.values)).collect(),
        }
    }
}

impl From<User> for pb::User {
    fn from(user: User) -> Self {
        let User { name, uid, groups, extra } = user;
        let extra = extra.into_iter().map(|(key, values)| (key, pb::ExtraValues { values })).collect();
        Self { name, uid, groups, extra }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn named(parts: &[(DnType, &str)]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in parts {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_common_name_is_the_user_and_organisations_are_groups() {
        let certificate = named(&[(DnType::OrganizationName, "operators"), (DnType::CommonName, "jane")]);
        let groups = vec!["operators".to_owned(), "system:authenticated".to_owned()];
        let fingerprint: String = Sha256::digest(&certificate).iter().map(|b| format!("{b:02x}")).collect();
        let extra = [(CREDENTIAL.to_owned(), vec![format!("X509SHA256={fingerprint}")])].into();
        let jane = User { name: "jane".into(), groups, extra, ..User::default() };
        assert_eq!(User::of_certificate(&certificate), Some(jane.clone()));
        assert_eq!(jane.clone().authenticated(), jane, "once is enough");
        assert_eq!(User::of_certificate(&named(&[(DnType::OrganizationName, "operators")])), None);
        assert_eq!(User::of_certificate(&named(&[(DnType::CommonName, "")])), None);
        assert_eq!(User::of_certificate(&CertificateDer::from(vec![1, 2, 3])), None);
    }

    #[test]
    fn the_uid_of_a_certificate_is_one_text_or_the_certificate_names_nobody() {
        let uid = DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]);
        let of = |value| User::of_certificate(&named(&[(DnType::CommonName, "jane"), (uid.clone(), value)]));
        assert_eq!(of("4f2c").unwrap().uid, "4f2c");
        assert_eq!(of(""), None);
        assert_eq!(User::of_certificate(&named(&[(DnType::CommonName, "jane")])).unwrap().uid, "");
    }

    #[test]
    fn who_says_to_be_nobody_is_not_in_the_group_of_those_who_are_known() {
        let certificate = named(&[(DnType::CommonName, "system:anonymous")]);
        assert_eq!(User::of_certificate(&certificate).unwrap().groups, Vec::<String>::new());
        let certificate =
            named(&[(DnType::CommonName, "a"), (DnType::OrganizationName, "system:unauthenticated")]);
        assert_eq!(User::of_certificate(&certificate).unwrap().groups, ["system:unauthenticated"]);
    }

    #[test]
    fn whatever_is_different_in_a_user_or_a_question_has_another_digest() {
        let of = |groups: &[&str], extra: &[(&str, &[&str])], about: &[&str]| {
            let texts = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
            let extra = extra.iter().map(|(key, values)| ((*key).to_owned(), texts(values))).collect();
            User { name: "a".into(), uid: "u".into(), groups: texts(groups), extra }.digest(about)
        };
        let all = [
            of(&[], &[], &["get", "stats"]),
            of(&[], &[], &["get", "metrics"]),
            of(&[], &[], &["getmetrics", ""]),
            of(&["x", "y"], &[], &["get", "stats"]),
            of(&["xy"], &[], &["get", "stats"]),
            of(&["x"], &[("y", &[])], &["get", "stats"]),
            of(&[], &[("x", &["y"])], &["get", "stats"]),
            of(&[], &[("x", &[]), ("y", &[])], &["get", "stats"]),
        ];
        let different: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len());
        assert_eq!(all[0], of(&[], &[], &["get", "stats"]));
    }
}
