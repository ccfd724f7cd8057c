use std::sync::Arc;

use keelson_config::Config;
use tokio::sync::watch;

/// The current configuration of a running service. Only the values of [`Config::take_live`] ever differ from those at the
/// start.
#[derive(Debug, Clone)]
pub struct Live(watch::Sender<Arc<Config>>);

impl Live {
    pub(crate) fn new(config: Arc<Config>) -> Self {
        Self(watch::Sender::new(config))
    }

    /// The current configuration.
    pub fn now(&self) -> Arc<Config> {
        Arc::clone(&self.0.borrow())
    }

    /// Subscribes to changes. The current value counts as the first change, so that none since the start is missed.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Config>> {
        let mut receiver = self.0.subscribe();
        receiver.mark_changed();
        receiver
    }

    /// Applies the values of `new` that may change at run time. Returns whether any has changed.
    pub fn take(&self, new: &Config) -> bool {
        self.0.send_if_modified(|now| {
            let mut next = Config::clone(now);
            next.take_live(new);
            let differs = next != **now;
            if differs {
                *now = Arc::new(next);
            }
            differs
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_live_values_are_taken_and_subscribers_are_notified() {
        let live = Live::new(Arc::default());
        let mut heard = live.subscribe();
        assert!(heard.has_changed().unwrap());
        heard.mark_unchanged();
        let mut new = Config { node_name: "other".into(), ..Config::default() };
        assert!(!live.take(&new) && !heard.has_changed().unwrap());
        new.container_logs.max_files = 9;
        assert!(live.take(&new) && !live.take(&new));
        let now = heard.borrow_and_update().clone();
        assert_eq!((now.container_logs.max_files, now.node_name.as_str()), (9, ""));
    }
}
