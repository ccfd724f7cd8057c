//! CSIDrivers, cached for a short time, and longer while they cannot be read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_volume_manager_core::csi::CsiDriver;
use keelson_volume_manager_core::csi::error_class::{FailedStep, error_class};
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use tokio::time::{Instant, timeout};

use super::ports::Objects;
use crate::plugins::PluginError;

/// How long a CSIDriver is used before it is read again.
const MAX_AGE: Duration = Duration::from_secs(60);
/// The same for one that does not exist: it is often created after the first pod that needs it.
const MAX_AGE_OF_MISSING: Duration = Duration::from_secs(5);
/// How long a read may take while there is a stale CSIDriver to use instead.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// The pause after such a read that has failed, during which the stale CSIDriver is used at once.
const PAUSE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
struct Cached {
    object: Option<Arc<CsiDriver>>,
    /// Until when it is used without another read.
    fresh_until: Instant,
    /// It could not be read again.
    is_stale: bool,
}

impl Cached {
    fn new(object: Option<Arc<CsiDriver>>, read: Instant) -> Self {
        let max_age = if object.is_some() { MAX_AGE } else { MAX_AGE_OF_MISSING };
        Self { object, fresh_until: read + max_age, is_stale: false }
    }
}

/// The CSIDrivers.
#[derive(Debug)]
pub(super) struct DriverObjects {
    objects: Arc<dyn Objects>,
    cache: Mutex<BTreeMap<DriverName, Cached>>,
}

impl DriverObjects {
    pub(super) fn new(objects: Arc<dyn Objects>) -> Self {
        Self { objects, cache: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<DriverName, Cached>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The CSIDriver of a driver; `None` if there is none. While it cannot be read, the last one that was read stays in effect,
    /// as in the kubelet's cache: a volume that is published again must not depend on the API server.
    ///
    /// # Errors
    /// It cannot be read, and never was: nothing was started (volumes.md §11.3).
    pub(super) async fn get(&self, driver: &DriverName) -> Result<Option<Arc<CsiDriver>>, PluginError> {
        let cached = self.lock().get(driver).cloned();
        let Some(cached) = cached else {
            let read = Instant::now();
            let object = self.objects.csi_driver(driver.as_str()).await;
            return object
                .map(|object| self.store(driver, object, read))
                .map_err(|why| unreadable(driver, &why));
        };
        let now = Instant::now();
        if now < cached.fresh_until {
            return Ok(cached.object);
        }
        let why = match timeout(READ_WITHIN, self.objects.csi_driver(driver.as_str())).await {
            Ok(Ok(object)) => return Ok(self.store(driver, object, now)),
            Ok(Err(why)) => why,
            Err(_) => format!("the API server has not answered within {} s", READ_WITHIN.as_secs()),
        };
        if !cached.is_stale {
            tracing::warn!(event = "csi_driver_object_stale", %driver, error = why, "cannot read a CSIDriver; the last one stays in effect");
        }
        if let Some(cached) = self.lock().get_mut(driver) {
            cached.is_stale = true;
            cached.fresh_until = Instant::now() + PAUSE;
        }
        Ok(cached.object)
    }

    fn store(&self, driver: &DriverName, object: Option<CsiDriver>, read: Instant) -> Option<Arc<CsiDriver>> {
        let object = object.map(Arc::new);
        self.lock().insert(driver.clone(), Cached::new(object.clone(), read));
        object
    }

    /// Has the CSIDriver be read again, because a pod waits for a change of it.
    pub(super) fn expire(&self, driver: &DriverName) {
        if let Some(cached) = self.lock().get_mut(driver) {
            cached.fresh_until = Instant::now();
        }
    }
}

fn unreadable(driver: &DriverName, why: &str) -> PluginError {
    PluginError {
        owner: WaitOwner::ApiServer,
        ..PluginError::new(format!("cannot read the CSIDriver {driver}: {why}"))
            .of_class(error_class(FailedStep::ApiObject))
    }
}
