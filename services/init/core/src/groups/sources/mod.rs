//! The sources of static pods, and what their pods may use of the host (node-and-api.md §2.5).

mod limits;
mod manifest_url;

use std::time::Duration;

use crate::document::Sourced;
use crate::durations::millis;
use crate::outcome::Outcome;
use crate::settings::{Files, Settings};
use limits::SourceLimits;
use manifest_url::ManifestUrl;

/// The fields; `None` where the files do not set them.
#[derive(Debug)]
pub(crate) struct Sources {
    static_pod_path: Option<Sourced<String>>,
    file_check: Option<Sourced<Duration>>,
    manifest_url: ManifestUrl,
    limits: SourceLimits,
}

impl Settings for Sources {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        Self {
            static_pod_path: reader.path_field("staticPodPath"),
            file_check: reader.duration_field("fileCheckFrequency"),
            manifest_url: ManifestUrl::read(reader),
            limits: SourceLimits::read(&mut files.keelson),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        out.set_field(self.static_pod_path, |c, v| c.sources.static_pod_path = Some(v.into()));
        out.set_field(self.file_check, |c, v| c.sources.file_check_ms = millis(v));
        self.manifest_url.resolve(out);
        self.limits.resolve(out);
    }
}
