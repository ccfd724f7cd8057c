//! Which claims are in use on this node, and by what (volumes.md §3.4): pod-config keeps a deleted claim that is in use.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What is in use.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum InUse {
    /// A claim.
    Claim {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The claim that is bound to the PersistentVolume of this name, if there is one.
    PersistentVolume(String),
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim { namespace, name } => write!(f, "the claim {namespace}/{name}"),
            Self::PersistentVolume(name) => write!(f, "the PersistentVolume {name}"),
        }
    }
}

/// What uses a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum User {
    /// A pod.
    Pod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The volumes of a pod of which only the UID is known.
    UnknownPod(String),
    /// A device that is, or may be, mounted although no pod has its volume.
    Device(String),
}

/// What is known about where a volume comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origin {
    /// Nothing but the name of its folder: it was found on disk at startup. For a volume of a claim, that is the name of the
    /// PersistentVolume.
    #[default]
    Unknown,
    /// The pod itself has its source: no claim is involved.
    Pod,
    /// These claims.
    Claims(BTreeSet<InUse>),
}

/// Collects what uses each claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimUsers(BTreeMap<InUse, BTreeSet<User>>);

impl ClaimUsers {
    /// Something uses a claim.
    pub fn add(&mut self, claim: InUse, user: User) {
        self.0.entry(claim).or_default().insert(user);
    }

    /// Something uses a volume that is, or may be, mounted. `folder` is the name of the volume's folder.
    pub fn add_volume(&mut self, origin: &Origin, folder: &str, user: &User) {
        match origin {
            Origin::Unknown => self.add(InUse::PersistentVolume(folder.to_owned()), user.clone()),
            Origin::Pod => {}
            Origin::Claims(claims) => {
                for claim in claims {
                    self.add(claim.clone(), user.clone());
                }
            }
        }
    }

    /// What is in use, with a text for people that completes `the claim is held by …`.
    pub fn texts(&self) -> BTreeMap<InUse, String> {
        self.0.iter().map(|(claim, users)| (claim.clone(), text(users))).collect()
    }
}

/// The first pod, and how many others there are. A device is named only if there is no pod.
fn text(users: &BTreeSet<User>) -> String {
    let pods = users.iter().filter(|user| !matches!(user, User::Device(_))).count();
    let first = match users.first() {
        Some(User::Pod { namespace, name }) => format!("the pod {namespace}/{name}"),
        Some(User::UnknownPod(uid)) => format!("the volumes of the pod with UID {uid}"),
        Some(User::Device(volume)) => format!("the mounted device of the PersistentVolume {volume}"),
        None => String::new(),
    };
    match pods {
        0 | 1 => first,
        2 => format!("{first} and another pod"),
        _ => format!("{first} and {} other pods", pods - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(name: &str) -> InUse {
        InUse::Claim { namespace: "default".into(), name: name.into() }
    }

    fn pod(name: &str) -> User {
        User::Pod { namespace: "default".into(), name: name.into() }
    }

    #[test]
    fn a_volume_holds_its_claims_or_else_the_persistent_volume_of_its_folder() {
        let (unknown, device) = (User::UnknownPod("u1".into()), User::Device("disk".into()));
        let of_claims = |names: &[&str]| Origin::Claims(names.iter().map(|name| claim(name)).collect());
        let found = InUse::PersistentVolume("disk".into());
        for (origin, user, expected) in [
            (of_claims(&["data"]), &pod("db"), vec![(claim("data"), "the pod default/db")]),
            (
                of_claims(&["data", "more"]),
                &pod("db"),
                vec![(claim("data"), "the pod default/db"), (claim("more"), "the pod default/db")],
            ),
            (Origin::Unknown, &pod("db"), vec![(found.clone(), "the pod default/db")]),
            (Origin::Unknown, &unknown, vec![(found.clone(), "the volumes of the pod with UID u1")]),
            (Origin::Unknown, &device, vec![(found, "the mounted device of the PersistentVolume disk")]),
            (Origin::Pod, &pod("db"), vec![]),
        ] {
            let mut users = ClaimUsers::default();
            users.add_volume(&origin, "disk", user);
            let expected: BTreeMap<_, _> =
                expected.into_iter().map(|(claim, text)| (claim, text.to_owned())).collect();
            assert_eq!(users.texts(), expected, "{origin:?} {user:?}");
        }
    }

    #[test]
    fn the_users_of_a_claim_are_one_text_with_known_pods_first() {
        let (unknown, device) = (User::UnknownPod("u1".into()), User::Device("disk".into()));
        for (users, expected) in [
            (vec![&unknown, &device], "the volumes of the pod with UID u1"),
            (vec![&device, &unknown, &pod("db")], "the pod default/db and another pod"),
            (vec![&pod("db"), &pod("db")], "the pod default/db"),
            (vec![&pod("b"), &unknown, &pod("a")], "the pod default/a and 2 other pods"),
        ] {
            let mut all = ClaimUsers::default();
            for user in &users {
                all.add(claim("data"), (*user).clone());
            }
            assert_eq!(all.texts()[&claim("data")], expected, "{users:?}");
        }
    }
}
