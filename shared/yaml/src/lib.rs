//! Reads YAML with the positions of its values. Pure: takes text and returns values.
//!
//! | module | what it reads |
//! |---|---|
//! | [`manifest`] | manifests: documents by the rules of YAML 1.1, as the kubelet reads them, and the positions of fields |
//! | [`fields`] | configuration files: one map, with the line of each field and with duplicate fields |
//! | [`bounds`] | the limits for the content of a manifest |
//!
//! Both readers use the tokeniser of `serde-saphyr`. They differ in what they make of its tokens: `0644` is 420 in a manifest and
//! the float 644.0 in a configuration file; only manifests have limits of their own, several documents and keys that are not text.

pub mod bounds;
pub mod fields;
mod locate;
pub mod manifest;
mod scalar;
