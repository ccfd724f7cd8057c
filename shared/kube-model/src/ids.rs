//! Newtypes for identity, so that a pod's UID cannot be used where a container's id is meant.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! text_id {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            /// The id as plain text.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// True when no id is set.
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

text_id! {
    /// `metadata.uid` of a pod. For a static pod: the hash of its manifest, unless the manifest names one.
    PodUid
}
text_id! {
    /// Id of a container as the runtime gave it, without the `<runtime>://` prefix that statuses carry.
    ContainerId
}
text_id! {
    /// Id of a pod sandbox as the runtime gave it.
    SandboxId
}

impl ContainerId {
    /// Reads `status.containerStatuses[].containerID` (`<runtime>://<id>`); text without a prefix is taken as is.
    pub fn from_status(text: &str) -> Self {
        Self(text.split_once("://").map_or(text, |(_, id)| id).to_owned())
    }
}

/// Name and namespace of a pod, which together are unique among running pods. Displays as `<name>_<namespace>`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodFullName {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.namespace`.
    pub namespace: String,
}

impl PodFullName {
    /// Joins a name and a namespace.
    pub fn new(name: impl Into<String>, namespace: impl Into<String>) -> Self {
        Self { name: name.into(), namespace: namespace.into() }
    }
}

impl fmt::Display for PodFullName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}", self.name, self.namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_name_puts_the_name_before_the_namespace() {
        assert_eq!(PodFullName::new("web", "shop").to_string(), "web_shop");
    }

    #[test]
    fn container_id_drops_the_runtime_prefix_of_a_status() {
        assert_eq!(ContainerId::from_status("containerd://abc").as_str(), "abc");
        assert_eq!(ContainerId::from_status("abc").as_str(), "abc");
    }

    #[test]
    fn ids_are_plain_strings_on_the_wire() {
        assert_eq!(serde_json::to_string(&PodUid::from("u-1")).unwrap(), "\"u-1\"");
    }
}
