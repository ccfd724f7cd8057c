//! The claims in use, as the task knows them: those that pods are about to use, and those of the volumes that are, or may be,
//! mounted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_volume_manager_core::claims_in_use::{ClaimUsers, InUse, Origin, User};
use keelson_volume_manager_core::desire::PodRef;
use keelson_volume_manager_core::operations::{PodUid, VolumeName};
use keelson_volume_manager_core::world::ActualWorld;
use tokio::sync::{oneshot, watch};

use super::records::{PodVolume, Records, ResolvedSpec};
use super::unknown::UnknownFolders;

/// The claims in use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClaimSet {
    /// Increases with each change; 0: nothing is known yet.
    pub(crate) revision: u64,
    /// What is in use, with a text for people of what uses it.
    pub(crate) claims: Arc<BTreeMap<InUse, String>>,
}

/// The claims that a pod is about to use.
#[derive(Debug)]
struct WantedClaims {
    pod: PodRef,
    names: BTreeSet<String>,
    /// The revision of the first set that had all of them; 0: none yet. Each later one has had them, too.
    since: u64,
}

/// A request to answer once the pod's claims are in the set, with [`WantedClaims::since`].
type Request = (PodUid, oneshot::Sender<u64>);

/// What the task remembers about claims.
#[derive(Debug, Default)]
pub(super) struct Claims {
    wanted: BTreeMap<PodUid, WantedClaims>,
    /// Where a volume of a pod comes from, also after the pod wants it no more. A volume that was found on disk has no entry
    /// before a pod wants it.
    origins: BTreeMap<PodVolume, VolumeOrigin>,
    /// Where a volume comes from whose device is, or may be, mounted: the claims of all pods that have wanted it since.
    devices: BTreeMap<VolumeName, Origin>,
    requests: Vec<Request>,
}

#[derive(Debug)]
struct VolumeOrigin {
    origin: Origin,
    user: User,
}

impl Claims {
    /// A pod is about to use these claims.
    pub(super) fn want(&mut self, pod: PodRef, names: BTreeSet<String>, reply: oneshot::Sender<u64>) {
        let uid = PodUid::from(pod.uid.as_str());
        if self.wanted.get(&uid).is_none_or(|known| known.names != names) {
            self.wanted.insert(uid.clone(), WantedClaims { pod, names, since: 0 });
        }
        self.requests.push((uid, reply));
    }

    /// A pod uses no more claims than those of its volumes that are, or may be, mounted.
    pub(super) fn withdraw(&mut self, pod: &PodUid) {
        self.wanted.remove(pod);
        self.requests.retain(|(other, _)| other != pod);
    }

    /// Remembers where a volume comes from that a pod wants.
    pub(super) fn remember(&mut self, key: &PodVolume, resolved: &ResolvedSpec) {
        let spec = &resolved.spec;
        let claim = spec.claim.as_ref().map(|name| claim(&spec.pod, name));
        let user = user(&spec.pod);
        let known = self
            .origins
            .entry(key.clone())
            .or_insert_with(|| VolumeOrigin { origin: Origin::Pod, user: user.clone() });
        known.user = user;
        // A pod can have several claims for one volume.
        add_claim(&mut known.origin, claim.clone());
        add_claim(self.devices.entry(key.0.clone()).or_insert(Origin::Pod), claim);
    }

    /// Answers the requests whose claims are in the set of this revision, which has all wanted ones.
    fn answer(&mut self, revision: u64) {
        for wanted in self.wanted.values_mut().filter(|wanted| wanted.since == 0) {
            wanted.since = revision;
        }
        for (pod, reply) in self.requests.drain(..) {
            if let Some(wanted) = self.wanted.get(&pod) {
                // The pod may want it no more.
                let _ = reply.send(wanted.since);
            }
        }
    }
}

impl Records {
    /// Shows the claims in use, and answers who waits for that.
    pub(super) fn publish_claims(
        &mut self,
        unknown: &UnknownFolders,
        actual: &ActualWorld,
        sender: &watch::Sender<ClaimSet>,
    ) {
        let Self { specs, placed, devices, claims, .. } = self;
        let wanted: BTreeSet<&VolumeName> = specs.keys().map(|(volume, _)| volume).collect();
        claims.origins.retain(|key, _| specs.contains_key(key) || placed.contains_key(key));
        claims.devices.retain(|volume, _| wanted.contains(volume) || devices.contains_key(volume));
        let claims = self.claims_in_use(unknown, actual).texts();
        let mut revision = 0;
        sender.send_if_modified(|set| {
            let is_new = set.revision == 0 || *set.claims != claims;
            if is_new {
                *set = ClaimSet { revision: set.revision + 1, claims: Arc::new(claims) };
            }
            revision = set.revision;
            is_new
        });
        self.claims.answer(revision);
    }

    fn claims_in_use(&self, unknown: &UnknownFolders, actual: &ActualWorld) -> ClaimUsers {
        let Claims { wanted, origins, devices, .. } = &self.claims;
        let mut users = ClaimUsers::default();
        for WantedClaims { pod, names, .. } in wanted.values() {
            for name in names {
                users.add(claim(pod, name), user(pod));
            }
        }
        let user_of = |uid: &PodUid| match wanted.get(uid) {
            Some(wanted) => user(&wanted.pod),
            None => User::UnknownPod(uid.as_str().to_owned()),
        };
        for (key, resolved) in &self.specs {
            if let Some(VolumeOrigin { origin, user }) = origins.get(key) {
                users.add_volume(origin, &resolved.spec.inner_name, user);
            }
        }
        for (key, placed) in &self.placed {
            match origins.get(key) {
                Some(known) => users.add_volume(&known.origin, &placed.place.inner_name, &known.user),
                None => users.add_volume(&Origin::Unknown, &placed.place.inner_name, &user_of(&key.1)),
            }
        }
        let unknown = unknown.places().map(|place| (&place.pod, &place.inner_name));
        for (pod, inner_name) in unknown.chain(self.foreign.iter().map(|(pod, name)| (pod, name))) {
            users.add_volume(&Origin::Unknown, inner_name, &user_of(pod));
        }
        let is_present = |(volume, _): &(&_, &_)| actual.volume(volume).is_some();
        for (volume, device) in self.devices.iter().filter(is_present) {
            let origin = devices.get(volume).unwrap_or(&Origin::Unknown);
            users.add_volume(origin, &device.inner_name, &User::Device(device.inner_name.clone()));
        }
        users
    }
}

fn add_claim(origin: &mut Origin, claim: Option<InUse>) {
    match (origin, claim) {
        (_, None) => {}
        (Origin::Claims(claims), Some(claim)) => {
            claims.insert(claim);
        }
        (origin, Some(claim)) => *origin = Origin::Claims([claim].into()),
    }
}

fn claim(pod: &PodRef, name: &str) -> InUse {
    InUse::Claim { namespace: pod.namespace.clone(), name: name.to_owned() }
}

fn user(pod: &PodRef) -> User {
    User::Pod { namespace: pod.namespace.clone(), name: pod.name.clone() }
}
