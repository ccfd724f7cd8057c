//! systemd-logind over the system's message bus (org.freedesktop.login1(5)): delays a shutdown of the machine, and reports that
//! one is prepared (node-and-api.md §11).

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt as _;
use keelson_files::Replacement;
#[cfg(test)]
use keelson_testkit::logind::Machine;
use serde::Serialize;
use zbus::connection::Builder;
use zbus::fdo;
use zbus::message::Type as MessageType;
use zbus::{Connection, Fd, MatchRule, Message, MessageStream, Variant};

/// Where logind reads changes of its configuration.
const CONFIG_DIR: &str = "/etc/systemd/logind.conf.d";
/// The file there; a kubelet's has the same name.
const CONFIG_FILE: &str = "99-kubelet.conf";
const CONFIG_MODE: u32 = 0o644;
/// logind's bus name, its object, and the interface of its manager.
const LOGIND: &str = "org.freedesktop.login1";
const OBJECT: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
/// systemd's bus name, its object, and the interface of its manager.
const SYSTEMD: &str = "org.freedesktop.systemd1";
const SYSTEMD_OBJECT: &str = "/org/freedesktop/systemd1";
const SYSTEMD_MANAGER: &str = "org.freedesktop.systemd1.Manager";
/// The unit of logind.
const UNIT: &str = "systemd-logind.service";
/// The signal on which logind reads its configuration again.
const SIGHUP: i32 = 1;
/// The bus itself, and the interface of properties.
const BUS: &str = "org.freedesktop.DBus";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// The timeout of a reply.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often the delay is read until logind has its new configuration, and the first wait; each further one is twice as long.
const READS: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// Between two attempts to reach logind.
const RETRY: Duration = Duration::from_secs(1);

/// What is needed of logind.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    socket: PathBuf,
    config_dir: PathBuf,
    delay: Duration,
    may_configure: bool,
}

impl Settings {
    /// The logind on the bus with this socket, which must delay a shutdown by at least `delay`. `may_configure`: this agent
    /// manages the host and may raise logind's limit.
    pub(crate) fn new(socket: PathBuf, delay: Duration, may_configure: bool) -> Self {
        Self { socket, config_dir: CONFIG_DIR.into(), delay, may_configure }
    }

    /// The logind on the bus of a test, whose configuration may be changed.
    #[cfg(test)]
    pub(crate) fn for_test(machine: &Machine, delay: Duration) -> Self {
        let config_dir = machine.dir().join("etc/logind.conf.d");
        Self { socket: machine.socket(), config_dir, delay, may_configure: true }
    }
}

/// Why a shutdown of the machine is not noticed or not delayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogindError {
    /// The bus does not accept connections.
    #[error(
        "cannot connect to the system's message bus at {}; install and start dbus and systemd-logind",
        socket.display()
    )]
    Connect {
        /// The socket of the bus.
        socket: PathBuf,
        /// The error of the connection.
        #[source]
        source: io::Error,
    },
    /// The bus accepts connections, and does not answer.
    #[error("the system's message bus at {} does not answer", socket.display())]
    Silent {
        /// The socket of the bus.
        socket: PathBuf,
    },
    /// The service is not on the bus, and the bus cannot start it.
    #[error("cannot {act}: the service is not on the message bus; start {UNIT}")]
    NotRunning {
        /// What was tried.
        act: &'static str,
    },
    /// The service answered with an error.
    #[error("cannot {act}: {why}")]
    Refused {
        /// What was tried.
        act: &'static str,
        /// Its message and the name of the error.
        why: String,
    },
    /// The connection was lost, or a message was not as documented.
    #[error("cannot {act}")]
    Failed {
        /// What was tried.
        act: &'static str,
        /// The error of the connection.
        #[source]
        source: Box<zbus::Error>,
    },
    /// The bus has ended the connection.
    #[error("the system's message bus has closed the connection")]
    Closed,
    /// logind has ended or was restarted.
    #[error("systemd-logind has left the message bus")]
    Left,
    /// The configuration of logind cannot be written.
    #[error(
        "cannot raise the limit of systemd-logind for the delay of a shutdown; set InhibitDelayMaxSec={} in a file below \
         {CONFIG_DIR} and restart {UNIT}",
        needed.as_secs()
    )]
    Configure {
        /// The sum of the grace periods.
        needed: Duration,
        /// The error of the file.
        #[source]
        source: io::Error,
    },
    /// logind allows only a shorter delay.
    #[error(
        "systemd-logind delays a shutdown by at most {} s, and the grace periods of pods need {} s: set \
         InhibitDelayMaxSec={} in a file below {CONFIG_DIR} and restart {UNIT}",
        limit.as_secs_f64(), needed.as_secs(), needed.as_secs()
    )]
    DelayTooShort {
        /// logind's limit.
        limit: Duration,
        /// The sum of the grace periods.
        needed: Duration,
    },
}

/// Delays a shutdown until it is dropped, or until logind's limit has passed.
#[derive(Debug)]
pub(crate) struct Inhibitor(#[expect(dead_code, reason = "it counts while it is open")] OwnedFd);

/// A connection to logind. A shutdown that begins after [`Session::open`] is not missed.
#[derive(Debug)]
pub(crate) struct Session {
    connection: Connection,
    /// logind's unique name on the bus: any client may send a signal of the same name.
    logind: String,
    signals: MessageStream,
    owners: MessageStream,
}

impl Session {
    /// Connects, and makes sure that logind allows the needed delay: when its limit is too low, its configuration is changed and
    /// read again.
    ///
    /// # Errors
    /// The bus or logind cannot be reached, or the limit is too low and cannot be raised.
    pub(crate) async fn open(settings: &Settings) -> Result<Self, LogindError> {
        let silent = |_| LogindError::Silent { socket: settings.socket.clone() };
        let connection = tokio::time::timeout(TIMEOUT, connect(&settings.socket)).await.map_err(silent)??;
        // Subscribed before the first call, so that no change after it is missed.
        let signal = || MatchRule::builder().msg_type(MessageType::Signal);
        let prepare = signal().interface(MANAGER).member("PrepareForShutdown").build();
        let owners = signal().interface(BUS).member("NameOwnerChanged").arg(0, LOGIND).build();
        let signals = subscribe(&connection, prepare).await?;
        let owners = subscribe(&connection, owners).await?;
        let (limit, logind) = delay_limit(&connection).await?;
        let session = Self { connection, logind, signals, owners };
        session.ensure_delay(settings, limit).await?;
        Ok(session)
    }

    /// Like [`Session::open`], and retries every second until it succeeds. `report` gets each error.
    ///
    /// Cancel-safe: a connection that is not complete is closed.
    pub(crate) async fn open_with_retry(settings: &Settings, mut report: impl FnMut(&LogindError)) -> Self {
        loop {
            match Self::open(settings).await {
                Ok(session) => return session,
                Err(error) => report(&error),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Whether a shutdown is being prepared.
    ///
    /// # Errors
    /// logind does not answer, or not as documented.
    pub(crate) async fn is_preparing(&self) -> Result<bool, LogindError> {
        const ACT: &str = "ask systemd-logind whether the machine is shutting down";
        let reply = property(&self.connection, "PreparingForShutdown", ACT).await?;
        let body = reply.body();
        let value = body.deserialize::<Variant<'_>>().and_then(Variant::downcast::<bool>);
        value.map_err(|source| failed(ACT, source))
    }

    /// Takes an inhibitor that delays a shutdown.
    ///
    /// # Errors
    /// logind does not answer or refuses, as while a shutdown is being prepared.
    pub(crate) async fn inhibit(&self) -> Result<Inhibitor, LogindError> {
        const ACT: &str = "delay a shutdown of the machine";
        let body = ("shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay");
        let logind = Target { name: LOGIND, object: OBJECT, interface: MANAGER };
        let reply = call(&self.connection, logind, "Inhibit", &body, ACT).await?;
        let fd = reply.body().deserialize::<zbus::OwnedFd>();
        let fd = fd.and_then(|fd| OwnedFd::try_from(Fd::from(fd)));
        fd.map(Inhibitor).map_err(|source| failed(ACT, source))
    }

    /// Waits for logind's next signal: `true` when a shutdown is prepared, `false` when it was cancelled.
    ///
    /// Cancel-safe: signals that were not returned stay in the stream.
    ///
    /// # Errors
    /// The connection has ended, or logind has left the bus: open another session.
    pub(crate) async fn next(&mut self) -> Result<bool, LogindError> {
        const ACT: &str = "read signals of systemd-logind";
        loop {
            // Cancel-safe: messages that were not taken stay in their streams.
            tokio::select! {
                signal = self.signals.next() => {
                    let signal = signal.ok_or(LogindError::Closed)?.map_err(|source| failed(ACT, source))?;
                    let preparing = signal.body().deserialize::<bool>();
                    if sender(&signal).as_deref() == Some(self.logind.as_str()) {
                        return preparing.map_err(|source| failed(ACT, source));
                    }
                }
                change = self.owners.next() => {
                    let change = change.ok_or(LogindError::Closed)?.map_err(|source| failed(ACT, source))?;
                    if sender(&change).as_deref() == Some(BUS) && self.has_left(&change, ACT)? {
                        return Err(LogindError::Left);
                    }
                }
            }
        }
    }

    fn has_left(&self, change: &Message, act: &'static str) -> Result<bool, LogindError> {
        let owner = change.body().deserialize::<(String, String, String)>();
        owner.map(|(_, _, owner)| owner != self.logind).map_err(|source| failed(act, source))
    }

    /// Raises logind's limit to the needed delay when it is lower.
    async fn ensure_delay(&self, settings: &Settings, mut limit: Duration) -> Result<(), LogindError> {
        const ACT: &str = "have systemd-logind read its configuration again";
        let needed = settings.delay;
        if limit >= needed {
            return Ok(());
        }
        if settings.may_configure {
            let written = configure(settings.config_dir.clone(), needed).await;
            written.map_err(|source| LogindError::Configure { needed, source })?;
            let systemd = Target { name: SYSTEMD, object: SYSTEMD_OBJECT, interface: SYSTEMD_MANAGER };
            call(&self.connection, systemd, "KillUnit", &(UNIT, "all", SIGHUP), ACT).await?;
            for read in 0..READS {
                tokio::time::sleep(FIRST_WAIT.saturating_mul(1 << read)).await;
                limit = delay_limit(&self.connection).await?.0;
                if limit >= needed {
                    return Ok(());
                }
            }
        }
        Err(LogindError::DelayTooShort { limit, needed })
    }
}

/// A service on the bus, one of its objects, and an interface of that.
#[derive(Debug, Clone, Copy)]
struct Target {
    name: &'static str,
    object: &'static str,
    interface: &'static str,
}

async fn connect(socket: &Path) -> Result<Connection, LogindError> {
    let refused = |source| LogindError::Connect { socket: socket.to_owned(), source };
    let stream = tokio::net::UnixStream::connect(socket).await.map_err(refused)?;
    let stream = stream.into_std().map_err(refused)?;
    let connection = Builder::unix_stream(stream).method_timeout(TIMEOUT).build().await;
    connection.map_err(|source| failed("log in to the message bus", source))
}

async fn subscribe(
    connection: &Connection,
    rule: zbus::Result<MatchRule<'_>>,
) -> Result<MessageStream, LogindError> {
    let subscribed = match rule {
        Ok(rule) => MessageStream::for_match_rule(rule, connection, None).await,
        Err(error) => Err(error),
    };
    subscribed.map_err(|source| failed("subscribe to signals of systemd-logind", source))
}

async fn call<B>(
    connection: &Connection,
    target: Target,
    method: &'static str,
    body: &B,
    act: &'static str,
) -> Result<Message, LogindError>
where
    B: Serialize + zbus::DynamicType,
{
    let Target { name, object, interface } = target;
    let reply = connection.call_method(Some(name), object, Some(interface), method, body).await;
    reply.map_err(|source| failed(act, source))
}

/// The reply that has a property of logind's manager.
async fn property(
    connection: &Connection,
    name: &'static str,
    act: &'static str,
) -> Result<Message, LogindError> {
    let properties = Target { name: LOGIND, object: OBJECT, interface: PROPERTIES };
    call(connection, properties, "Get", &(MANAGER, name), act).await
}

/// The longest delay that logind allows, and logind's unique name.
async fn delay_limit(connection: &Connection) -> Result<(Duration, String), LogindError> {
    const ACT: &str = "ask systemd-logind how long a shutdown can be delayed";
    let reply = property(connection, "InhibitDelayMaxUSec", ACT).await?;
    let body = reply.body();
    let micros = body.deserialize::<Variant<'_>>().and_then(Variant::downcast::<u64>);
    let micros = micros.map_err(|source| failed(ACT, source))?;
    Ok((Duration::from_micros(micros), sender(&reply).unwrap_or_default()))
}

/// Writes the file with the limit, byte for byte as a kubelet does.
async fn configure(dir: PathBuf, delay: Duration) -> io::Result<()> {
    let content = format!("# Kubelet logind override\n[Login]\nInhibitDelayMaxSec={}\n", delay.as_secs());
    let write = move || write_config(&dir, &content);
    tokio::task::spawn_blocking(write).await.map_err(io::Error::other)?
}

fn write_config(dir: &Path, content: &str) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let file = Replacement::new().mode(CONFIG_MODE);
    file.write_if_changed(&dir.join(CONFIG_FILE), content.as_bytes()).map(|_| ())
}

fn failed(act: &'static str, error: zbus::Error) -> LogindError {
    match error {
        zbus::Error::MethodError(name, why, _) => {
            LogindError::Refused { act, why: format!("{} ({name})", why.unwrap_or_default()) }
        }
        zbus::Error::FDO(error) => match *error {
            fdo::Error::ServiceUnknown(_)
            | fdo::Error::NameHasNoOwner(_)
            | fdo::Error::SpawnChildExited(_)
            | fdo::Error::SpawnServiceNotFound(_) => LogindError::NotRunning { act },
            _ => LogindError::Refused { act, why: error.to_string() },
        },
        other => LogindError::Failed { act, source: Box::new(other) },
    }
}

/// The sender of a message, as set by the bus.
fn sender(message: &Message) -> Option<String> {
    message.header().sender().map(ToString::to_string)
}

#[cfg(test)]
pub(crate) mod tests;
