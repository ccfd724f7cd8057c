//! Rotation of container logs, from the KubeletConfiguration (node-and-api.md §2.5).

use std::time::Duration;

use keelson_kube_model::Quantity;

use crate::document::Sourced;
use crate::durations::millis;
use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::{Files, Settings};

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct ContainerLogs {
    /// `None` inside: rotation is off.
    max_size: Option<Sourced<Option<u64>>>,
    max_files: Option<Sourced<u32>>,
    max_workers: Option<Sourced<u32>>,
    monitor_interval: Option<Sourced<Duration>>,
}

impl Settings for ContainerLogs {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        Self {
            max_size: max_size(reader),
            max_files: reader.u32_field("containerLogMaxFiles"),
            max_workers: reader.u32_field("containerLogMaxWorkers"),
            monitor_interval: reader.duration_field("containerLogMonitorInterval"),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        out.set_field(self.max_size, |c, v| c.container_logs.max_size_bytes = v);
        out.set_field(self.max_files, |c, v| c.container_logs.max_files = v);
        out.set_field(self.max_workers, |c, v| c.container_logs.max_workers = v);
        out.set_field(self.monitor_interval, |c, v| c.container_logs.monitor_interval_ms = millis(v));
    }
}

/// A whole number of bytes. A negative one turns rotation off.
fn max_size(reader: &mut Reader<'_>) -> Option<Sourced<Option<u64>>> {
    let text = reader.text_field("containerLogMaxSize")?;
    match Quantity::parse(&text.value) {
        Ok(size) if size.nanos() % 1_000_000_000 == 0 => {
            let bytes = u64::try_from(size.value()).ok();
            Some(text.map(|_| bytes))
        }
        _ => {
            reader.refuse(&text, "this must be a whole number of bytes such as 10Mi, or -1 for no rotation");
            None
        }
    }
}
