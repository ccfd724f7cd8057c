//! CSIDrivers, cached for a short time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_volume_manager_core::csi::CsiDriver;
use keelson_volume_manager_core::csi::error_class::{FailedStep, error_class};
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use tokio::time::Instant;

use super::ports::Objects;
use crate::plugins::PluginError;

/// How long a CSIDriver is used before it is read again.
const MAX_AGE: Duration = Duration::from_secs(60);
/// The same for one that does not exist: it is often created after the first pod that needs it.
const MAX_AGE_OF_MISSING: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
struct Cached {
    object: Option<Arc<CsiDriver>>,
    read: Instant,
}

impl Cached {
    fn is_fresh(&self) -> bool {
        let limit = if self.object.is_some() { MAX_AGE } else { MAX_AGE_OF_MISSING };
        self.read.elapsed() < limit
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

    /// The CSIDriver of a driver; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read: nothing was started (volumes.md §11.3).
    pub(super) async fn get(&self, driver: &DriverName) -> Result<Option<Arc<CsiDriver>>, PluginError> {
        let cached = self.lock().get(driver).filter(|cached| cached.is_fresh()).cloned();
        if let Some(cached) = cached {
            return Ok(cached.object);
        }
        let read = Instant::now();
        match self.objects.csi_driver(driver.as_str()).await {
            Ok(object) => {
                let object = object.map(Arc::new);
                self.lock().insert(driver.clone(), Cached { object: object.clone(), read });
                Ok(object)
            }
            Err(why) => Err(PluginError {
                owner: WaitOwner::ApiServer,
                ..PluginError::new(format!("cannot read the CSIDriver {driver}: {why}"))
                    .of_class(error_class(FailedStep::ApiObject))
            }),
        }
    }

    /// Has the CSIDriver be read again, because a pod waits for a change of it.
    pub(super) fn forget(&self, driver: &DriverName) {
        self.lock().remove(driver);
    }
}
