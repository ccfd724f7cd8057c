//! PersistentVolumes and PersistentVolumeClaims: what is read of them, and how the API server validates them on creation.

mod rules;
mod spec;

pub use rules::{Fail, check_claim, check_labels, check_volume, is_dns_name, volume_warnings};
pub use spec::*;
