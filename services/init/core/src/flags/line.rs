//! Parses a command line by the rules of pflag (node-and-api.md §1.1, §1.2).

use std::collections::BTreeMap;

use serde_json::Value;
use strsim::levenshtein;

use super::{Effect, FlagSpec, find, flags, value};

/// What a command line requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Request {
    /// To run.
    #[default]
    Run,
    /// `--help`.
    Help,
    /// `--version`; raw: with all details.
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
    /// The value, as in a file.
    pub value: Value,
}

/// A parsed command line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CommandLine {
    /// What it requests.
    pub request: Request,
    /// The fields of the KubeletConfiguration that it sets.
    pub fields: Vec<FieldFlag>,
    /// Warnings about deprecated flags, for the standard error.
    pub warnings: Vec<String>,
    /// The values of the given flags that set no field.
    other_flags: BTreeMap<&'static str, Value>,
    /// The text of each given flag; repeated uses are joined by commas.
    given: BTreeMap<&'static str, String>,
}

/// A command line that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlagError {
    /// An unknown flag.
    #[error("unknown flag: --{name}{hint}")]
    UnknownFlag {
        /// The name.
        name: String,
        /// A flag with a similar name.
        hint: String,
    },
    /// An unknown shorthand.
    #[error("unknown shorthand flag: {letter:?} in -{text}")]
    UnknownShorthand {
        /// The letter.
        letter: char,
        /// Everything after the dash.
        text: String,
    },
    /// The value is missing.
    #[error("flag needs an argument: {flag}")]
    NoValue {
        /// The flag with its dashes.
        flag: String,
    },
    /// An argument that begins like a flag and is not one.
    #[error("bad flag syntax: {text}")]
    Syntax {
        /// The argument.
        text: String,
    },
    /// The value is invalid.
    #[error("invalid argument {value:?} for \"--{name}\" flag: {wanted}")]
    Value {
        /// The name.
        name: &'static str,
        /// The given value.
        value: String,
        /// What is expected.
        wanted: String,
    },
    /// An argument that is not a flag.
    #[error("unknown command {text}: there are flags only")]
    Positional {
        /// The argument.
        text: String,
    },
}

impl CommandLine {
    /// The text of a flag that sets no field, if it was given.
    pub fn text(&self, name: &str) -> Option<String> {
        self.other_flags.get(name)?.as_str().map(ToOwned::to_owned)
    }

    /// Whether a boolean flag is on.
    pub fn is_on(&self, name: &str) -> bool {
        self.other_flags.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    /// The number of a flag that sets no field, if it was given.
    pub fn number(&self, name: &str) -> Option<i32> {
        self.other_flags.get(name)?.as_i64().and_then(|number| i32::try_from(number).ok())
    }

    /// The text of each given flag that sets no field and has an effect, except `names`.
    pub fn other_flags_except(&self, names: &[&str]) -> BTreeMap<&'static str, String> {
        let has_effect =
            |name: &str| find(name).is_some_and(|flag| !matches!(flag.effect, Effect::Unused(_)));
        let others = self.other_flags.keys().filter(|name| !names.contains(*name) && has_effect(name));
        others.filter_map(|name| Some((*name, self.given.get(name)?.clone()))).collect()
    }

    /// The text of a flag, repeated uses joined by commas.
    pub fn given(&self, name: &str) -> Option<&str> {
        self.given.get(name).map(String::as_str)
    }
}

/// Parses the arguments after the program name; relative paths start from `cwd`.
///
/// # Errors
/// The first error, as a kubelet reports it.
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
        // Each value is checked in order, so that the first error is reported.
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
        match flag.effect {
            Effect::Field { path, .. } => {
                line.fields.push(FieldFlag { flag: format!("--{}", flag.name), path, value });
            }
            _ => drop(line.other_flags.insert(flag.name, value)),
        }
        line.given.insert(flag.name, texts.join(","));
    }
    line.request = request(&line);
    Ok(line)
}

type Used = (&'static FlagSpec, String);

/// `name`, `name=value` or `name value`.
fn long_flag<'a>(text: &str, rest: &mut impl Iterator<Item = &'a String>) -> Result<Used, FlagError> {
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    if name.is_empty() || name.starts_with('-') {
        return Err(FlagError::Syntax { text: format!("--{text}") });
    }
    let flag = find(name).ok_or_else(|| FlagError::UnknownFlag {
        name: name.to_owned(),
        hint: hint(&name.replace('_', "-")),
    })?;
    let value = match (value, flag.kind.implied_value()) {
        (Some(value), _) => value.to_owned(),
        (None, Some(implied_value)) => implied_value.to_owned(),
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

/// Help has precedence over the version (§1.1).
fn request(line: &CommandLine) -> Request {
    let version = line.text("version");
    match version.as_deref() {
        _ if line.is_on("help") => Request::Help,
        Some("raw") => Request::Version { raw: true },
        Some("true") => Request::Version { raw: false },
        _ => Request::Run,
    }
}

/// The flag that was probably meant: one at most two edits away.
fn hint(name: &str) -> String {
    let near = flags().iter().map(|flag| (levenshtein(name, flag.name), flag.name)).min();
    match near {
        Some((letters, meant)) if letters <= 2 && name.len() > 3 => format!(" (did you mean --{meant}?)"),
        _ => String::new(),
    }
}
