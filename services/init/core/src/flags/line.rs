//! Reading a command line by the rules of pflag (node-and-api.md §1.1, §1.2).

use std::collections::BTreeMap;

use serde_json::Value;

use super::{FlagSpec, Meaning, find, flags, value};

/// What a command line asks for besides running.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Asked {
    /// To run.
    #[default]
    Run,
    /// `--help`.
    Help,
    /// `--version`; raw: every fact of it.
    Version {
        /// `--version=raw`.
        raw: bool,
    },
}

/// A flag that sets a field of the KubeletConfiguration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldFlag {
    /// The name with its dashes.
    pub flag: String,
    /// The dotted path of the field.
    pub path: &'static str,
    /// The value, as the file would have it.
    pub value: Value,
}

/// A command line that was read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CommandLine {
    /// What it asks for.
    pub asked: Asked,
    /// What it sets of the KubeletConfiguration.
    pub fields: Vec<FieldFlag>,
    /// What to say on the standard error of flags that should not be used any more.
    pub warnings: Vec<String>,
    /// The values of the flags that were given and set no field.
    own: BTreeMap<&'static str, Value>,
    /// The text of each flag that was given; its uses with commas between.
    given: BTreeMap<&'static str, String>,
}

/// A command line that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlagError {
    /// There is no such flag.
    #[error("unknown flag: --{name}{hint}")]
    Unknown {
        /// The name.
        name: String,
        /// A flag with nearly this name.
        hint: String,
    },
    /// There is no such letter.
    #[error("unknown shorthand flag: {letter:?} in -{text}")]
    UnknownShorthand {
        /// The letter.
        letter: char,
        /// All that follows the dash.
        text: String,
    },
    /// The value is missing.
    #[error("flag needs an argument: {flag}")]
    NoValue {
        /// The flag with its dashes.
        flag: String,
    },
    /// This is no flag although it begins as one.
    #[error("bad flag syntax: {text}")]
    Syntax {
        /// The argument.
        text: String,
    },
    /// The value does not do.
    #[error("invalid argument {value:?} for \"--{name}\" flag: {wanted}")]
    Value {
        /// The name.
        name: &'static str,
        /// What was written.
        value: String,
        /// What to write.
        wanted: String,
    },
    /// An argument that is no flag.
    #[error("unknown command {text}: there are flags only")]
    Positional {
        /// The argument.
        text: String,
    },
}

impl CommandLine {
    /// The text of a flag that sets no field; none when it was not given.
    pub fn text(&self, name: &str) -> Option<String> {
        self.own.get(name)?.as_str().map(ToOwned::to_owned)
    }

    /// Whether a flag of this kind is on.
    pub fn is_on(&self, name: &str) -> bool {
        self.own.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    /// The number of a flag that sets no field.
    pub fn number(&self, name: &str) -> Option<i32> {
        self.own.get(name)?.as_i64().and_then(|number| i32::try_from(number).ok())
    }

    /// What was written for each flag that sets no field and has a meaning, but for those named.
    pub fn own_besides(&self, names: &[&str]) -> BTreeMap<&'static str, String> {
        let has_meaning =
            |name: &str| find(name).is_some_and(|flag| !matches!(flag.meaning, Meaning::Unused(_)));
        let others = self.own.keys().filter(|name| !names.contains(*name) && has_meaning(name));
        others.filter_map(|name| Some((*name, self.given.get(name)?.clone()))).collect()
    }

    /// What was written for a flag, all uses with commas between.
    pub fn given(&self, name: &str) -> Option<&str> {
        self.given.get(name).map(String::as_str)
    }
}

/// Reads the arguments after the name of the program; relative paths start from `cwd`.
///
/// # Errors
/// The first thing that is wrong, as a kubelet does.
pub fn parse(arguments: &[String], cwd: &str) -> Result<CommandLine, FlagError> {
    let mut uses: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    let mut positional: Option<&String> = None;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let used = if argument == "--" {
            positional = positional.or_else(|| rest.next());
            break;
        } else if let Some(long) = argument.strip_prefix("--") {
            long_flag(long, &mut rest)?
        } else if let Some(short) = argument.strip_prefix('-').filter(|short| !short.is_empty()) {
            shorthand(short, &mut rest)?
        } else {
            positional = positional.or(Some(argument));
            continue;
        };
        // A value is judged where it stands: the first error is the one that is told.
        check(used.0, &used.1, cwd)?;
        uses.entry(used.0.name).or_default().push(used.1);
    }
    if let Some(text) = positional {
        return Err(FlagError::Positional { text: text.clone() });
    }
    let mut line = CommandLine::default();
    for flag in flags() {
        let Some(texts) = uses.remove(flag.name) else { continue };
        let refs: Vec<&str> = texts.iter().map(String::as_str).collect();
        let value = value::value(flag.kind, &refs, cwd).map_err(|wrong| value_error(flag, wrong))?;
        if let Some(why) = flag.deprecation() {
            line.warnings.push(format!("Flag --{} has been deprecated, {why}", flag.name));
        }
        match flag.meaning {
            Meaning::Field { path, .. } => {
                line.fields.push(FieldFlag { flag: format!("--{}", flag.name), path, value });
            }
            _ => drop(line.own.insert(flag.name, value)),
        }
        line.given.insert(flag.name, texts.join(","));
    }
    line.asked = asked(&line);
    Ok(line)
}

type Used = (&'static FlagSpec, String);

/// `name`, `name=value` or `name value`.
fn long_flag<'a>(text: &str, rest: &mut impl Iterator<Item = &'a String>) -> Result<Used, FlagError> {
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    if name.is_empty() || name.starts_with('-') {
        return Err(FlagError::Syntax { text: format!("--{text}") });
    }
    let flag = find(name)
        .ok_or_else(|| FlagError::Unknown { name: name.to_owned(), hint: hint(&name.replace('_', "-")) })?;
    let value = match (value, flag.kind.alone()) {
        (Some(value), _) => value.to_owned(),
        (None, Some(alone)) => alone.to_owned(),
        (None, None) => {
            rest.next().cloned().ok_or_else(|| FlagError::NoValue { flag: format!("--{name}") })?
        }
    };
    Ok((flag, value))
}

/// `-h`, `-v 2`, `-v2` or `-v=2`.
fn shorthand<'a>(text: &str, rest: &mut impl Iterator<Item = &'a String>) -> Result<Used, FlagError> {
    let mut letters = text.chars();
    let letter = letters.next().unwrap_or_default();
    let after = letters.as_str();
    let unknown = || FlagError::UnknownShorthand { letter, text: text.to_owned() };
    match letter {
        'h' => Ok((find("help").ok_or_else(unknown)?, "true".to_owned())),
        'v' => {
            let flag = find("v").ok_or_else(unknown)?;
            let value = match after.strip_prefix('=').unwrap_or(after) {
                "" => rest.next().cloned().ok_or_else(|| FlagError::NoValue { flag: format!("-{text}") })?,
                value => value.to_owned(),
            };
            Ok((flag, value))
        }
        _ => Err(unknown()),
    }
}

fn check(flag: &'static FlagSpec, text: &str, cwd: &str) -> Result<(), FlagError> {
    value::value(flag.kind, &[text], cwd).map(drop).map_err(|wrong| value_error(flag, wrong))
}

fn value_error(flag: &'static FlagSpec, (value, wanted): (String, String)) -> FlagError {
    FlagError::Value { name: flag.name, value, wanted }
}

/// Help goes before the version (§1.1).
fn asked(line: &CommandLine) -> Asked {
    let version = line.text("version");
    match version.as_deref() {
        _ if line.is_on("help") => Asked::Help,
        Some("raw") => Asked::Version { raw: true },
        Some("true") => Asked::Version { raw: false },
        _ => Asked::Run,
    }
}

/// The flag that was probably meant: one that differs in at most two letters.
fn hint(name: &str) -> String {
    let near = flags().iter().map(|flag| (distance(name, flag.name), flag.name)).min();
    match near {
        Some((letters, meant)) if letters <= 2 && name.len() > 3 => format!(" (did you mean --{meant}?)"),
        _ => String::new(),
    }
}

/// Letters to add, remove or change (Levenshtein).
pub(crate) fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in other.bytes().enumerate() {
            let change = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}
