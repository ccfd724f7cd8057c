//! The command line of a kubelet 1.36, and our own flags beside it (node-and-api.md §1).
//!
//! [`flags()`] is the one table: [`parse`] reads a command line by it, [`help`] shows it, `/flagz` lists it, [`reference`]
//! writes docs/flags.md, and where a flag is the twin of a field of the KubeletConfiguration, [`CommandLine::fields`] are laid over the files.

mod help;
mod line;
mod own;
mod reference;
mod twins;
mod value;

pub use help::help;
pub(crate) use line::distance;
pub use line::{Asked, CommandLine, FieldFlag, FlagError, parse};
pub use reference::reference;
pub use value::Kind;
pub(crate) use value::truth;

/// What a flag does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// It sets the field of the KubeletConfiguration at this dotted path, and is deprecated unless it says so.
    Field {
        /// The path.
        path: &'static str,
        /// Whether its use is told to be deprecated.
        deprecated: bool,
    },
    /// No field has it: it is read by its name.
    Own,
    /// As [`Meaning::Own`], and its use is told to be deprecated, with this reason.
    OwnDeprecated(&'static str),
    /// It is read and nothing comes of it, for this reason.
    Unused(&'static str),
}

/// One flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlagSpec {
    /// The name, without the dashes.
    pub name: &'static str,
    /// How its value is written.
    pub kind: Kind,
    /// What stands in the help as its default, and in `/flagz` when it is not given. The twins of fields have theirs from
    /// the KubeletConfiguration.
    pub default: &'static str,
    /// What it does.
    pub meaning: Meaning,
    /// The sentence of the help.
    pub help: &'static str,
}

impl FlagSpec {
    /// Why it should not be used any more.
    pub fn deprecation(&self) -> Option<String> {
        match self.meaning {
            Meaning::Field { path, deprecated: true } => {
                Some(format!("set {path} in the file of --config instead"))
            }
            Meaning::OwnDeprecated(why) | Meaning::Unused(why) => Some(why.to_owned()),
            Meaning::Field { .. } | Meaning::Own => None,
        }
    }
}

/// Every flag, sorted by name.
pub fn flags() -> &'static [FlagSpec] {
    static ALL: std::sync::LazyLock<Vec<FlagSpec>> = std::sync::LazyLock::new(|| {
        let mut all = [own::OWN, twins::TWINS].concat();
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

/// The flag that sets the field at a dotted path, or the map that it is a key of; without the dashes.
pub(crate) fn twin_of(field: &str) -> Option<&'static str> {
    let sets =
        |flag: &FlagSpec, field: &str| matches!(flag.meaning, Meaning::Field { path, .. } if path == field);
    let ends = field.match_indices(['.', '[']).map(|(at, _)| at).chain([field.len()]);
    let whole = |end| flags().iter().find(|flag| sets(flag, &field[..end])).map(|flag| flag.name);
    ends.rev().find_map(whole)
}

#[cfg(test)]
mod tests;
