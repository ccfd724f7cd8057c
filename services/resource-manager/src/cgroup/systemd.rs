//! systemd over the system's message bus (org.freedesktop.systemd1(5)).
//!
//! It does not use systemd's own socket, `/run/systemd/private`: messages from there have a sender that D-Bus does not allow,
//! and the library rejects them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt as _;
use keelson_resource_manager_core::slices::{Property, PropertyValue};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use zbus::connection::Builder;
use zbus::fdo;
use zbus::message::Type as MessageType;
use zbus::{Connection, MatchRule, Message, MessageStream, OwnedObjectPath, Variant};

use super::{SliceError, Slices};

/// systemd's bus name, its object, and the interface of its manager.
const SYSTEMD: &str = "org.freedesktop.systemd1";
const OBJECT: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
/// The interface that every object implements.
const PEER: &str = "org.freedesktop.DBus.Peer";
/// The error when a unit of this name exists already.
const EXISTS: &str = "org.freedesktop.systemd1.UnitExists";
/// The error when no unit of this name exists.
const NO_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
/// The timeout of a reply and of a job. A slice waits for nothing but systemd itself.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The job mode: a job replaces a queued one for the same unit.
const REPLACE: &str = "replace";

/// The name and value of a property in a message.
type Pair<'a> = (&'a str, Variant<'a>);

/// The connection to systemd, which is opened when needed, and again after it was lost.
#[derive(Debug)]
pub(crate) struct Systemd {
    socket: PathBuf,
    runtime: Handle,
    connection: Mutex<Option<Connection>>,
}

impl Systemd {
    /// The systemd on the bus with this socket. Calls run on the current tokio runtime, and block the calling thread, which must
    /// not be one of the runtime's.
    pub(crate) fn at(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), runtime: Handle::current(), connection: Mutex::default() }
    }

    /// The connection, within [`TIMEOUT`] even when several callers wait for it.
    async fn connection(&self) -> Result<Connection, CallError> {
        tokio::time::timeout(TIMEOUT, self.connect()).await.unwrap_or_else(|_| {
            Err(CallError::Unreachable("the bus does not answer the greeting".to_owned()))
        })
    }

    async fn connect(&self) -> Result<Connection, CallError> {
        let mut current = self.connection.lock().await;
        if let Some(connection) = current.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let lost = |error: std::io::Error| CallError::Unreachable(error.to_string());
        let stream = tokio::net::UnixStream::connect(&self.socket).await.map_err(lost)?;
        let stream = stream.into_std().map_err(lost)?;
        let connection = Builder::unix_stream(stream).method_timeout(TIMEOUT).build().await?;
        *current = Some(connection.clone());
        Ok(connection)
    }

    /// Calls a method of the manager.
    async fn call<B>(&self, method: &str, body: &B) -> Result<Message, CallError>
    where
        B: Serialize + zbus::DynamicType,
    {
        let connection = self.connection().await?;
        Ok(connection.call_method(Some(SYSTEMD), OBJECT, Some(MANAGER), method, body).await?)
    }

    /// Sets properties, and waits until systemd has written them to files.
    async fn set_properties(&self, unit: &str, properties: &[Property]) -> Result<(), CallError> {
        self.call("SetUnitProperties", &(unit, true, pairs(properties))).await?;
        self.wait_until_written().await
    }

    /// Waits until systemd has written earlier changes to files: it replies before that, but handles no other call until then.
    async fn wait_until_written(&self) -> Result<(), CallError> {
        let connection = self.connection().await?;
        connection.call_method(Some(SYSTEMD), OBJECT, Some(PEER), "Ping", &()).await?;
        Ok(())
    }

    /// Calls a method that starts a job, and waits for the end of the job.
    async fn job<B>(&self, method: &str, body: &B) -> Result<(), CallError>
    where
        B: Serialize + zbus::DynamicType,
    {
        let connection = self.connection().await?;
        let rule = MatchRule::builder().msg_type(MessageType::Signal).interface(MANAGER);
        let rule = rule.member("JobRemoved").build()?;
        // systemd signals the end of a job to its caller. Subscribe before the call: the job may end before the reply.
        let mut signals = MessageStream::for_match_rule(rule, &connection, None).await?;
        let mut call = std::pin::pin!(self.call(method, body));
        let mut ended = Vec::new();
        let reply = loop {
            // Cancel-safe: a signal that was not taken stays in the stream; the call is only polled.
            tokio::select! {
                reply = &mut call => break reply?,
                removed = next(&mut signals) => ended.push(removed?),
            }
        };
        let job: OwnedObjectPath = reply.body().deserialize()?;
        // Any client may send a signal of this name: only signals of the sender of the reply count.
        let systemd = sender(&reply);
        let is_ours = |removed: &JobRemoved| removed.job == job && removed.sender == systemd;
        let end = async {
            let mut removed = ended.into_iter().find(is_ours);
            loop {
                match removed.take() {
                    Some(removed) if is_ours(&removed) => return Ok::<_, CallError>(removed),
                    _ => removed = Some(next(&mut signals).await?),
                }
            }
        };
        let Ok(removed) = tokio::time::timeout(TIMEOUT, end).await else {
            return Err(CallError::TimedOut(format!("the job has not ended within {} s", TIMEOUT.as_secs())));
        };
        match removed?.result.as_str() {
            // A skipped job had nothing to do.
            "done" | "skipped" => Ok(()),
            other => Err(CallError::Refused(format!("the job has ended as {other:?}"))),
        }
    }

    async fn start_slice(&self, slice: &str, properties: &[Property]) -> Result<bool, CallError> {
        let none: Vec<(&str, Vec<Pair<'_>>)> = Vec::new();
        let made = self.job("StartTransientUnit", &(slice, REPLACE, pairs(properties), none)).await;
        let new = match made {
            Ok(()) => true,
            // The unit may exist without running.
            Err(CallError::Exists) => self.job("StartUnit", &(slice, REPLACE)).await.map(|()| false)?,
            Err(error) => return Err(error),
        };
        // The job ends before systemd has updated the controllers of parent and sibling cgroups.
        self.wait_until_written().await?;
        Ok(new)
    }

    /// Runs a call on the runtime.
    fn block_on<T>(
        &self,
        act: &'static str,
        unit: &str,
        calling: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, SliceError> {
        let unit = || unit.to_owned();
        let calling = async {
            let result = calling.await;
            if matches!(result, Err(CallError::TimedOut(_) | CallError::Unreachable(_))) {
                // The state of the connection is unknown: the next call opens a new one.
                self.connection.lock().await.take();
            }
            result
        };
        self.runtime.block_on(calling).map_err(|error| match error {
            CallError::NoSuchUnit => SliceError::Missing { unit: unit() },
            CallError::Exists => {
                SliceError::Refused { act, unit: unit(), why: "it exists already".to_owned() }
            }
            CallError::Refused(why) | CallError::TimedOut(why) => {
                SliceError::Refused { act, unit: unit(), why }
            }
            CallError::Unreachable(why) => {
                SliceError::Unreachable { why, socket: self.socket.display().to_string() }
            }
        })
    }
}

impl Slices for Systemd {
    fn start(&self, slice: &str, properties: &[Property]) -> Result<bool, SliceError> {
        self.block_on("start", slice, self.start_slice(slice, properties))
    }

    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), SliceError> {
        self.block_on("set properties of", unit, self.set_properties(unit, properties))
    }

    fn stop(&self, slice: &str) -> Result<(), SliceError> {
        match self.block_on("stop", slice, self.job("StopUnit", &(slice, REPLACE))) {
            Err(SliceError::Missing { .. }) => Ok(()),
            other => other,
        }
    }
}

/// Why a call has failed.
enum CallError {
    NoSuchUnit,
    Exists,
    Refused(String),
    /// The job has not ended in time.
    TimedOut(String),
    Unreachable(String),
}

impl From<zbus::Error> for CallError {
    fn from(error: zbus::Error) -> Self {
        match error {
            zbus::Error::MethodError(name, _, _) if name.as_str() == NO_UNIT => Self::NoSuchUnit,
            zbus::Error::MethodError(name, _, _) if name.as_str() == EXISTS => Self::Exists,
            zbus::Error::MethodError(name, why, _) => {
                Self::Refused(format!("{} ({name})", why.unwrap_or_default()))
            }
            zbus::Error::FDO(error) => match *error {
                // The bus answers, but systemd is not on it.
                fdo::Error::ServiceUnknown(_)
                | fdo::Error::NameHasNoOwner(_)
                | fdo::Error::NoReply(_)
                | fdo::Error::Disconnected(_)
                | fdo::Error::SpawnChildExited(_)
                | fdo::Error::SpawnServiceNotFound(_) => Self::Unreachable(error.to_string()),
                _ => Self::Refused(error.to_string()),
            },
            other => Self::Unreachable(other.to_string()),
        }
    }
}

/// The next signal about the end of a job.
///
/// Cancel-safe: signals that were not returned stay in the stream.
async fn next(signals: &mut MessageStream) -> Result<JobRemoved, CallError> {
    loop {
        let Some(signal) = signals.next().await else {
            return Err(CallError::Unreachable("the bus has closed the connection".to_owned()));
        };
        if let Some(removed) = JobRemoved::read(&signal?) {
            return Ok(removed);
        }
    }
}

/// The signal at the end of a job.
struct JobRemoved {
    sender: Option<String>,
    job: OwnedObjectPath,
    result: String,
}

impl JobRemoved {
    /// Parses the signal; none for other messages.
    fn read(signal: &Message) -> Option<Self> {
        let body = signal.body();
        let (_, job, _, result): (u32, OwnedObjectPath, String, String) = body.deserialize().ok()?;
        Some(Self { sender: sender(signal), job, result })
    }
}

/// The sender of a message, as set by the bus.
fn sender(message: &Message) -> Option<String> {
    message.header().sender().map(ToString::to_string)
}

fn pairs(properties: &[Property]) -> Vec<Pair<'_>> {
    properties.iter().map(|property| (property.name, variant(&property.value))).collect()
}

fn variant(value: &PropertyValue) -> Variant<'_> {
    match value {
        PropertyValue::Bool(value) => Variant::new(*value),
        PropertyValue::U64(value) => Variant::new(*value),
        PropertyValue::Text(text) => Variant::new(text.as_str()),
        PropertyValue::Texts(texts) => Variant::new(texts.clone()),
        PropertyValue::Bytes(bytes) => Variant::new(bytes.clone()),
    }
}

#[cfg(test)]
mod tests;
