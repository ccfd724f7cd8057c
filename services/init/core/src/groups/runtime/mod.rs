//! The container runtime and the containers that it keeps, from both files and flags (node-and-api.md §1.4, §2.5).

use std::time::Duration;

use keelson_kube_model::parse_go_duration;

use crate::document::Sourced;
use crate::durations::millis;
use crate::inputs::given;
use crate::outcome::Outcome;
use crate::paths::is_clean;
use crate::settings::{Files, Settings};

/// The fields; `None` where the files do not set them.
#[derive(Debug)]
pub(crate) struct Runtime {
    endpoint: Option<Sourced<String>>,
    image_endpoint: Option<Sourced<String>>,
    request_timeout: Option<Sourced<Duration>>,
    sandbox_image: Option<Sourced<String>>,
    relist_period: Option<Sourced<Duration>>,
    start_parallelism: Option<Sourced<u32>>,
}

impl Settings for Runtime {
    fn read(files: &mut Files<'_>) -> Self {
        let (kubelet, keelson) = (&mut files.kubelet, &mut files.keelson);
        Self {
            endpoint: kubelet.text_field("containerRuntimeEndpoint"),
            image_endpoint: kubelet.text_field("imageServiceEndpoint"),
            request_timeout: kubelet.duration_field("runtimeRequestTimeout"),
            sandbox_image: keelson.string("sandboxImage"),
            start_parallelism: keelson.u32("startParallelism", 1..=1024),
            relist_period: keelson
                .duration("relistPeriod", Duration::from_secs(1)..=Duration::from_secs(3600)),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        if let Some(given) = self.endpoint {
            endpoint(out, given);
        }
        out.set_field(self.request_timeout, |c, v| c.runtime.request_timeout_ms = millis(v));
        out.set("runtime.sandboxImage", self.sandbox_image, |c, v| {
            c.runtime.sandbox_image = Some(v).filter(|image| !image.is_empty());
        });
        if let Some(given) = self.image_endpoint {
            image_endpoint(out, given);
        }
        container_gc(out);
        out.set("runtime.relistPeriodMs", self.relist_period, |c, v| c.runtime.relist_period_ms = millis(v));
        out.set("runtime.startParallelism", self.start_parallelism, |c, v| c.runtime.start_parallelism = v);
    }
}

fn endpoint(out: &mut Outcome<'_>, given: Sourced<String>) {
    // A bare path is a unix socket, as in the kubelet.
    let socket = given.value.strip_prefix("unix://").unwrap_or(&given.value).to_owned();
    if !is_clean(&socket) {
        out.refuse(
            &given,
            "this must be unix:// followed by the absolute path of a socket, such as unix:///run/containerd/containerd.sock",
        );
    }
    out.set_field(Some(given.map(|_| format!("unix://{socket}"))), |c, v| c.runtime.endpoint = v);
}

fn image_endpoint(out: &mut Outcome<'_>, given: Sourced<String>) {
    // A bare path is a unix socket here too.
    let named = |text: String| if text.starts_with('/') { format!("unix://{text}") } else { text };
    let endpoint = given.map(named);
    let is_socket = endpoint.value.strip_prefix("unix://").is_some_and(|path| path.starts_with('/'));
    if !is_socket {
        out.refuse(&endpoint, "this must be unix:// followed by the absolute path of a socket");
    }
    out.set_field(Some(endpoint), |c, v| {
        c.runtime.image_endpoint = Some(v).filter(|endpoint| *endpoint != c.runtime.endpoint);
    });
}

/// Applies the kubelet's flags for dead containers, which have no fields.
fn container_gc(out: &mut Outcome<'_>) {
    let name = "--minimum-container-ttl-duration";
    let age = given(name, out.flags.minimum_container_ttl.as_ref());
    if let Some(age) = age {
        match parse_go_duration(&age.value) {
            Some(duration) => {
                out.set("containerCollection.minimumAgeMs", Some(age.map(|_| duration)), |c, v| {
                    c.container_collection.minimum_age_ms = millis(v);
                })
            }
            None => out.refuse(&age, "this is not a duration; write one such as 1m"),
        }
    }
    let number = |name: &str, value: Option<i32>| {
        value.map(|value| Sourced { value, origin: name.to_owned(), field: name.to_owned() })
    };
    let per = number("--maximum-dead-containers-per-container", out.flags.max_dead_per_container);
    out.set("containerCollection.maxPerContainer", per, |c, v| c.container_collection.max_per_container = v);
    let total = number("--maximum-dead-containers", out.flags.max_dead_containers);
    out.set("containerCollection.maxTotal", total, |c, v| c.container_collection.max_total = v);
}

#[cfg(test)]
mod tests;
