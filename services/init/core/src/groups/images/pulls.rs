//! Image pulls: their limits, and for which images the pull credentials are verified.

use std::time::Duration;

use crate::document::Sourced;
use crate::durations::millis;
use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::Files;

/// The limit for `serializeImagePulls: false` without `maxParallelImagePulls`.
const UNBOUNDED_PULLS: u32 = 1000;
const ALLOWLIST: &str = "preloadedImagesVerificationAllowlist";

/// The fields; `None` where the files do not set them.
#[derive(Debug)]
pub(super) struct ImagePulls {
    max_parallel: Option<Sourced<u32>>,
    serialize: Option<Sourced<bool>>,
    qps: Option<Sourced<u32>>,
    burst: Option<Sourced<u32>>,
    verification: Option<Sourced<String>>,
    allowlist: Option<Sourced<Vec<String>>>,
    progress_timeout: Option<Sourced<Duration>>,
}

impl ImagePulls {
    pub(super) fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        let timeouts = Duration::from_secs(1)..=Duration::from_secs(24 * 3600);
        Self {
            max_parallel: reader.u32_field("maxParallelImagePulls"),
            serialize: reader.boolean("serializeImagePulls"),
            qps: reader.u32_field("registryPullQPS"),
            burst: reader.u32_field("registryBurst"),
            verification: reader.choice_field("imagePullCredentialsVerificationPolicy"),
            allowlist: reader.strings(ALLOWLIST),
            progress_timeout: files.keelson.duration("imagePullProgressTimeout", timeouts),
        }
    }

    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        let parallel = match (self.max_parallel, self.serialize) {
            (Some(max), Some(serialize)) if serialize.value && max.value > 1 => {
                out.refuse(&max, "more than 1 needs serializeImagePulls: false");
                None
            }
            (Some(max), _) => Some(max),
            (None, Some(serialize)) => Some(serialize.map(|s| if s { 1 } else { UNBOUNDED_PULLS })),
            (None, None) => None,
        };
        out.set_field(parallel, |c, v| c.runtime.max_parallel_pulls = v);
        if let (Some(list), verification) = (&self.allowlist, &self.verification)
            && !list.value.is_empty()
            && verification.as_ref().is_none_or(|v| v.value != "NeverVerifyAllowlistedImages")
        {
            let remedy = "this field requires imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages; set that or remove this field";
            out.refuse(list, remedy);
        }
        out.set_field(self.qps, |c, v| c.image_pulls.registry_qps = v);
        out.set_field(self.burst, |c, v| c.image_pulls.registry_burst = v);
        out.set_field(self.verification, |c, v| c.image_pulls.credentials_verification = v);
        out.set_field(self.allowlist, |c, v| c.image_pulls.preloaded_allowlist = v);
        out.set("imagePulls.progressTimeoutMs", self.progress_timeout, |c, v| {
            c.image_pulls.progress_timeout_ms = millis(v);
        });
    }
}

/// `preloadedImagesVerificationAllowlist`: image names without tag and digest; `*` only as the last part.
pub(super) fn check_allowlist(reader: &mut Reader<'_>) {
    if reader.peek(ALLOWLIST).is_some_and(|list| !list.is_array()) {
        // The reader of the field reports this.
        return;
    }
    reader.check_entries(ALLOWLIST, |pattern| {
        let Some(text) = pattern.as_str() else { return Ok(()) };
        let name = text.strip_suffix("/*").unwrap_or(text);
        let last = name.rsplit('/').next().unwrap_or_default();
        let is_tagged = name.contains('@') || (last.contains(':') && (name != last || text == name));
        if name.is_empty() || text.trim() != text || name.contains('*') || is_tagged {
            return Err(
                "this must be an image name without tag and digest, or one that ends in /*".to_owned()
            );
        }
        Ok(())
    });
}
