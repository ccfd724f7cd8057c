//! One row of the table of fields.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::ServiceName;
use crate::takes::Takes;

/// The type of a field's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldKind {
    /// `true` or `false`.
    Bool,
    /// A whole number from the first to the second number; its flag takes 32 bits.
    Int(i64, i64),
    /// A whole number from the first to the second number.
    Long(i64, i64),
    /// A number above 0 and at most 1.
    Factor,
    /// Any string.
    Text,
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// A quantity, such as `10Mi`.
    Quantity,
    /// A path; a relative one starts from the folder of the file.
    Path,
    /// An IP address.
    Ip,
    /// A duration from the first to the second one, in Go's format.
    Duration(Duration, Duration),
    /// A duration from a millisecond to a year; zero means the default.
    Period,
    /// A duration that may be negative.
    SignedDuration,
    /// A duration, or a number of nanoseconds.
    DurationOrNanos,
    /// A list of strings.
    Strings,
    /// A list of whole numbers.
    Numbers,
    /// A map of strings.
    StringMap,
    /// A map of strings; its flag sets one key per use.
    Options,
    /// A map of eviction signals to quantities or percentages.
    Thresholds,
    /// The feature gates.
    Gates,
    /// HTTP headers: a map of lists of strings.
    Headers,
    /// Taints of a node.
    Taints,
    /// Memory reserved per NUMA node.
    ReservedMemory,
    /// Log verbosity per file.
    VModule,
    /// Grace periods of a shutdown by priority.
    ShutdownPeriods,
    /// An object, whose fields have their own rows.
    Object,
}

impl FieldKind {
    /// The fields of each entry, if this is a list of objects.
    pub const fn entry_fields(self) -> &'static [&'static str] {
        match self {
            Self::Taints => &["effect", "key", "timeAdded", "value"],
            Self::ReservedMemory => &["limits", "numaNode"],
            Self::VModule => &["filePattern", "verbosity"],
            Self::ShutdownPeriods => &["priority", "shutdownGracePeriodSeconds"],
            _ => &[],
        }
    }

    /// Whether this is a duration in Go's format.
    pub const fn is_duration(self) -> bool {
        matches!(self, Self::Duration(..) | Self::Period | Self::SignedDuration)
    }

    /// Whether the empty value of this type is the empty string; that of the other types is zero.
    pub const fn is_text(self) -> bool {
        matches!(self, Self::Text | Self::Choice(_) | Self::Quantity | Self::Path | Self::Ip)
    }
}

/// The default of a field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DefaultValue {
    /// The field has no default.
    None,
    /// A boolean.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Another number.
    Float(f64),
    /// A string.
    Text(&'static str),
    /// A list of strings.
    List(&'static [&'static str]),
    /// A map of strings.
    Map(&'static [(&'static str, &'static str)]),
}

impl DefaultValue {
    /// The value as in a file.
    pub fn json(self) -> Option<Value> {
        match self {
            Self::None => None,
            Self::Bool(value) => Some(value.into()),
            Self::Int(value) => Some(value.into()),
            Self::Float(value) => Some(value.into()),
            Self::Text(value) => Some(value.into()),
            Self::List(values) => Some(values.into()),
            Self::Map(pairs) => {
                let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), Value::from(*value)));
                Some(Value::Object(pairs.collect::<Map<_, _>>()))
            }
        }
    }
}

/// What an empty string or a zero means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmptyValue {
    /// It is a value like any other.
    Itself,
    /// The field counts as not set.
    Unset,
    /// The default, as in a file written by a program.
    Default,
    /// The default in a file; a flag sets it.
    DefaultInFiles,
}

/// Whether a field has an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldEffect {
    /// It has one, or contains fields that do.
    Full,
    /// It has none yet; only its type is checked.
    CheckedByType,
    /// It has none yet; its group checks it.
    CheckedByGroup,
}

/// The flag that sets a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KubeletFlag {
    /// Its name, without the dashes.
    pub name: &'static str,
    /// Whether the kubelet calls it deprecated.
    pub deprecated: bool,
}

/// The values of a field that require a feature gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateCondition {
    /// Any value.
    Set,
    /// `true`.
    On,
    /// A string, list or map that is not empty.
    NotEmpty,
    /// A duration or quantity that is not zero.
    NotZero,
    /// This string.
    TextIs(&'static str),
    /// A string that is not this duration.
    DurationOtherThan(&'static str),
}

/// The feature gate that a field requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate {
    /// Its name.
    pub name: &'static str,
    /// The values that require it.
    pub condition: GateCondition,
}

/// A field of a KubeletConfiguration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KubeletField {
    /// Its dotted path.
    pub path: &'static str,
    /// The type of its value.
    pub kind: FieldKind,
    /// One sentence about it; also the help of its flag.
    pub doc: &'static str,
    /// Its flag.
    pub flag: Option<KubeletFlag>,
    /// Its default.
    pub default: DefaultValue,
    /// What an empty string or a zero means.
    pub empty: EmptyValue,
    /// The dotted paths in the resolved configuration that it sets; the first is that of its provenance.
    pub sets: &'static [&'static str],
    /// How a change of that value takes effect, with the services that read it; `None`: as for the part that contains the value
    /// ([`crate::PARTS`]).
    pub change: Option<(Takes, &'static [ServiceName])>,
    /// Whether it has an effect here, and what checks it otherwise.
    pub effect: FieldEffect,
    /// Whether `/configz` shows the value of the resolved configuration instead of that of the file.
    pub shows_resolved: bool,
    /// Whether its values are masked.
    pub secret: bool,
    /// The feature gate that it requires.
    pub gate: Option<Gate>,
}

/// A row with the path, the type and the sentence; the methods add the rest.
pub(super) const fn field(path: &'static str, kind: FieldKind, doc: &'static str) -> KubeletField {
    KubeletField {
        path,
        kind,
        doc,
        flag: None,
        default: DefaultValue::None,
        empty: EmptyValue::Itself,
        sets: &[],
        change: None,
        effect: FieldEffect::Full,
        shows_resolved: false,
        secret: false,
        gate: None,
    }
}

impl KubeletField {
    /// The name of the top-level field that contains it.
    pub fn top(&self) -> &'static str {
        self.path.split('.').next().unwrap_or(self.path)
    }

    pub(super) const fn flag(self, name: &'static str) -> Self {
        Self { flag: Some(KubeletFlag { name, deprecated: true }), ..self }
    }

    /// A flag that the kubelet does not call deprecated.
    pub(super) const fn current_flag(self, name: &'static str) -> Self {
        Self { flag: Some(KubeletFlag { name, deprecated: false }), ..self }
    }

    pub(super) const fn default_bool(self, value: bool) -> Self {
        Self { default: DefaultValue::Bool(value), ..self }
    }

    pub(super) const fn default_int(self, value: i64) -> Self {
        Self { default: DefaultValue::Int(value), ..self }
    }

    pub(super) const fn default_float(self, value: f64) -> Self {
        Self { default: DefaultValue::Float(value), ..self }
    }

    pub(super) const fn default_text(self, value: &'static str) -> Self {
        Self { default: DefaultValue::Text(value), ..self }
    }

    pub(super) const fn default_list(self, values: &'static [&'static str]) -> Self {
        Self { default: DefaultValue::List(values), ..self }
    }

    pub(super) const fn default_map(self, pairs: &'static [(&'static str, &'static str)]) -> Self {
        Self { default: DefaultValue::Map(pairs), ..self }
    }

    pub(super) const fn empty_is_unset(self) -> Self {
        Self { empty: EmptyValue::Unset, ..self }
    }

    pub(super) const fn empty_is_default(self) -> Self {
        Self { empty: EmptyValue::Default, ..self }
    }

    pub(super) const fn empty_is_default_in_files(self) -> Self {
        Self { empty: EmptyValue::DefaultInFiles, ..self }
    }

    /// Without effect yet; its type is checked.
    pub(super) const fn checked_by_type(self) -> Self {
        Self { effect: FieldEffect::CheckedByType, ..self }
    }

    /// Without effect yet; its group checks it.
    pub(super) const fn checked_by_group(self) -> Self {
        Self { effect: FieldEffect::CheckedByGroup, ..self }
    }

    pub(super) const fn sets(self, paths: &'static [&'static str]) -> Self {
        Self { sets: paths, ..self }
    }

    pub(super) const fn live(self, readers: &'static [ServiceName]) -> Self {
        Self { change: Some((Takes::Live, readers)), ..self }
    }

    pub(super) const fn restarts(self, readers: &'static [ServiceName]) -> Self {
        Self { change: Some((Takes::Services, readers)), ..self }
    }

    pub(super) const fn restarts_agent(self) -> Self {
        Self { change: Some((Takes::Agent, &[])), ..self }
    }

    pub(super) const fn shows_resolved(self) -> Self {
        Self { shows_resolved: true, ..self }
    }

    pub(super) const fn secret(self) -> Self {
        Self { secret: true, ..self }
    }

    pub(super) const fn gate(self, name: &'static str, condition: GateCondition) -> Self {
        Self { gate: Some(Gate { name, condition }), ..self }
    }
}
