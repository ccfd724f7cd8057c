//! Which objects, tokens and certificates the actions of a plan wait for.

use std::collections::BTreeSet;

use keelson_pod_reconciler::Next;
use keelson_volume_manager_core::desire::{PodDesire, Volume, Want};
use keelson_volume_manager_core::payload::{ObjectLookup, ObjectName, referenced_objects};
use keelson_volume_manager_core::plan::Action;
use keelson_volume_manager_core::pod_certificate::CertificateLookup;
use keelson_volume_manager_core::token::TokenLookup;
use keelson_volume_manager_core::wait_owner::WaitOwner;

use super::Worker;
use super::details::StatusDetails;
use crate::pod_certificates::certificate_names;
use crate::tokens;
use crate::view::Phase;

/// What actions wait for.
#[derive(Default)]
pub(super) struct Pending {
    texts: BTreeSet<String>,
    /// Who has to act, if it is a certificate.
    owner: Option<WaitOwner>,
}

impl Worker {
    /// Splits off the actions whose objects, tokens and certificates are known, and returns what the others wait for. These
    /// wait without an attempt, since pod-config reports objects and tokens as soon as it can.
    pub(super) fn runnable(&self, desire: &PodDesire, actions: Vec<Action>) -> (Vec<Action>, Pending) {
        let mut pending = Pending::default();
        let (lookup, certificate) = (self.tokens.lookup(), self.certificates.lookup());
        let is_runnable = |action: &Action| {
            let (Action::SetUp(i) | Action::Refresh(i)) = action else { return true };
            let Some(volume) = desire.volumes.get(*i) else { return true };
            let Some(files) = volume.files() else { return true };
            let objects = referenced_objects(files, &desire.header.pod.namespace)
                .filter(|name| self.env.objects.lookup(name) == ObjectLookup::Unknown)
                .map(|name| format!("pod-config to send the {name}"));
            let tokens = tokens::token_names(volume).into_iter().filter_map(|name| match lookup(name) {
                TokenLookup::Pending(what) => Some(what),
                TokenLookup::Refused(_) | TokenLookup::Present(_) => None,
            });
            let unknown: Vec<String> = objects.chain(tokens).collect();
            let mut is_runnable = unknown.is_empty();
            pending.texts.extend(unknown);
            for name in certificate_names(volume) {
                if let CertificateLookup::Pending { what, owner } = certificate(name) {
                    is_runnable = false;
                    pending.texts.insert(what);
                    pending.owner.get_or_insert(owner);
                }
            }
            is_runnable
        };
        let actions = actions.into_iter().filter(is_runnable).collect();
        (actions, pending)
    }

    pub(super) fn wait_for(&self, desire: &PodDesire, pending: &Pending) -> Next {
        let phase = if self.is_ready(desire) { Phase::Mounted } else { Phase::Pending };
        let message = pending.texts.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let owner = pending.owner.as_ref().filter(|owner| **owner != WaitOwner::VolumeManager);
        let owner = owner.map(ToString::to_string).unwrap_or_default();
        self.publish(desire, phase, &StatusDetails { message, owner, ..StatusDetails::default() });
        Next::WhenChanged
    }

    /// Subscribes to the objects that the desired volumes of the pod refer to.
    pub(super) fn follow_objects(&mut self, desire: &PodDesire) {
        self.objects.set(needed_objects(desire));
    }
}

/// The objects that the desired volumes of a pod refer to.
fn needed_objects(desire: &PodDesire) -> BTreeSet<ObjectName> {
    match desire.header.want {
        Want::Run | Want::Stop => {
            let files = desire.volumes.iter().filter_map(Volume::files);
            files.flat_map(|files| referenced_objects(files, &desire.header.pod.namespace)).collect()
        }
        Want::Unmount | Want::Forget => BTreeSet::new(),
    }
}
