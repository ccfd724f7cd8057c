//! The user of a request, as Kubernetes names users.

use std::collections::BTreeMap;

use keelson_proto::keelson::pod_config::v1 as pb;
use rustls::pki_types::CertificateDer;
use sha2::{Digest as _, Sha256};
use x509_parser::asn1_rs::{Oid, oid};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::reviews::digest;
use super::ttl_cache::Key;

/// The group of all authenticated users.
const AUTHENTICATED: &str = "system:authenticated";
/// The group of all other users.
const UNAUTHENTICATED: &str = "system:unauthenticated";
/// The user name of unauthenticated clients.
const ANONYMOUS: &str = "system:anonymous";
/// The attribute of a certificate's subject with the user's uid (`X509UID` of k8s.io/apimachinery).
const UID: Oid<'static> = oid!(1.3.6.1.4.1.57683.2);
/// The `extra` key with the digest of the certificate.
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";

/// The user of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// The common name of the certificate, or the user name of the token.
    pub name: String,
    /// Empty: the authenticator gave none.
    pub uid: String,
    /// The organizations of the certificate, or the groups of the token, and `system:authenticated`.
    pub groups: Vec<String>,
    /// Further attributes from the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// The user of a request without credentials.
    pub(super) fn anonymous() -> Self {
        let groups = vec![UNAUTHENTICATED.to_owned()];
        Self { name: ANONYMOUS.to_owned(), groups, ..Self::default() }
    }

    /// The user named by a certificate; `None` without a common name, or with a uid that is empty, not text, or one of several.
    pub(super) fn from_certificate(der: &CertificateDer<'_>) -> Option<Self> {
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
        let extra = [(CREDENTIAL_ID.to_owned(), vec![format!("X509SHA256={digest}")])].into();
        Some(Self { name, uid, groups, extra }.authenticated())
    }

    /// Adds `system:authenticated` to the groups, except for the anonymous user.
    pub(super) fn authenticated(mut self) -> Self {
        let is_known_group = |group: &String| [AUTHENTICATED, UNAUTHENTICATED].contains(&group.as_str());
        if self.name != ANONYMOUS && !self.groups.iter().any(is_known_group) {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }

    /// A digest of the user and of `attributes`.
    pub(super) fn digest(&self, attributes: &[&str]) -> Key {
        let (groups, extra) = (self.groups.len().to_string(), self.extra.len().to_string());
        let mut texts: Vec<String> = vec![self.name.clone(), self.uid.clone(), groups];
        texts.extend(self.groups.iter().cloned());
        texts.push(extra);
        for (key, values) in &self.extra {
            texts.extend([key.clone(), values.len().to_string()]);
            texts.extend(values.iter().cloned());
        }
        digest(texts.iter().map(String::as_str).chain(attributes.iter().copied()))
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

    fn certificate_with(parts: &[(DnType, &str)]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in parts {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn certificate_common_name_is_the_user_and_organizations_are_groups() {
        let certificate =
            certificate_with(&[(DnType::OrganizationName, "operators"), (DnType::CommonName, "jane")]);
        let groups = vec!["operators".to_owned(), "system:authenticated".to_owned()];
        let fingerprint: String = Sha256::digest(&certificate).iter().map(|b| format!("{b:02x}")).collect();
        let extra = [(CREDENTIAL_ID.to_owned(), vec![format!("X509SHA256={fingerprint}")])].into();
        let jane = User { name: "jane".into(), groups, extra, ..User::default() };
        assert_eq!(User::from_certificate(&certificate), Some(jane.clone()));
        assert_eq!(jane.clone().authenticated(), jane, "a second call changes nothing");
        assert_eq!(
            User::from_certificate(&certificate_with(&[(DnType::OrganizationName, "operators")])),
            None
        );
        assert_eq!(User::from_certificate(&certificate_with(&[(DnType::CommonName, "")])), None);
        assert_eq!(User::from_certificate(&CertificateDer::from(vec![1, 2, 3])), None);
    }

    #[test]
    fn certificate_uid_is_a_single_non_empty_text() {
        let uid = DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]);
        let user_with = |value| {
            User::from_certificate(&certificate_with(&[(DnType::CommonName, "jane"), (uid.clone(), value)]))
        };
        assert_eq!(user_with("4f2c").unwrap().uid, "4f2c");
        assert_eq!(user_with(""), None);
        assert_eq!(
            User::from_certificate(&certificate_with(&[(DnType::CommonName, "jane")])).unwrap().uid,
            ""
        );
    }

    #[test]
    fn certificate_for_the_anonymous_user_is_not_system_authenticated() {
        let certificate = certificate_with(&[(DnType::CommonName, "system:anonymous")]);
        assert_eq!(User::from_certificate(&certificate).unwrap().groups, Vec::<String>::new());
        let certificate = certificate_with(&[
            (DnType::CommonName, "a"),
            (DnType::OrganizationName, "system:unauthenticated"),
        ]);
        assert_eq!(User::from_certificate(&certificate).unwrap().groups, ["system:unauthenticated"]);
    }

    #[test]
    fn digests_differ_for_different_users_and_attributes() {
        let digest_of = |groups: &[&str], extra: &[(&str, &[&str])], attributes: &[&str]| {
            let texts = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
            let extra = extra.iter().map(|(key, values)| ((*key).to_owned(), texts(values))).collect();
            User { name: "a".into(), uid: "u".into(), groups: texts(groups), extra }.digest(attributes)
        };
        let all = [
            digest_of(&[], &[], &["get", "stats"]),
            digest_of(&[], &[], &["get", "metrics"]),
            digest_of(&[], &[], &["getmetrics", ""]),
            digest_of(&["x", "y"], &[], &["get", "stats"]),
            digest_of(&["xy"], &[], &["get", "stats"]),
            digest_of(&["x"], &[("y", &[])], &["get", "stats"]),
            digest_of(&[], &[("x", &["y"])], &["get", "stats"]),
            digest_of(&[], &[("x", &[]), ("y", &[])], &["get", "stats"]),
        ];
        let different: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len());
        assert_eq!(all[0], digest_of(&[], &[], &["get", "stats"]));
    }
}
