//! Container logs and images: the limits, garbage collection and pulls of the KubeletConfiguration (node-and-api.md §2.5).

use std::time::Duration;

use keelson_kube_model::Quantity;

use crate::document::{CENTURY, Reader, Sourced};
use crate::kubelet_file::KubeletFile;
use crate::resolve::{Resolver, millis};

/// The shortest interval between two checks of log sizes.
const MIN_MONITOR_INTERVAL: Duration = Duration::from_secs(3);
/// An upper bound that no node reaches.
const MAX_COUNT: u32 = 1_000_000;

/// The fields that limit container logs.
#[derive(Debug, Default)]
pub(crate) struct ContainerLogsFile {
    /// `None` inside: rotation is off.
    max_size: Option<Sourced<Option<u64>>>,
    max_files: Option<Sourced<u32>>,
    max_workers: Option<Sourced<u32>>,
    monitor_interval: Option<Sourced<Duration>>,
}

impl ContainerLogsFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            max_size: max_size(reader),
            max_files: reader.u32("containerLogMaxFiles", 2..=MAX_COUNT),
            max_workers: reader.u32("containerLogMaxWorkers", 1..=MAX_COUNT),
            monitor_interval: reader.duration("containerLogMonitorInterval", MIN_MONITOR_INTERVAL..=CENTURY),
        }
    }
}

/// A whole number of bytes. A negative one turns rotation off, and an empty string is the default.
fn max_size(reader: &mut Reader<'_>) -> Option<Sourced<Option<u64>>> {
    let text = reader.string("containerLogMaxSize").filter(|text| !text.value.is_empty())?;
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

/// The fields for the garbage collection of images.
#[derive(Debug, Default)]
pub(crate) struct ImageGcFile {
    high: Option<Sourced<u32>>,
    low: Option<Sourced<u32>>,
    minimum_age: Option<Sourced<Duration>>,
    maximum_age: Option<Sourced<Duration>>,
}

impl ImageGcFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            high: reader.u32("imageGCHighThresholdPercent", 0..=100),
            low: reader.u32("imageGCLowThresholdPercent", 0..=100),
            // Zero is the default, as for every duration of a KubeletConfiguration.
            minimum_age: reader
                .duration("imageMinimumGCAge", Duration::ZERO..=CENTURY)
                .filter(|age| !age.value.is_zero()),
            maximum_age: reader.duration("imageMaximumGCAge", Duration::ZERO..=CENTURY),
        }
    }
}

/// The values of `imagePullCredentialsVerificationPolicy`.
const VERIFICATION_POLICIES: &[&str] =
    &["NeverVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages", "AlwaysVerify"];

/// The fields for image pulls, except the number of parallel pulls.
#[derive(Debug, Default)]
pub(crate) struct ImagePullsFile {
    qps: Option<Sourced<u32>>,
    burst: Option<Sourced<u32>>,
    verification: Option<Sourced<String>>,
    allowlist: Option<Sourced<Vec<String>>>,
}

impl ImagePullsFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        const MAX: u32 = i32::MAX.unsigned_abs();
        Self {
            qps: reader.u32("registryPullQPS", 0..=MAX),
            burst: reader.u32("registryBurst", 0..=MAX),
            verification: reader
                .choice_or_default("imagePullCredentialsVerificationPolicy", VERIFICATION_POLICIES),
            allowlist: reader.strings("preloadedImagesVerificationAllowlist"),
        }
    }

    fn resolve(self, resolver: &mut Resolver<'_>) {
        if let (Some(list), verification) = (&self.allowlist, &self.verification)
            && !list.value.is_empty()
            && verification.as_ref().is_none_or(|v| v.value != "NeverVerifyAllowlistedImages")
        {
            let remedy = "this field requires imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages; set that or remove this field";
            resolver.refuse(list, remedy);
        }
        resolver.set("imagePulls.registryQps", self.qps, |c, v| c.image_pulls.registry_qps = v);
        resolver.set("imagePulls.registryBurst", self.burst, |c, v| c.image_pulls.registry_burst = v);
        resolver.set("imagePulls.credentialsVerification", self.verification, |c, v| {
            c.image_pulls.credentials_verification = v;
        });
        resolver.set("imagePulls.preloadedAllowlist", self.allowlist, |c, v| {
            c.image_pulls.preloaded_allowlist = v;
        });
    }
}

/// Applies the fields to the configuration and checks those that depend on each other.
pub(crate) fn resolve(resolver: &mut Resolver<'_>, file: &mut KubeletFile) {
    std::mem::take(&mut file.image_pulls).resolve(resolver);
    let logs = std::mem::take(&mut file.container_logs);
    resolver.set("containerLogs.maxSizeBytes", logs.max_size, |c, v| c.container_logs.max_size_bytes = v);
    resolver.set("containerLogs.maxFiles", logs.max_files, |c, v| c.container_logs.max_files = v);
    resolver.set("containerLogs.maxWorkers", logs.max_workers, |c, v| c.container_logs.max_workers = v);
    resolver.set("containerLogs.monitorIntervalMs", logs.monitor_interval, |c, v| {
        c.container_logs.monitor_interval_ms = millis(v);
    });

    let images = std::mem::take(&mut file.image_collection);
    // The error names the one of the pair that is set, or the low threshold if both are.
    let thresholds = images.low.clone().or_else(|| images.high.clone());
    let ages = images.maximum_age.clone();
    resolver.set("imageCollection.highThresholdPercent", images.high, |c, v| {
        c.image_collection.high_threshold_percent = v;
    });
    resolver.set("imageCollection.lowThresholdPercent", images.low, |c, v| {
        c.image_collection.low_threshold_percent = v;
    });
    resolver.set("imageCollection.minimumAgeMs", images.minimum_age, |c, v| {
        c.image_collection.minimum_age_ms = millis(v);
    });
    resolver.set("imageCollection.maximumAgeMs", images.maximum_age, |c, v| {
        c.image_collection.maximum_age_ms = millis(v);
    });

    let now = resolver.config.image_collection.clone();
    if let Some(thresholds) = thresholds
        && now.low_threshold_percent >= now.high_threshold_percent
    {
        let remedy = format!(
            "imageGCLowThresholdPercent, which is {}, must be below imageGCHighThresholdPercent, which is {}",
            now.low_threshold_percent, now.high_threshold_percent
        );
        resolver.refuse(&thresholds, remedy);
    }
    if let Some(maximum) = ages
        && now.maximum_age_ms > 0
        && now.maximum_age_ms <= now.minimum_age_ms
    {
        let remedy = format!(
            "this must be longer than imageMinimumGCAge, which is {:?}, or 0 for no limit",
            Duration::from_millis(now.minimum_age_ms)
        );
        resolver.refuse(&maximum, remedy);
    }
}
