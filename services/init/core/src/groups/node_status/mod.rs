//! The Node object: its name, labels, addresses and images, and how often it is reported (node-and-api.md §1.4, §1.5, §2.5,
//! §5, §9.2).

mod frequencies;
mod labels;
mod name;
mod node_ip;

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::settings::{Files, Settings};
use frequencies::Frequencies;

pub(crate) use frequencies::report_follows_update;

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct NodeStatus {
    frequencies: Frequencies,
    max_images: Option<Sourced<i64>>,
    attach_detach: Option<Sourced<bool>>,
}

impl Settings for NodeStatus {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        Self {
            frequencies: Frequencies::read(reader),
            max_images: reader.int_field("nodeStatusMaxImages"),
            attach_detach: reader.boolean("enableControllerAttachDetach"),
        }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        name::resolve(out);
        node_ip::resolve(out);
        self.frequencies.resolve(out);
        out.set_field(self.max_images, |c, v| c.node_status.max_images = v);
        out.set_field(self.attach_detach, |c, v| c.node_status.controller_attach_detach = v);
    }
}

#[cfg(test)]
mod tests;
