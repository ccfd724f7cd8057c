//! Values of flags as text, and as values of a KubeletConfiguration (node-and-api.md §1.2).

use std::net::IpAddr;

use keelson_config::{FieldKind, KUBELET_VERSION};
use keelson_kube_model::parse_go_duration;
use serde_json::{Map, Value, json};

use crate::paths::absolute;

/// The format of a flag's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`; the name alone means `true`.
    Bool,
    /// A 32-bit integer.
    Int,
    /// A 64-bit integer.
    Long,
    /// Any string.
    Text,
    /// A path; a relative one starts from the working directory.
    Path,
    /// A duration in Go's format.
    Duration,
    /// An IP address.
    Ip,
    /// Strings separated by commas; repeated uses add up.
    List,
    /// `key=value` separated by commas; repeated uses add up.
    Map,
    /// Like [`Kind::Map`], and a key without `=` has an empty value.
    Labels,
    /// One `key=value` per use; the value may contain commas.
    Pair,
    /// `signal<quantity` separated by commas.
    Thresholds,
    /// `key:value` separated by commas; a key may occur several times.
    Headers,
    /// `Name=true|false` separated by commas.
    Gates,
    /// `node:type=quantity,…` separated by semicolons.
    ReservedMemory,
    /// `key=value:effect` separated by commas.
    Taints,
    /// `pattern=number` separated by commas.
    VModule,
    /// `true`, `false`, `raw` or a version.
    Version,
}

impl Kind {
    /// The format of the flag for a field of this type; `None` for a type without a format on the command line.
    pub(super) const fn of_field(kind: FieldKind) -> Option<Self> {
        Some(match kind {
            FieldKind::Bool => Self::Bool,
            FieldKind::Int(..) => Self::Int,
            FieldKind::Long(..) => Self::Long,
            FieldKind::Text | FieldKind::Choice(_) | FieldKind::Quantity => Self::Text,
            FieldKind::Path => Self::Path,
            FieldKind::Ip => Self::Ip,
            FieldKind::Duration(..)
            | FieldKind::Period
            | FieldKind::SignedDuration
            | FieldKind::DurationOrNanos => Self::Duration,
            FieldKind::Strings => Self::List,
            FieldKind::StringMap => Self::Map,
            FieldKind::Options => Self::Pair,
            FieldKind::Thresholds => Self::Thresholds,
            FieldKind::Gates => Self::Gates,
            FieldKind::Headers => Self::Headers,
            FieldKind::Taints => Self::Taints,
            FieldKind::ReservedMemory => Self::ReservedMemory,
            FieldKind::VModule => Self::VModule,
            FieldKind::Factor | FieldKind::Numbers | FieldKind::ShutdownPeriods | FieldKind::Object => {
                return None;
            }
        })
    }

    /// The placeholder of the value in the help.
    pub(super) const fn placeholder(self) -> &'static str {
        match self {
            Self::Bool => "",
            Self::Int | Self::Long => "int",
            Self::Text | Self::Path => "string",
            Self::Duration => "duration",
            Self::Ip => "ip",
            Self::List => "strings",
            Self::Map | Self::Labels => "key=value,...",
            Self::Pair => "key=value",
            Self::Thresholds => "signal<quantity,...",
            Self::Headers => "key:value,...",
            Self::Gates => "name=true|false,...",
            Self::ReservedMemory => "node:type=quantity,...;...",
            Self::Taints => "key=value:effect,...",
            Self::VModule => "pattern=N,...",
            Self::Version => "version[=true]",
        }
    }

    /// The value of a flag that is given by its name alone, if it may be.
    pub(super) const fn implied_value(self) -> Option<&'static str> {
        match self {
            Self::Bool | Self::Version => Some("true"),
            _ => None,
        }
    }
}

/// Combines all uses of a flag into a value of the KubeletConfiguration.
///
/// # Errors
/// The invalid use, and what is expected instead.
pub(super) fn value(kind: Kind, uses: &[&str], cwd: &str) -> Result<Value, (String, String)> {
    let last = uses.last().copied().unwrap_or_default();
    let of = |found: Option<Value>, wanted: &str| found.ok_or_else(|| (last.to_owned(), wanted.to_owned()));
    match kind {
        Kind::Bool => of(parse_bool(last).map(Value::Bool), "write true or false"),
        Kind::Int => of(last.parse::<i32>().ok().map(Value::from), "write a whole number"),
        Kind::Long => of(last.parse::<i64>().ok().map(Value::from), "write a whole number"),
        Kind::Text => Ok(last.into()),
        Kind::Version => {
            of(version(last), &format!("write true, false or raw, or {} with an optional suffix", built_in()))
        }
        Kind::Path => Ok(absolute(cwd, last).into()),
        Kind::Duration => of(duration(last).then(|| last.into()), "write numbers with units, such as 1m30s"),
        Kind::Ip => {
            let good = last.parse::<IpAddr>().is_ok();
            good.then(|| last.into())
                .ok_or_else(|| (last.to_owned(), format!("{last:?} is not a valid IP address")))
        }
        Kind::List => Ok(parts(uses, ',').map(Value::from).collect::<Vec<_>>().into()),
        Kind::Map => pairs(parts(uses, ','), '=', "write key=value,key=value", |text| Some(text.into())),
        Kind::Labels => {
            let pair = |part: &str| {
                let (key, value) = part.split_once('=').unwrap_or((part, ""));
                (key.to_owned(), Value::from(value))
            };
            Ok(Value::Object(parts(uses, ',').map(pair).collect()))
        }
        Kind::Pair => pairs(uses.iter().copied(), '=', "write key=value", |text| Some(text.into())),
        Kind::Thresholds => pairs(
            parts(uses, ','),
            '<',
            "write signal<quantity, such as memory.available<1Gi,nodefs.available<10%",
            |text| Some(text.into()),
        ),
        Kind::Gates => pairs(parts(uses, ','), '=', "write Name=true or Name=false", |text| {
            parse_bool(text).map(Value::Bool)
        }),
        Kind::Headers => headers(uses),
        Kind::ReservedMemory => each(
            parts(uses, ';'),
            reserved_memory,
            "write node:memory=1Gi, such as 0:memory=1Gi,hugepages-1Gi=2Gi",
        ),
        Kind::Taints => each(
            parts(uses, ','),
            taint,
            "write key=value:effect, where the effect is NoSchedule, PreferNoSchedule or NoExecute",
        ),
        Kind::VModule => each(parts(uses, ','), pattern, "write pattern=N, such as pod_workers=4"),
    }
}

/// Parses a boolean like Go's `strconv.ParseBool`.
pub(crate) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// `true`, `false`, `raw`, or the version to report: the built-in one with an optional suffix.
fn version(text: &str) -> Option<Value> {
    let is_this_one =
        text.strip_prefix(built_in()).is_some_and(|more| more.is_empty() || more.starts_with(['-', '+']));
    let accepted = text == "raw" || is_this_one;
    parse_bool(text).map(|value| value.to_string().into()).or_else(|| accepted.then(|| text.into()))
}

/// The built-in release of the kubelet, such as `v1.36.2`.
fn built_in() -> &'static str {
    KUBELET_VERSION.split(['-', '+']).next().unwrap_or(KUBELET_VERSION)
}

/// Whether this is a duration; the field decides whether it may be negative.
fn duration(text: &str) -> bool {
    parse_go_duration(text.strip_prefix('-').unwrap_or(text)).is_some()
}

/// The parts of all uses that are not empty.
fn parts<'a>(uses: &[&'a str], between: char) -> impl Iterator<Item = &'a str> {
    uses.iter().flat_map(move |text| text.split(between)).map(str::trim).filter(|part| !part.is_empty())
}

fn pairs<'a>(
    parts: impl Iterator<Item = &'a str>,
    between: char,
    wanted: &str,
    value: impl Fn(&str) -> Option<Value>,
) -> Result<Value, (String, String)> {
    let wrong = |part: &str| (part.to_owned(), wanted.to_owned());
    let pair = |part: &'a str| {
        let (key, text) = part.split_once(between).ok_or_else(|| wrong(part))?;
        let (key, text) = (key.trim(), text.trim());
        if key.is_empty() {
            return Err(wrong(part));
        }
        Ok((key.to_owned(), value(text).ok_or_else(|| wrong(part))?))
    };
    parts.map(pair).collect::<Result<Map<String, Value>, _>>().map(Value::Object)
}

fn each<'a>(
    parts: impl Iterator<Item = &'a str>,
    read: impl Fn(&str) -> Option<Value>,
    wanted: &str,
) -> Result<Value, (String, String)> {
    let one = |part: &'a str| read(part).ok_or_else(|| (part.to_owned(), wanted.to_owned()));
    parts.map(one).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

fn headers(uses: &[&str]) -> Result<Value, (String, String)> {
    let mut all = Map::new();
    for part in parts(uses, ',') {
        let Some((key, value)) = part.split_once(':').filter(|(key, _)| !key.trim().is_empty()) else {
            // The value may be a token, so it is not quoted.
            return Err(("…".to_owned(), "write key:value,key:value".to_owned()));
        };
        let values = all.entry(key.trim()).or_insert_with(|| json!([]));
        if let Value::Array(values) = values {
            values.push(value.trim().into());
        }
    }
    Ok(Value::Object(all))
}

/// `0:memory=1Gi,hugepages-1Gi=2Gi`.
fn reserved_memory(text: &str) -> Option<Value> {
    let (node, limits) = text.split_once(':')?;
    let node: i32 = node.trim().parse().ok().filter(|node| *node >= 0)?;
    let limit = |pair: &str| {
        let (kind, quantity) = pair.split_once('=')?;
        let known = kind == "memory" || kind.strip_prefix("hugepages-").is_some_and(|size| !size.is_empty());
        (known && !quantity.is_empty()).then(|| (kind.to_owned(), Value::from(quantity)))
    };
    let limits = limits.split(',').map(|pair| limit(pair.trim())).collect::<Option<Map<_, _>>>()?;
    Some(json!({"numaNode": node, "limits": limits}))
}

/// `key=value:effect`, or `key:effect`.
fn taint(text: &str) -> Option<Value> {
    let (key, effect) = text.rsplit_once(':')?;
    let (key, value) = key.split_once('=').unwrap_or((key, ""));
    let good = !key.is_empty() && ["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect);
    let mut taint = json!({"key": key, "effect": effect});
    if !value.is_empty() {
        taint["value"] = value.into();
    }
    good.then_some(taint)
}

/// `pattern=N`.
fn pattern(text: &str) -> Option<Value> {
    let (pattern, verbosity) = text.split_once('=')?;
    let verbosity: u32 = verbosity.parse().ok().filter(|v| *v <= i32::MAX.cast_unsigned())?;
    (!pattern.is_empty()).then(|| json!({"filePattern": pattern, "verbosity": verbosity}))
}
