use std::sync::Arc;

use keelson_config::Config;
use tokio::sync::watch;

/// The configuration as it is while the service runs: of [`Config`] only what [`Config::take_live`] names ever differs from
/// what the service was built from.
#[derive(Debug, Clone)]
pub struct Live(watch::Sender<Arc<Config>>);

impl Live {
    pub(crate) fn new(config: Arc<Config>) -> Self {
        Self(watch::Sender::new(config))
    }

    /// As it is now.
    pub fn now(&self) -> Arc<Config> {
        Arc::clone(&self.0.borrow())
    }

    /// Hears of each change, and first of what is in force now: nothing is missed between the start and this.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Config>> {
        let mut receiver = self.0.subscribe();
        receiver.mark_changed();
        receiver
    }

    /// Takes over from `new` what may change. Whether anything has changed.
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
    fn only_what_may_change_is_taken_and_told_when_it_has() {
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
