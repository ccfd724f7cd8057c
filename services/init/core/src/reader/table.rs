//! Reads fields of a KubeletConfiguration by their row in the table of fields: with its type and range, and with what it says
//! about empty values.

use std::ops::RangeInclusive;
use std::time::Duration;

use keelson_config::{EmptyValue, FieldKind, KubeletField, kubelet_field};

use super::Reader;
use crate::document::Sourced;
use crate::durations::{NOT_A_DURATION, YEAR, signed_nanos};
use crate::paths::absolute;

const MILLI: Duration = Duration::from_millis(1);
/// The default requests per second and burst of a client of a kubelet, for 0.
const CLIENT_QPS: u32 = 5;
const CLIENT_BURST: u32 = 10;

impl Reader<'_> {
    /// A whole number; `None` also for a zero that means the default.
    pub(crate) fn int_field(&mut self, path: &str) -> Option<Sourced<i64>> {
        let range = int_range(path);
        if self.get(path)?.as_i64() == Some(0) && self.is_empty_unset(path) {
            return None;
        }
        self.integer(path, range)
    }

    /// Like [`Self::int_field`], for a range that fits 32 bits.
    pub(crate) fn u32_field(&mut self, path: &str) -> Option<Sourced<u32>> {
        Some(self.int_field(path)?.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
    }

    /// Like [`Self::int_field`], for a port.
    pub(crate) fn port_field(&mut self, path: &str) -> Option<Sourced<u16>> {
        Some(self.int_field(path)?.map(|number| u16::try_from(number).unwrap_or(u16::MAX)))
    }

    /// Requests per second of a client; zero means the default of a client.
    pub(crate) fn client_qps(&mut self, path: &str) -> Option<Sourced<u32>> {
        Some(self.u32_field(path)?.map(|number| if number == 0 { CLIENT_QPS } else { number }))
    }

    /// The burst of a client; zero means the default in a file, and the default of a client in a flag.
    pub(crate) fn client_burst(&mut self, path: &str) -> Option<Sourced<u32>> {
        Some(self.u32_field(path)?.map(|number| if number == 0 { CLIENT_BURST } else { number }))
    }

    /// A duration; `None` also for a zero that means the default.
    pub(crate) fn duration_field(&mut self, path: &str) -> Option<Sourced<Duration>> {
        let range = duration_range(path);
        let duration = self.duration(path, range)?;
        if duration.value.is_zero() && self.is_empty_unset(path) {
            return None;
        }
        if kubelet_field(path).is_some_and(|field| field.kind == FieldKind::Period) && duration.value < MILLI
        {
            self.refuse(&duration, format!("this must be from {MILLI:?} to {YEAR:?}"));
            return None;
        }
        Some(duration)
    }

    /// A string; `None` also for an empty one that counts as not set.
    pub(crate) fn text_field(&mut self, path: &str) -> Option<Sourced<String>> {
        let text = self.string(path)?;
        let is_unset = text.value.is_empty() && self.is_empty_unset(path);
        (!is_unset).then_some(text)
    }

    /// A path, made absolute with the folder of the document; `None` also for an empty one that counts as not set.
    pub(crate) fn path_field(&mut self, path: &str) -> Option<Sourced<String>> {
        let text = self.text_field(path)?;
        let folder = &self.document.folder;
        Some(text.map(|text| absolute(folder, &text)))
    }

    /// One of the strings in the table; `None` also for an empty one that counts as not set.
    pub(crate) fn choice_field(&mut self, path: &str) -> Option<Sourced<String>> {
        let choices = choices(path);
        if self.get(path)?.as_str() == Some("") && self.is_empty_unset(path) {
            return None;
        }
        self.choice(path, choices)
    }

    /// Checks a field without effect by its type.
    pub(crate) fn check_type(&mut self, field: &KubeletField) {
        let path = field.path;
        match field.kind {
            FieldKind::Bool => drop(self.boolean(path)),
            FieldKind::Int(..) | FieldKind::Long(..) => drop(self.int_field(path)),
            FieldKind::Choice(_) => drop(self.choice_field(path)),
            FieldKind::SignedDuration => self.check_signed_duration(path),
            FieldKind::StringMap | FieldKind::Options => drop(self.map(path)),
            FieldKind::Strings => drop(self.strings(path)),
            FieldKind::Text | FieldKind::Quantity | FieldKind::Path | FieldKind::Ip => {
                drop(self.string(path));
            }
            FieldKind::Duration(..) | FieldKind::Period => drop(self.duration_field(path)),
            // Formats of their own, which the groups check.
            FieldKind::Factor
            | FieldKind::DurationOrNanos
            | FieldKind::Numbers
            | FieldKind::Thresholds
            | FieldKind::Gates
            | FieldKind::Headers
            | FieldKind::Taints
            | FieldKind::ReservedMemory
            | FieldKind::VModule
            | FieldKind::ShutdownPeriods
            | FieldKind::Object => {}
        }
    }

    fn check_signed_duration(&mut self, path: &str) {
        let Some(text) = self.string(path) else { return };
        if signed_nanos(&text.value).is_none() {
            self.refuse(&text, NOT_A_DURATION);
        }
    }

    /// Whether an empty value of this field counts as not set.
    fn is_empty_unset(&self, path: &str) -> bool {
        match kubelet_field(path).map(|field| field.empty) {
            None | Some(EmptyValue::Itself) => false,
            Some(EmptyValue::Unset | EmptyValue::Default) => true,
            Some(EmptyValue::DefaultInFiles) => !self.origin(path).starts_with("--"),
        }
    }
}

fn int_range(path: &str) -> RangeInclusive<i64> {
    match kubelet_field(path).map(|field| field.kind) {
        Some(FieldKind::Int(min, max) | FieldKind::Long(min, max)) => min..=max,
        _ => unreachable!("{path} is no whole number in the table of fields"),
    }
}

fn duration_range(path: &str) -> RangeInclusive<Duration> {
    match kubelet_field(path).map(|field| field.kind) {
        Some(FieldKind::Duration(min, max)) => min..=max,
        Some(FieldKind::Period) => Duration::ZERO..=YEAR,
        _ => unreachable!("{path} is no duration in the table of fields"),
    }
}

fn choices(path: &str) -> &'static [&'static str] {
    match kubelet_field(path).map(|field| field.kind) {
        Some(FieldKind::Choice(choices)) => choices,
        _ => unreachable!("{path} is no choice in the table of fields"),
    }
}
