//! Reading the fields of a legacy source, and the errors that name them.

use serde_json::{Map, Value};

use super::Origin;

/// Partitions of a disk are numbered from 1 to this; 0 is the whole disk.
const MAX_PARTITION: i64 = 255;

/// Why a legacy source cannot be translated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{object} cannot be translated to CSI: {field} {error}")]
pub struct LegacyError {
    /// The volume or PersistentVolume, with its name.
    pub object: String,
    /// The field as `<source>.<field>`, the source alone, or an annotation or label.
    pub field: String,
    /// What is wrong with the field.
    pub error: FieldError,
}

impl LegacyError {
    /// The error of `field` of `origin`.
    pub(super) fn new(origin: &Origin<'_>, field: impl Into<String>, error: FieldError) -> Self {
        Self { object: origin.to_string(), field: field.into(), error }
    }
}

/// What is wrong with a field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// The API has no such source.
    #[error("is not a volume source that this agent knows; use one that Kubernetes 1.36 has")]
    UnknownSource,
    /// It has no value, and must have one.
    #[error("is missing or empty; create the object again with a value for it")]
    Missing,
    /// Its JSON type is wrong.
    #[error("must be {wanted}")]
    WrongType {
        /// The JSON type, with its article.
        wanted: &'static str,
    },
    /// Its value is against a rule.
    #[error("has the value {value:?}, but {rule}")]
    Invalid {
        /// The value.
        value: String,
        /// The rule, as a sentence.
        rule: &'static str,
    },
    /// Neither the source nor the claim says where the secret is.
    #[error(
        "is missing and no claim is bound; set the namespace of the secret, or bind the volume to a claim"
    )]
    NoSecretNamespace,
}

/// The fields of one source. A null is a missing field, and unknown fields are ignored.
pub(super) struct Fields<'a> {
    kind: &'a str,
    fields: &'a Map<String, Value>,
    /// The object that contains the source.
    pub(super) origin: Origin<'a>,
}

impl<'a> Fields<'a> {
    /// The fields of `spec`, which must be a JSON object.
    pub(super) fn read(kind: &'a str, spec: &'a Value, origin: Origin<'a>) -> Result<Self, LegacyError> {
        match spec {
            Value::Object(fields) => Ok(Self { kind, fields, origin }),
            Value::Null => Err(LegacyError::new(&origin, kind, FieldError::Missing)),
            _ => Err(LegacyError::new(&origin, kind, FieldError::WrongType { wanted: "an object" })),
        }
    }

    /// The error of a field of the source.
    pub(super) fn error(&self, field: &str, error: FieldError) -> LegacyError {
        LegacyError::new(&self.origin, format!("{}.{field}", self.kind), error)
    }

    /// The error of a field whose value is against a rule.
    pub(super) fn invalid(&self, field: &str, value: &str, rule: &'static str) -> LegacyError {
        self.error(field, FieldError::Invalid { value: value.to_owned(), rule })
    }

    /// A string, if the field has a value.
    pub(super) fn optional(&self, field: &str) -> Result<Option<&'a str>, LegacyError> {
        match self.fields.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.error(field, FieldError::WrongType { wanted: "a string" })),
        }
    }

    /// A string; empty if the field is missing.
    pub(super) fn text(&self, field: &str) -> Result<&'a str, LegacyError> {
        self.optional(field).map(Option::unwrap_or_default)
    }

    /// A string that is not empty.
    pub(super) fn required(&self, field: &str) -> Result<&'a str, LegacyError> {
        match self.text(field)? {
            "" => Err(self.error(field, FieldError::Missing)),
            text => Ok(text),
        }
    }

    /// A boolean; false if the field is missing.
    pub(super) fn flag(&self, field: &str) -> Result<bool, LegacyError> {
        match self.fields.get(field) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(value)) => Ok(*value),
            Some(_) => Err(self.error(field, FieldError::WrongType { wanted: "true or false" })),
        }
    }

    /// The field `partition`: 0, or missing, is the whole disk.
    pub(super) fn partition(&self) -> Result<i64, LegacyError> {
        const FIELD: &str = "partition";
        let value = match self.fields.get(FIELD) {
            None | Some(Value::Null) => return Ok(0),
            Some(value) => value,
        };
        let Value::Number(number) = value else {
            return Err(self.error(FIELD, FieldError::WrongType { wanted: "an integer" }));
        };
        number.as_i64().filter(|partition| (0..=MAX_PARTITION).contains(partition)).ok_or_else(|| {
            self.invalid(FIELD, &number.to_string(), "a partition is an integer from 0 to 255")
        })
    }
}
