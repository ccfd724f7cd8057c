//! Garbage collection of images.

use std::time::Duration;

use crate::document::Sourced;
use crate::durations::millis;
use crate::outcome::Outcome;
use crate::reader::Reader;

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(super) struct ImageGc {
    high: Option<Sourced<u32>>,
    low: Option<Sourced<u32>>,
    minimum_age: Option<Sourced<Duration>>,
    maximum_age: Option<Sourced<Duration>>,
}

impl ImageGc {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            high: reader.u32_field("imageGCHighThresholdPercent"),
            low: reader.u32_field("imageGCLowThresholdPercent"),
            minimum_age: reader.duration_field("imageMinimumGCAge"),
            maximum_age: reader.duration_field("imageMaximumGCAge"),
        }
    }

    /// Applies the fields to the configuration and checks those that depend on each other.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        // The error names the one of the pair that is set, or the low threshold if both are.
        let thresholds = self.low.clone().or_else(|| self.high.clone());
        let ages = self.maximum_age.clone();
        out.set_field(self.high, |c, v| c.image_collection.high_threshold_percent = v);
        out.set_field(self.low, |c, v| c.image_collection.low_threshold_percent = v);
        out.set_field(self.minimum_age, |c, v| c.image_collection.minimum_age_ms = millis(v));
        out.set_field(self.maximum_age, |c, v| c.image_collection.maximum_age_ms = millis(v));

        let now = out.config.image_collection.clone();
        if let Some(thresholds) = thresholds
            && now.low_threshold_percent >= now.high_threshold_percent
        {
            let remedy = format!(
                "imageGCLowThresholdPercent, which is {}, must be below imageGCHighThresholdPercent, which is {}",
                now.low_threshold_percent, now.high_threshold_percent
            );
            out.refuse(&thresholds, remedy);
        }
        if let Some(maximum) = ages
            && now.maximum_age_ms > 0
            && now.maximum_age_ms <= now.minimum_age_ms
        {
            let remedy = format!(
                "this must be longer than imageMinimumGCAge, which is {:?}, or 0 for no limit",
                Duration::from_millis(now.minimum_age_ms)
            );
            out.refuse(&maximum, remedy);
        }
    }
}
