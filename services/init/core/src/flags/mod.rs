//! The command line of a kubelet 1.36, and the agent's own flags (node-and-api.md §1).
//!
//! [`flags()`] is the one table: [`parse`] reads a command line by it, [`help`] prints it, `/flagz` lists it and
//! [`reference()`] generates docs/flags.md. The flags for fields of the KubeletConfiguration are those of the table of fields
//! ([`keelson_config::kubelet_fields()`]); they are in [`CommandLine::fields`], which override the files.

mod help;
mod line;
mod other_flags;
mod reference;
mod value;

use keelson_config::{KubeletField, enclosing_fields, kubelet_fields};

pub use help::help;
pub use line::{CommandLine, FieldFlag, FlagError, Request, parse};
pub use reference::reference;
pub use value::Kind;
pub(crate) use value::parse_bool;

/// The effect of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It sets the field of the KubeletConfiguration at this dotted path.
    Field {
        /// The path.
        path: &'static str,
        /// Whether the kubelet calls it deprecated.
        deprecated: bool,
    },
    /// It sets no field; it is read by its name.
    Other,
    /// Like [`Effect::Other`], but deprecated, for this reason.
    OtherDeprecated(&'static str),
    /// It is accepted without effect, for this reason.
    Unused(&'static str),
}

/// One flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlagSpec {
    /// The name, without the dashes.
    pub name: &'static str,
    /// The format of its value.
    pub kind: Kind,
    /// The default in the help, and in `/flagz` for a flag that is not given. Flags for fields have the default of the
    /// KubeletConfiguration.
    pub default: &'static str,
    /// Its effect.
    pub effect: Effect,
    /// The sentence of the help.
    pub help: &'static str,
}

impl FlagSpec {
    /// Why the flag is deprecated, if it is.
    pub fn deprecation(&self) -> Option<String> {
        match self.effect {
            Effect::Field { path, deprecated: true } => {
                Some(format!("set {path} in the file of --config instead"))
            }
            Effect::OtherDeprecated(why) | Effect::Unused(why) => Some(why.to_owned()),
            Effect::Field { .. } | Effect::Other => None,
        }
    }
}

/// The flag that sets a field of the KubeletConfiguration, if it has one.
fn field_flag(field: &'static KubeletField) -> Option<FlagSpec> {
    let flag = field.flag?;
    Some(FlagSpec {
        name: flag.name,
        kind: Kind::of_field(field.kind)?,
        default: "",
        effect: Effect::Field { path: field.path, deprecated: flag.deprecated },
        help: field.doc,
    })
}

/// Every flag, sorted by name.
pub fn flags() -> &'static [FlagSpec] {
    static ALL: std::sync::LazyLock<Vec<FlagSpec>> = std::sync::LazyLock::new(|| {
        let mut all = other_flags::OTHER_FLAGS.to_vec();
        all.extend(kubelet_fields().iter().filter_map(field_flag));
        all.sort_unstable_by_key(|flag| flag.name);
        all
    });
    &ALL
}

/// The flag of this name; `_` counts as `-`, as with a kubelet.
pub(crate) fn find(name: &str) -> Option<&'static FlagSpec> {
    let name = name.replace('_', "-");
    let all = flags();
    all.binary_search_by_key(&name.as_str(), |flag| flag.name).ok().map(|at| &all[at])
}

/// The flag, without the dashes, that sets the field at a dotted path, or the map that contains it.
pub(crate) fn flag_for_field(field: &str) -> Option<&'static str> {
    enclosing_fields(field).find_map(|field| field.flag).map(|flag| flag.name)
}

#[cfg(test)]
mod tests;
