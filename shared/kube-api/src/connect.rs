//! A connection to the API server, made of a kubeconfig.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use keelson_config::CredentialRefusal;
use keelson_files::Replacement;
use kube::Client;
use serde_json::Value;
use tokio::sync::watch;

use crate::dialer::Dialer;
use crate::error::KubeError;
use crate::limit::Limiter;
use crate::metrics::RestMetrics;
use crate::watch_pool::WatchPool;

/// How often the kubeconfig is checked for changes while there are watches but no calls.
const LOOK: Duration = Duration::from_secs(5);

/// A client of the API server in a kubeconfig. Clones share one connection for calls and others for watches; all of them are
/// replaced when the file changes.
#[derive(Clone)]
pub struct KubeApi {
    pub(crate) inner: Arc<Inner>,
    pub(crate) limiter: Option<Limiter>,
}

pub(crate) struct Inner {
    kubeconfig: PathBuf,
    pub(crate) user_agent: String,
    /// What the service waits for while there is no kubeconfig.
    awaited: Option<&'static str>,
    pub(crate) metrics: RestMetrics,
    current: Mutex<Option<Connected>>,
    /// Held while a connection is made.
    connecting: tokio::sync::Mutex<()>,
    /// The server address of the last connection, for messages while there is none.
    last_server: Mutex<Option<String>>,
    /// The number of connections so far; it changes when a connection is replaced.
    replaced: watch::Sender<u64>,
    /// Whether a task polls the kubeconfig.
    looked_at: AtomicBool,
    /// The file in which a refused credential is reported, so that init renews it.
    refusals: OnceLock<PathBuf>,
}

#[derive(Clone)]
pub(crate) struct Connected {
    /// The number of this connection.
    pub(crate) number: u64,
    stamp: Stamp,
    /// The client for calls; watches have connections of their own.
    pub(crate) client: Client,
    pub(crate) watches: Arc<WatchPool>,
    pub(crate) server: String,
    /// Host and port, for metrics.
    pub(crate) host: String,
    /// The generation of the credential, if an exec plugin has issued it.
    pub(crate) credential: Option<String>,
}

/// What a call uses.
enum Look {
    /// The current connection.
    Use(Connected),
    /// A new connection by the file with this stamp; `current` stays in use if the file is invalid.
    Connect { stamp: Stamp, current: Option<Connected> },
}

/// Identifies one content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> std::io::Result<Self> {
        let meta = fs::metadata(path)?;
        Ok(Self { inode: meta.ino(), size: meta.size(), changed: (meta.ctime(), meta.ctime_nsec()) })
    }
}

impl fmt::Debug for KubeApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubeApi").field("kubeconfig", &self.inner.kubeconfig).finish_non_exhaustive()
    }
}

impl KubeApi {
    /// A client of the server in `kubeconfig`, which is read by the first call. The server's audit log shows `user_agent`.
    pub fn new(kubeconfig: PathBuf, user_agent: &str) -> Self {
        Self::made(kubeconfig, user_agent, RestMetrics::default(), None)
    }

    /// Like [`KubeApi::new`], with request metrics.
    pub fn counted(kubeconfig: PathBuf, user_agent: &str, metrics: RestMetrics) -> Self {
        Self::made(kubeconfig, user_agent, metrics, None)
    }

    /// Like [`KubeApi::counted`], but the file may be absent for a while. `awaited` names what the service waits for.
    pub fn awaiting(
        kubeconfig: PathBuf,
        user_agent: &str,
        metrics: RestMetrics,
        awaited: &'static str,
    ) -> Self {
        Self::made(kubeconfig, user_agent, metrics, Some(awaited))
    }

    fn made(
        kubeconfig: PathBuf,
        user_agent: &str,
        metrics: RestMetrics,
        awaited: Option<&'static str>,
    ) -> Self {
        let inner = Inner {
            kubeconfig,
            user_agent: user_agent.to_owned(),
            awaited,
            metrics,
            current: Mutex::new(None),
            connecting: tokio::sync::Mutex::new(()),
            last_server: Mutex::new(None),
            replaced: watch::Sender::new(0),
            looked_at: AtomicBool::new(false),
            refusals: OnceLock::new(),
        };
        Self { inner: Arc::new(inner), limiter: None }
    }

    /// Reports in `file` when the server refuses a credential of the kubeconfig's exec plugin ([`CredentialRefusal`]); clones
    /// do so, too. Only the first file that is set is used.
    #[must_use]
    pub fn reporting_refusals(self, file: PathBuf) -> Self {
        let _ = self.inner.refusals.set(file);
        self
    }

    /// Reports the credential if the server has refused it (401).
    pub(crate) fn report_refusal(&self, error: &KubeError, credential: Option<&str>) {
        let (Some(401), Some(generation), Some(file)) = (error.code(), credential, self.inner.refusals.get())
        else {
            return;
        };
        if let Err(error) = Replacement::new().write_if_changed(file, generation.as_bytes()) {
            tracing::warn!(file = %file.display(), %error, "cannot report the refused credential");
        }
    }

    /// The same connection with a rate limit on calls and watches.
    #[must_use]
    pub fn limited(self, limiter: Limiter) -> Self {
        Self { limiter: Some(limiter), ..self }
    }

    /// Waits until the connection with this number is replaced.
    pub(crate) async fn replaced(&self, number: u64) {
        // The sender lives as long as this.
        let _ = self.inner.replaced.subscribe().wait_for(|now| *now != number).await;
    }

    /// Starts polling the kubeconfig, so that a watch does not keep using replaced credentials while there are no calls.
    pub(crate) fn keep_looking(&self) {
        if self.inner.looked_at.swap(true, Ordering::Relaxed) {
            return;
        }
        let inner = Arc::downgrade(&self.inner);
        keelson_service_kit::spawn("credential files", async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(inner) = inner.upgrade() else { return };
                // The next call reports an error.
                let _ = Self { inner, limiter: None }.connected().await;
            }
        });
    }

    /// The server's address, if it is known.
    pub fn server(&self) -> String {
        let last = self.inner.last_server.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.unwrap_or_else(|| format!("of {}", self.inner.kubeconfig.display()))
    }

    /// Makes the next call open a new connection, if the current one may be broken. Calls in flight continue.
    pub fn give_up_connection(&self) {
        *self.inner.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn next_number(&self) -> u64 {
        let mut number = 0;
        self.inner.replaced.send_modify(|now| {
            *now += 1;
            number = *now;
        });
        number
    }

    /// The current connection, or what a new one is made for.
    fn look(&self) -> Result<Look, KubeError> {
        let path = &self.inner.kubeconfig;
        let current = self.inner.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match (Stamp::of(path), current) {
            (Ok(stamp), Some(current)) if current.stamp == stamp => Ok(Look::Use(current)),
            (Ok(stamp), current) => Ok(Look::Connect { stamp, current }),
            (Err(error), current) => match (self.inner.awaited, current) {
                (Some(what), current) if error.kind() == std::io::ErrorKind::NotFound => {
                    // The file was removed: its credentials are no longer used.
                    if current.is_some() {
                        self.give_up_connection();
                        self.next_number();
                    }
                    Err(KubeError::Awaited { what })
                }
                (_, Some(current)) => Ok(Look::Use(current)),
                (_, None) => Err(KubeError::Kubeconfig { path: path.clone(), message: error.to_string() }),
            },
        }
    }

    /// The connection, replaced if the file has changed. If the new file is invalid, the old connection stays in use.
    pub(crate) async fn connected(&self) -> Result<Connected, KubeError> {
        if let Look::Use(connected) = self.look()? {
            return Ok(connected);
        }
        // One caller connects, and the others use its connection: each new one ends the watches of the one before.
        let _connecting = self.inner.connecting.lock().await;
        let (stamp, current) = match self.look()? {
            Look::Use(connected) => return Ok(connected),
            Look::Connect { stamp, current } => (stamp, current),
        };
        let path = &self.inner.kubeconfig;
        let made = match connect(path, &self.inner.metrics).await {
            Ok((client, dialer, credential)) => {
                let (server, host) = (dialer.server(), dialer.host());
                let watches = Arc::new(WatchPool::new(dialer));
                Connected { number: self.next_number(), stamp, client, watches, server, host, credential }
            }
            Err(message) => match current {
                Some(former) => {
                    tracing::warn!(path = %path.display(), error = message, "the new kubeconfig is invalid; still using the previous one");
                    Connected { stamp, ..former }
                }
                None => return Err(KubeError::Kubeconfig { path: path.clone(), message }),
            },
        };
        *self.inner.last_server.lock().unwrap_or_else(PoisonError::into_inner) = Some(made.server.clone());
        *self.inner.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(made.clone());
        Ok(made)
    }
}

/// A client by the kubeconfig, the dialer for more of them, and the generation of an exec plugin's credential.
async fn connect(path: &Path, metrics: &RestMetrics) -> Result<(Client, Dialer, Option<String>), String> {
    let text = tokio::fs::read_to_string(path).await.map_err(|error| error.to_string())?;
    let dialer = Dialer::new(&text, metrics).await?;
    Ok((dialer.client()?, dialer, generation(&text)))
}

/// The credential generation. Only a kubeconfig written by init, which is JSON, has one.
fn generation(text: &str) -> Option<String> {
    let document: Value = serde_json::from_str(text).ok()?;
    document[CredentialRefusal::FIELD].as_str().map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests;
