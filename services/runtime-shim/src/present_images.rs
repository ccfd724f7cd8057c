//! The images that the runtime has: looks them up, and coordinates their use with their removal.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;
use tonic::Status;

use crate::clock::Clock;
use crate::cri::Cri;
use crate::cri_objects::Image;

/// The images that the runtime has.
#[derive(Debug, Clone)]
pub(crate) struct PresentImages {
    pub(crate) cri: Cri,
    pub(crate) clock: Clock,
    reservations: Arc<ImageReservations>,
}

/// Reservations protect an image from removal between the response of `EnsureImage` and its first container.
#[derive(Debug, Default)]
struct ImageReservations {
    state: Mutex<ReservationState>,
    /// Notified when a removal has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct ReservationState {
    /// When an image was last reported as present, nanoseconds since the boot.
    reserved_at: HashMap<String, i64>,
    removing: HashSet<String>,
}

impl PresentImages {
    pub(crate) fn new(cri: Cri, clock: Clock) -> Self {
        Self { cri, clock, reservations: Arc::default() }
    }

    /// The runtime's status of an image; `None`: it is not present.
    pub(crate) async fn inspect(&self, reference: &str) -> Result<Option<Image>, Status> {
        self.cri.image_status(reference).await
    }

    fn reservations(&self) -> std::sync::MutexGuard<'_, ReservationState> {
        self.reservations.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the removal of an image, unless it was reported as present within the last `minimum_idle` nanoseconds. Later
    /// requests for the image wait for [`Self::end_removal`].
    pub(crate) fn begin_removal(&self, id: &str, minimum_idle: i64) -> bool {
        let now = self.clock.read().boot_nanos;
        let mut reservations = self.reservations();
        reservations.reserved_at.retain(|_, at| now - *at < minimum_idle);
        !reservations.reserved_at.contains_key(id) && reservations.removing.insert(id.to_owned())
    }

    /// Ends a removal, successful or not.
    pub(crate) fn end_removal(&self, id: &str) {
        self.reservations().removing.remove(id);
        self.reservations.ended.notify_waiters();
    }

    /// Returns the image if it is present, and protects it from removal for a while.
    pub(crate) async fn reserve(&self, reference: &str) -> Result<Option<Image>, Status> {
        loop {
            let ended = self.reservations.ended.notified();
            let Some(image) = self.inspect(reference).await? else { return Ok(None) };
            {
                let mut reservations = self.reservations();
                if !reservations.removing.contains(&image.id) {
                    reservations.reserved_at.insert(image.id.clone(), self.clock.read().boot_nanos);
                    return Ok(Some(image));
                }
            }
            ended.await;
        }
    }
}
