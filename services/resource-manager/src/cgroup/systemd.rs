//! systemd over the system's message bus (org.freedesktop.systemd1(5)).
//!
//! Not over its own socket, `/run/systemd/private`: what comes from there bears a sender that D-Bus does not allow, and
//! the library refuses it.

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

/// Where the bus listens.
const SOCKET: &str = "/run/dbus/system_bus_socket";
/// systemd's name, its object, and the interface of its manager.
const SYSTEMD: &str = "org.freedesktop.systemd1";
const OBJECT: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
/// What every object answers to.
const PEER: &str = "org.freedesktop.DBus.Peer";
/// A unit of this name is there already.
const EXISTS: &str = "org.freedesktop.systemd1.UnitExists";
/// There is no unit of this name.
const NO_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
/// How long an answer, or a job, may take. A slice has nothing to wait for but systemd's own turn.
const WITHIN: Duration = Duration::from_secs(30);
/// A job takes the place of one for the same unit that still waits.
const REPLACE: &str = "replace";

/// The name and value of a property in a message.
type Pair<'a> = (&'a str, Variant<'a>);

/// The connection to systemd; it is made when it is needed, and anew when it was lost.
#[derive(Debug)]
pub(crate) struct Systemd {
    socket: PathBuf,
    runtime: Handle,
    connection: Mutex<Option<Connection>>,
}

impl Systemd {
    /// The machine's own, through its bus. Calls are carried out by the runtime that is current here, and block a thread
    /// that is none of the runtime's own.
    pub(crate) fn of_this_machine() -> Self {
        Self::at(Path::new(SOCKET))
    }

    fn at(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), runtime: Handle::current(), connection: Mutex::default() }
    }

    /// The connection, within [`WITHIN`] however many wait for one.
    async fn connection(&self) -> Result<Connection, Failure> {
        tokio::time::timeout(WITHIN, self.connect())
            .await
            .unwrap_or_else(|_| Err(Failure::Unreachable("the bus does not greet back".to_owned())))
    }

    async fn connect(&self) -> Result<Connection, Failure> {
        let mut held = self.connection.lock().await;
        if let Some(connection) = held.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let lost = |error: std::io::Error| Failure::Unreachable(error.to_string());
        let stream = tokio::net::UnixStream::connect(&self.socket).await.map_err(lost)?;
        let stream = stream.into_std().map_err(lost)?;
        let connection = Builder::unix_stream(stream).method_timeout(WITHIN).build().await?;
        *held = Some(connection.clone());
        Ok(connection)
    }

    /// One call of the manager.
    async fn call<B>(&self, method: &str, body: &B) -> Result<Message, Failure>
    where
        B: Serialize + zbus::DynamicType,
    {
        let connection = self.connection().await?;
        Ok(connection.call_method(Some(SYSTEMD), OBJECT, Some(MANAGER), method, body).await?)
    }

    /// Sets properties, and waits until systemd has written them into files.
    async fn set_properties(&self, unit: &str, properties: &[Property]) -> Result<(), Failure> {
        self.call("SetUnitProperties", &(unit, true, pairs(properties))).await?;
        self.written().await
    }

    /// Waits until systemd has written into files what it was told before: it answers before that, and takes no other call
    /// until it has.
    async fn written(&self) -> Result<(), Failure> {
        let connection = self.connection().await?;
        connection.call_method(Some(SYSTEMD), OBJECT, Some(PEER), "Ping", &()).await?;
        Ok(())
    }

    /// A call that begins a job, and the end of that job.
    async fn job<B>(&self, method: &str, body: &B) -> Result<(), Failure>
    where
        B: Serialize + zbus::DynamicType,
    {
        let connection = self.connection().await?;
        let rule = MatchRule::builder().msg_type(MessageType::Signal).interface(MANAGER);
        let rule = rule.member("JobRemoved").build()?;
        // systemd tells who has asked for a job of its end. Before the call: it may have ended when the answer comes.
        let mut signals = MessageStream::for_match_rule(rule, &connection, None).await?;
        let mut call = std::pin::pin!(self.call(method, body));
        let mut ended = Vec::new();
        let reply = loop {
            // Cancel-safe: a signal that was not taken stays in the stream; the call is only looked at.
            tokio::select! {
                reply = &mut call => break reply?,
                removed = next(&mut signals) => ended.push(removed?),
            }
        };
        let job: OwnedObjectPath = reply.body().deserialize()?;
        // Anybody may send a signal of this name: only the one who has answered is believed.
        let answered = sender(&reply);
        let is_ours = |removed: &JobRemoved| removed.job == job && removed.sender == answered;
        let end = async {
            let mut removed = ended.into_iter().find(is_ours);
            loop {
                match removed.take() {
                    Some(removed) if is_ours(&removed) => return Ok::<_, Failure>(removed),
                    _ => removed = Some(next(&mut signals).await?),
                }
            }
        };
        let Ok(removed) = tokio::time::timeout(WITHIN, end).await else {
            return Err(Failure::Late(format!("the job has not ended within {} s", WITHIN.as_secs())));
        };
        match removed?.result.as_str() {
            // What is skipped is as it should be already.
            "done" | "skipped" => Ok(()),
            other => Err(Failure::Refused(format!("the job has ended as {other:?}"))),
        }
    }

    async fn start_slice(&self, slice: &str, properties: &[Property]) -> Result<bool, Failure> {
        let none: Vec<(&str, Vec<Pair<'_>>)> = Vec::new();
        let made = self.job("StartTransientUnit", &(slice, REPLACE, pairs(properties), none)).await;
        let new = match made {
            Ok(()) => true,
            // It may be left over and not run.
            Err(Failure::Exists) => self.job("StartUnit", &(slice, REPLACE)).await.map(|()| false)?,
            Err(failure) => return Err(failure),
        };
        // The job is done before the controllers of what is above and beside are as systemd wants them.
        self.written().await?;
        Ok(new)
    }

    /// Carries a call out on the runtime.
    fn block_on<T>(
        &self,
        act: &'static str,
        unit: &str,
        calling: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, SliceError> {
        let unit = || unit.to_owned();
        let calling = async {
            let result = calling.await;
            if matches!(result, Err(Failure::Late(_) | Failure::Unreachable(_))) {
                // What the bus has made of it is not known: the next call begins anew.
                self.connection.lock().await.take();
            }
            result
        };
        self.runtime.block_on(calling).map_err(|failure| match failure {
            Failure::Missing => SliceError::Missing { unit: unit() },
            Failure::Exists => {
                SliceError::Refused { act, unit: unit(), why: "it is there already".to_owned() }
            }
            Failure::Refused(why) | Failure::Late(why) => SliceError::Refused { act, unit: unit(), why },
            Failure::Unreachable(why) => {
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

/// Why a call was not carried out.
enum Failure {
    Missing,
    Exists,
    Refused(String),
    /// There was no end of it in time.
    Late(String),
    Unreachable(String),
}

impl From<zbus::Error> for Failure {
    fn from(error: zbus::Error) -> Self {
        match error {
            zbus::Error::MethodError(name, _, _) if name.as_str() == NO_UNIT => Self::Missing,
            zbus::Error::MethodError(name, _, _) if name.as_str() == EXISTS => Self::Exists,
            zbus::Error::MethodError(name, why, _) => {
                Self::Refused(format!("{} ({name})", why.unwrap_or_default()))
            }
            zbus::Error::FDO(error) => match *error {
                // The bus is there and systemd is not on it.
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

/// The next job that has ended.
///
/// Cancel-safe: what was not returned is still in the stream.
async fn next(signals: &mut MessageStream) -> Result<JobRemoved, Failure> {
    loop {
        let Some(signal) = signals.next().await else {
            return Err(Failure::Unreachable("the bus has ended the connection".to_owned()));
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
    /// None for a message that is none.
    fn read(signal: &Message) -> Option<Self> {
        let body = signal.body();
        let (_, job, _, result): (u32, OwnedObjectPath, String, String) = body.deserialize().ok()?;
        Some(Self { sender: sender(signal), job, result })
    }
}

/// Who has sent a message, as the bus says.
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
mod tests {
    use std::sync::{Arc, Mutex as Records};

    use keelson_resource_manager_core::slices::{Property, PropertyValue};
    use tokio::net::UnixListener;
    use tokio::task::spawn_blocking;
    use zbus::{Guid, ObjectPath, OwnedVariant};

    use super::*;

    type Told = Arc<Records<Vec<String>>>;

    /// A systemd that has one unit, `old.slice`, and cannot start `bad.slice`. It writes down what it is asked for.
    struct World {
        _dir: tempfile::TempDir,
        systemd: Arc<Systemd>,
        told: Told,
    }

    impl World {
        fn start() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let socket = dir.path().join("private");
            let listener = UnixListener::bind(&socket).unwrap();
            let told = Told::default();
            tokio::spawn(serve(listener, Arc::clone(&told)));
            Self { systemd: Arc::new(Systemd::at(&socket)), _dir: dir, told }
        }

        async fn ask<T: Send + 'static>(&self, ask: impl FnOnce(&Systemd) -> T + Send + 'static) -> T {
            let systemd = Arc::clone(&self.systemd);
            spawn_blocking(move || ask(&systemd)).await.unwrap()
        }

        fn told(&self) -> Vec<String> {
            std::mem::take(&mut self.told.lock().unwrap())
        }
    }

    async fn serve(listener: UnixListener, told: Told) {
        loop {
            let stream = listener.accept().await.unwrap().0.into_std().unwrap();
            let builder = Builder::unix_stream(stream).server(Guid::generate()).p2p();
            let mut messages = builder.build_message_stream().await.unwrap();
            while let Some(Ok(message)) = messages.next().await {
                let connection = Connection::from(&messages);
                let header = message.header();
                let method = header.member().unwrap().to_string();
                if method == "Hello" {
                    connection.reply(&header, &":1.1").await.unwrap();
                    continue;
                }
                if matches!(method.as_str(), "AddMatch" | "RemoveMatch" | "Ping") {
                    if method == "Ping" {
                        told.lock().unwrap().push(method);
                    }
                    connection.reply(&header, &()).await.unwrap();
                    continue;
                }
                assert_eq!(header.destination().unwrap().as_str(), SYSTEMD);
                let body = message.body();
                let (unit, text) = if method == "StartTransientUnit" {
                    let (unit, mode, properties, _) = body
                        .deserialize::<(
                            String,
                            String,
                            Vec<(String, OwnedVariant)>,
                            Vec<(String, Vec<(String, OwnedVariant)>)>,
                        )>()
                        .unwrap();
                    (unit, format!("{mode} {properties:?}"))
                } else if method == "SetUnitProperties" {
                    let (unit, until_boot, properties) =
                        body.deserialize::<(String, bool, Vec<(String, OwnedVariant)>)>().unwrap();
                    (unit, format!("{until_boot} {properties:?}"))
                } else {
                    body.deserialize::<(String, String)>().unwrap()
                };
                told.lock().unwrap().push(format!("{method} {unit} {text}"));
                let error = match (method.as_str(), unit.as_str()) {
                    ("StartTransientUnit", "old.slice") => Some(EXISTS),
                    ("StopUnit" | "SetUnitProperties", "gone.slice") => Some(NO_UNIT),
                    ("StartTransientUnit", "a b.slice") => Some("org.freedesktop.DBus.Error.InvalidArgs"),
                    ("StartTransientUnit", "busy.slice") => Some("org.freedesktop.systemd1.Shutting"),
                    ("StartTransientUnit", "restart.slice") => break,
                    ("StartTransientUnit", "nobody.slice") => {
                        Some("org.freedesktop.DBus.Error.ServiceUnknown")
                    }
                    _ => None,
                };
                if let Some(name) = error {
                    connection.reply_error(&header, name, &"not so").await.unwrap();
                    continue;
                }
                if method == "SetUnitProperties" {
                    connection.reply(&header, &()).await.unwrap();
                    continue;
                }
                let removed = |job: &str, result: &str| {
                    let job = ObjectPath::try_from(job.to_owned()).unwrap();
                    Message::signal(OBJECT, MANAGER, "JobRemoved")
                        .build(&(7u32, job, unit.clone(), result.to_owned()))
                        .unwrap()
                };
                let result = if unit == "bad.slice" { "failed" } else { "done" };
                let answer = ObjectPath::try_from("/job/7").unwrap();
                // Somebody else's job, somebody else's word on ours, and ours: before its answer for one unit, after it for
                // the others.
                connection.send(&removed("/job/6", "failed")).await.unwrap();
                let forged = removed("/job/7", "failed");
                connection.send(&forged.with_sender(&":1.66".try_into().unwrap()).unwrap()).await.unwrap();
                if unit == "quick.slice" {
                    connection.send(&removed("/job/7", result)).await.unwrap();
                    connection.reply(&header, &answer).await.unwrap();
                } else {
                    connection.reply(&header, &answer).await.unwrap();
                    connection.send(&removed("/job/7", result)).await.unwrap();
                }
            }
        }
    }

    fn properties() -> Vec<Property> {
        vec![
            Property { name: "TasksMax", value: PropertyValue::U64(5) },
            Property { name: "DefaultDependencies", value: PropertyValue::Bool(false) },
            Property { name: "Wants", value: PropertyValue::Texts(vec!["kubepods.slice".into()]) },
            Property { name: "AllowedCPUs", value: PropertyValue::Bytes(vec![3]) },
            Property { name: "Description", value: PropertyValue::Text("pods".into()) },
        ]
    }

    #[tokio::test]
    async fn a_slice_is_started_with_its_properties_when_its_job_is_done() {
        let world = World::start();
        for name in ["new.slice", "quick.slice"] {
            assert!(world.ask(move |systemd| systemd.start(name, &properties())).await.unwrap(), "{name}");
            let told = world.told();
            assert_eq!((told.len(), told[1].as_str()), (2, "Ping"), "until it is written: {told:?}");
            let begin = format!("StartTransientUnit {name} replace ");
            assert!(told[0].starts_with(&begin), "{told:?}");
            for part in ["U64(5)", "Bool(false)", "kubepods.slice", "AllowedCPUs", "pods"] {
                assert!(told[0].contains(part), "{part}: {told:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_slice_that_is_there_is_started_as_it_is_and_told_its_properties() {
        let world = World::start();
        assert!(!world.ask(|systemd| systemd.start("old.slice", &properties())).await.unwrap());
        assert_eq!(world.told()[1..], ["StartUnit old.slice replace", "Ping"]);
        world.ask(|systemd| systemd.set("old.slice", &properties()[..1])).await.unwrap();
        let told = world.told();
        assert!(
            told[0].starts_with("SetUnitProperties old.slice true ") && told[0].contains("U64(5)"),
            "{told:?}"
        );
    }

    #[tokio::test]
    async fn a_slice_that_is_gone_is_stopped_already_and_cannot_be_told_anything() {
        let world = World::start();
        for name in ["old.slice", "gone.slice"] {
            world.ask(move |systemd| systemd.stop(name)).await.unwrap();
        }
        assert_eq!(world.told(), ["StopUnit old.slice replace", "StopUnit gone.slice replace"]);
        let error = world.ask(|systemd| systemd.set("gone.slice", &[])).await.unwrap_err();
        assert_eq!(error.to_string(), "systemd has no unit gone.slice");
    }

    #[tokio::test]
    async fn a_failure_is_told_with_the_unit_and_systemds_own_words() {
        let world = World::start();
        for (name, text) in [
            ("bad.slice", "cannot start bad.slice: the job has ended as \"failed\""),
            ("busy.slice", "cannot start busy.slice: not so (org.freedesktop.systemd1.Shutting)"),
            ("a b.slice", "not so"),
        ] {
            let error = world.ask(move |systemd| systemd.start(name, &[])).await.unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[tokio::test]
    async fn a_lost_connection_is_an_error_once_and_made_anew() {
        let world = World::start();
        for name in ["restart.slice", "nobody.slice"] {
            let error = world.ask(move |systemd| systemd.start(name, &[])).await.unwrap_err();
            assert!(matches!(error, SliceError::Unreachable { .. }), "{name}: {error}");
        }
        assert!(world.ask(|systemd| systemd.start("new.slice", &[])).await.unwrap());
        let absent = Arc::new(Systemd::at(Path::new("/absent/private")));
        let error = spawn_blocking(move || absent.stop("x.slice")).await.unwrap().unwrap_err().to_string();
        assert!(error.contains("/absent/private") && error.contains("cgroupDriver"), "{error}");
    }
}
