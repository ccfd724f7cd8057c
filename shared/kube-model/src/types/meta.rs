//! Object metadata, lists and the small shared pieces.
// Fields are named and defined by the Kubernetes API reference.
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Unset;
use crate::quantity::Quantity;

/// Amounts by resource name (`cpu`, `memory`, `hugepages-2Mi`, …).
pub type ResourceList = BTreeMap<String, Quantity>;

api_types! {
    /// `metadata` of an object. Timestamps are RFC 3339 text; see [`crate::time`].
    ObjectMeta {
        name: String,
        generate_name: String,
        namespace: String,
        uid: String,
        resource_version: String,
        generation: Option<i64>,
        creation_timestamp: Option<String>,
        deletion_timestamp: Option<String>,
        deletion_grace_period_seconds: Option<i64>,
        labels: BTreeMap<String, String>,
        annotations: BTreeMap<String, String>,
        owner_references: Vec<OwnerReference>,
        finalizers: Vec<String>,
    }

    OwnerReference {
        api_version: String,
        kind: String,
        name: String,
        uid: String,
        controller: Option<bool>,
        block_owner_deletion: Option<bool>,
    }

    /// `metadata` of a list.
    ListMeta {
        resource_version: String,
        continue_token = "continue": String,
    }

    /// A reference to an object in the same namespace.
    LocalObjectReference {
        name: String,
    }
}

/// A list of objects as the API returns it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, bound(deserialize = "T: Deserialize<'de> + Default"))]
pub struct List<T> {
    #[serde(deserialize_with = "super::nullable")]
    pub api_version: String,
    #[serde(deserialize_with = "super::nullable")]
    pub kind: String,
    #[serde(deserialize_with = "super::nullable")]
    pub metadata: ListMeta,
    #[serde(deserialize_with = "super::nullable")]
    pub items: Vec<T>,
}

/// A list of pods.
pub type PodList = List<super::Pod>;
/// A list of nodes.
pub type NodeList = List<super::Node>;

/// A port by number or by the name of a container port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IntOrString {
    /// A number.
    Int(i32),
    /// A name, or a number written as text.
    Str(String),
}

impl Default for IntOrString {
    fn default() -> Self {
        Self::Int(0)
    }
}

impl Unset for IntOrString {}

impl fmt::Display for IntOrString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(number) => number.fmt(f),
            Self::Str(text) => text.fmt(f),
        }
    }
}

impl Serialize for IntOrString {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Int(number) => serializer.serialize_i32(*number),
            Self::Str(text) => serializer.serialize_str(text),
        }
    }
}

impl<'de> Deserialize<'de> for IntOrString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = IntOrString;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 32-bit number or a string")
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<IntOrString, E> {
                i32::try_from(number)
                    .map(IntOrString::Int)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(number), &self))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<IntOrString, E> {
                i32::try_from(number)
                    .map(IntOrString::Int)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(number), &self))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<IntOrString, E> {
                Ok(IntOrString::Str(text.to_owned()))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
