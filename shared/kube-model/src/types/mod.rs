//! Lean serde structs of the Kubernetes core API.
//!
//! Conventions, the same for every struct here:
//! - JSON names are the camel case of the Rust names, except where `field = "wireName"` says otherwise.
//! - `null` reads as absent. Absent options, empty strings, lists and maps are not written; numbers and booleans
//!   that are not optional are always written, as the API server does for required fields.
//! - Open enumerations stay strings on the wire struct; a helper enum exists where a decision is made.
//! - Unknown fields are ignored.

use serde::{Deserialize, Deserializer};

/// Declares API structs with the conventions of this module in one place.
macro_rules! api_types {
    ($( $(#[$meta:meta])* $name:ident { $( $(#[$fmeta:meta])* $field:ident $(= $wire:literal)? : $ty:ty, )* } )*) => { $(
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $name {
            $(
                $(#[$fmeta])*
                $(#[serde(rename = $wire)])?
                #[serde(
                    deserialize_with = "crate::types::nullable",
                    skip_serializing_if = "crate::types::Unset::is_unset"
                )]
                pub $field: $ty,
            )*
        }
        impl $crate::types::Unset for $name {}
    )* };
}

mod container;
mod meta;
mod node;
mod pod;
mod status;
mod volume;

pub use container::*;
pub use meta::*;
pub use node::*;
pub use pod::*;
pub use status::*;
pub use volume::*;

/// Whether a field value means "not set" and is left out of JSON.
pub(crate) trait Unset {
    fn is_unset(&self) -> bool {
        false
    }
}

impl<T> Unset for Option<T> {
    fn is_unset(&self) -> bool {
        self.is_none()
    }
}

impl<T> Unset for Vec<T> {
    fn is_unset(&self) -> bool {
        self.is_empty()
    }
}

impl<K, V> Unset for std::collections::BTreeMap<K, V> {
    fn is_unset(&self) -> bool {
        self.is_empty()
    }
}

impl Unset for String {
    fn is_unset(&self) -> bool {
        self.is_empty()
    }
}

impl Unset for bool {}
impl Unset for i32 {}
impl Unset for i64 {}

/// Reads `null` as the default value, as the API machinery does.
pub(crate) fn nullable<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}
