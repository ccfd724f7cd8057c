//! A fake systemd-logind, which is systemd at the same time, on a message bus of the test's own (Debian's dbus).
//!
//! Its calls panic where a test cannot continue: the bus does not start, or a message is not as documented.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use zbus::connection::Builder;
use zbus::message::Type as MessageType;
use zbus::{Connection, Fd, Message, MessageStream, OwnedVariant, Variant};

use crate::Component;

/// logind's name on the bus.
pub const LOGIND: &str = "org.freedesktop.login1";
const OBJECT: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
const SYSTEMD: &str = "org.freedesktop.systemd1";
/// How long a test waits for an event.
const PATIENCE: Duration = Duration::from_secs(60);

/// The output of a future that completes soon.
///
/// # Panics
/// It does not complete within a minute.
pub async fn soon<T>(event: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, event).await.expect("the event happens")
}

/// A folder with the socket of a bus.
#[derive(Debug)]
pub struct Machine {
    dir: PathBuf,
}

impl Machine {
    /// A machine in this folder, which exists.
    ///
    /// # Panics
    /// Nothing can be created there.
    pub fn new(dir: &Path) -> Self {
        std::fs::create_dir(dir.join("dbus")).unwrap();
        Self { dir: dir.to_owned() }
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The socket of the bus.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("dbus/system_bus_socket")
    }

    /// A bus, until it is dropped. Every client may own every name on it.
    ///
    /// # Panics
    /// dbus-daemon is missing or does not start.
    pub async fn start_bus(&self) -> Child {
        let socket = self.socket();
        // That of an earlier bus.
        let _ = std::fs::remove_file(&socket);
        let config = self.dir.join("bus.conf");
        let text = format!(
            "<busconfig><listen>unix:path={}</listen><auth>EXTERNAL</auth><policy context=\"default\">\
             <allow send_destination=\"*\"/><allow receive_sender=\"*\"/><allow own=\"*\"/></policy></busconfig>",
            socket.display()
        );
        std::fs::write(&config, text).unwrap();
        let program = Component::Dbus.find().unwrap_or_else(|error| panic!("{error:#}"));
        let mut command = Command::new(program);
        command.arg(format!("--config-file={}", config.display()));
        command.args(["--nofork", "--nopidfile", "--print-address=1"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut bus = command.spawn().unwrap();
        // It prints the address once it listens.
        let mut lines = BufReader::new(bus.stdout.take().unwrap()).lines();
        let address = soon(lines.next_line()).await.unwrap().expect("dbus-daemon prints its address");
        assert!(address.starts_with("unix:path="), "{address}");
        bus
    }

    /// A client of the bus.
    ///
    /// # Panics
    /// The bus does not accept it.
    pub async fn client(&self) -> Connection {
        let stream = tokio::net::UnixStream::connect(self.socket()).await.unwrap();
        Builder::unix_stream(stream.into_std().unwrap()).build().await.unwrap()
    }
}

/// How a fake logind behaves.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// Its limit until it reads its configuration.
    pub limit_seconds: u64,
    /// The file that it reads on SIGHUP; none: it keeps its limit.
    pub config_file: Option<PathBuf>,
    /// A shutdown is being prepared: it refuses inhibitors.
    pub preparing: bool,
}

/// A logind that grants inhibitors of up to 30 s.
pub const PATIENT: Behaviour = Behaviour { limit_seconds: 30, config_file: None, preparing: false };

/// A fake logind, which is systemd at the same time. It records calls that change something.
#[derive(Debug)]
pub struct FakeLogind {
    /// Its connection to the bus.
    pub connection: Connection,
    behaviour: Arc<Mutex<Behaviour>>,
    calls: Arc<Mutex<Vec<String>>>,
    /// One end of a pipe per inhibitor; it reads the end of file when the inhibitor is released.
    pub inhibitors: mpsc::Receiver<pipe::Receiver>,
}

impl FakeLogind {
    /// Takes the names of logind and systemd on the bus.
    ///
    /// # Panics
    /// The bus does not give it the names.
    pub async fn start(machine: &Machine, behaviour: Behaviour) -> Self {
        let connection = machine.client().await;
        let calls = Arc::<Mutex<Vec<String>>>::default();
        let (taken, inhibitors) = mpsc::channel(16);
        let requests = MessageStream::from(&connection);
        let behaviour = Arc::new(Mutex::new(behaviour));
        let server = Server {
            connection: connection.clone(),
            calls: Arc::clone(&calls),
            taken,
            behaviour: Arc::clone(&behaviour),
        };
        tokio::spawn(server.serve(requests));
        for name in [LOGIND, SYSTEMD] {
            connection.request_name(name).await.unwrap();
        }
        Self { connection, behaviour, calls, inhibitors }
    }

    /// The calls that change something, in their order: the method and its arguments.
    pub fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    /// Signals that a shutdown is prepared, or that it was cancelled.
    ///
    /// # Panics
    /// The bus does not take the signal.
    pub async fn signal(&self, preparing: bool) {
        self.behaviour.lock().unwrap().preparing = preparing;
        signal_from(&self.connection, preparing).await;
    }
}

/// The signal of [`FakeLogind::signal`], from any client.
///
/// # Panics
/// The bus does not take the signal.
pub async fn signal_from(connection: &Connection, preparing: bool) {
    let to = None::<zbus::names::BusName<'_>>;
    connection.emit_signal(to, OBJECT, MANAGER, "PrepareForShutdown", &preparing).await.unwrap();
}

struct Server {
    connection: Connection,
    calls: Arc<Mutex<Vec<String>>>,
    taken: mpsc::Sender<pipe::Receiver>,
    behaviour: Arc<Mutex<Behaviour>>,
}

impl Server {
    async fn serve(mut self, mut requests: MessageStream) {
        while let Some(Ok(message)) = requests.next().await {
            if message.message_type() == MessageType::MethodCall {
                self.answer(&message).await;
            }
        }
    }

    async fn answer(&mut self, message: &Message) {
        let header = message.header();
        let behaviour = self.behaviour.lock().unwrap().clone();
        match header.member().unwrap().as_str() {
            "Get" => {
                let (interface, name): (String, String) = message.body().deserialize().unwrap();
                assert_eq!((interface.as_str(), header.path().unwrap().as_str()), (MANAGER, OBJECT));
                let value = match name.as_str() {
                    "InhibitDelayMaxUSec" => Variant::new(behaviour.limit_seconds * 1_000_000),
                    "PreparingForShutdown" => Variant::new(behaviour.preparing),
                    other => panic!("unknown property {other}"),
                };
                let value: OwnedVariant = value.try_into_owned().unwrap();
                self.connection.reply(&header, &value).await.unwrap();
            }
            "Inhibit" => {
                let text: (String, String, String, String) = message.body().deserialize().unwrap();
                self.calls.lock().unwrap().push(format!("Inhibit {text:?}"));
                if behaviour.preparing {
                    let name = "org.freedesktop.login1.OperationInProgress";
                    self.connection.reply_error(&header, name, &"already running").await.unwrap();
                    return;
                }
                let (reader, writer) = std::io::pipe().unwrap();
                let writer = Fd::from(OwnedFd::from(writer));
                self.connection.reply(&header, &writer).await.unwrap();
                drop(writer);
                let reader = pipe::Receiver::from_owned_fd(OwnedFd::from(reader)).unwrap();
                self.taken.send(reader).await.unwrap();
            }
            "KillUnit" => {
                let text: (String, String, i32) = message.body().deserialize().unwrap();
                assert_eq!(header.destination().unwrap().as_str(), SYSTEMD);
                self.calls.lock().unwrap().push(format!("KillUnit {text:?}"));
                if let Some(file) = &behaviour.config_file {
                    let text = tokio::fs::read_to_string(file).await.unwrap();
                    let (_, seconds) = text.trim().rsplit_once('=').unwrap();
                    self.behaviour.lock().unwrap().limit_seconds = seconds.parse().unwrap();
                }
                self.connection.reply(&header, &()).await.unwrap();
            }
            other => panic!("unknown method {other}"),
        }
    }
}
