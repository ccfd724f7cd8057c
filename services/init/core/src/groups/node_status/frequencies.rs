//! How often the status of the node is computed and reported, and the limits of events.

use std::time::Duration;

use keelson_kube_model::parse_go_duration;
use serde_json::Value;

use crate::document::{Document, Sourced};
use crate::durations::{is_zero, millis};
use crate::outcome::Outcome;
use crate::reader::Reader;

const UPDATE: &str = "nodeStatusUpdateFrequency";
const REPORT: &str = "nodeStatusReportFrequency";

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(super) struct Frequencies {
    update: Option<Sourced<Duration>>,
    report: Option<Sourced<Duration>>,
    event_qps: Option<Sourced<u32>>,
    event_burst: Option<Sourced<u32>>,
}

impl Frequencies {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            update: reader.duration_field(UPDATE),
            report: reader.duration_field(REPORT),
            event_qps: reader.client_qps("eventRecordQPS"),
            event_burst: reader.client_burst("eventBurst"),
        }
    }

    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        out.set_field(self.update, |c, v| c.node_status.status_update_ms = millis(v));
        out.set_field(self.report, |c, v| c.node_status.status_report_ms = millis(v));
        out.set_field(self.event_qps, |c, v| c.node_status.event_qps = v);
        out.set_field(self.event_burst, |c, v| c.node_status.event_burst = v);
    }
}

/// Makes the report frequency follow the update frequency of the same files if they do not set it. A flag for the latter does
/// not change the former (§2.3).
pub(crate) fn report_follows_update(files: &mut Document) {
    let set_value =
        |name: &str| files.root.get(name).filter(|value| !value.is_null() && !is_zero(value)).cloned();
    let is_length = |value: &Value| value.as_str().and_then(parse_go_duration).is_some();
    if let (Some(update), None) = (set_value(UPDATE).filter(is_length), set_value(REPORT)) {
        let origin = files.origin(UPDATE);
        files.set(REPORT, &update, &origin, false);
    }
}
