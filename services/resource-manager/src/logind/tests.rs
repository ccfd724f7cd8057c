//! The client against a fake logind and systemd on a bus of the test's own.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::sync::{Arc, Mutex as Records};

use keelson_testkit::Component;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use zbus::OwnedVariant;

use super::*;

/// The longest that a test waits for an event.
const PATIENCE: Duration = Duration::from_secs(60);

async fn soon<T>(event: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, event).await.expect("the event happens")
}

/// A scratch folder with the socket of a bus and the configuration of logind.
struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// Settings that need a delay of 30 s.
    fn settings(&self) -> Settings {
        Settings {
            socket: self.dir.path().join("bus"),
            config_dir: self.dir.path().join("etc/logind.conf.d"),
            delay: Duration::from_secs(30),
            may_configure: true,
        }
    }

    fn config_file(&self) -> PathBuf {
        self.settings().config_dir.join(CONFIG_FILE)
    }

    /// A bus, until it is dropped. Every client may own every name on it.
    async fn start_bus(&self) -> Child {
        let socket = self.settings().socket;
        keelson_files::remove_if_exists(&socket).unwrap();
        let config = self.dir.path().join("bus.conf");
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

    async fn client(&self) -> Connection {
        connect(&self.settings().socket).await.unwrap()
    }
}

/// How a fake logind behaves.
#[derive(Clone)]
struct Behaviour {
    /// Its limit until it reads its configuration.
    limit_seconds: u64,
    /// The file that it reads on SIGHUP; none: it keeps its limit.
    config_file: Option<PathBuf>,
    /// A shutdown is being prepared: it refuses inhibitors.
    preparing: bool,
}

const PATIENT: Behaviour = Behaviour { limit_seconds: 30, config_file: None, preparing: false };

/// A fake logind, which is systemd at the same time. It records calls that change something.
struct FakeLogind {
    connection: Connection,
    calls: Arc<Records<Vec<String>>>,
    /// One end of a pipe per inhibitor; it reads the end of file when the inhibitor is released.
    inhibitors: mpsc::Receiver<pipe::Receiver>,
}

impl FakeLogind {
    async fn start(machine: &Machine, behaviour: Behaviour) -> Self {
        let connection = machine.client().await;
        let calls = Arc::<Records<Vec<String>>>::default();
        let (taken, inhibitors) = mpsc::channel(4);
        let requests = MessageStream::from(&connection);
        let server = Server { connection: connection.clone(), calls: Arc::clone(&calls), taken, behaviour };
        tokio::spawn(server.serve(requests));
        for name in [LOGIND, SYSTEMD] {
            connection.request_name(name).await.unwrap();
        }
        Self { connection, calls, inhibitors }
    }

    fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    async fn signal(&self, preparing: bool) {
        signal_from(&self.connection, preparing).await;
    }
}

async fn signal_from(connection: &Connection, preparing: bool) {
    let to = None::<zbus::names::BusName<'_>>;
    connection.emit_signal(to, OBJECT, MANAGER, "PrepareForShutdown", &preparing).await.unwrap();
}

struct Server {
    connection: Connection,
    calls: Arc<Records<Vec<String>>>,
    taken: mpsc::Sender<pipe::Receiver>,
    behaviour: Behaviour,
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
        match header.member().unwrap().as_str() {
            "Get" => {
                let (interface, name): (String, String) = message.body().deserialize().unwrap();
                assert_eq!((interface.as_str(), header.path().unwrap().as_str()), (MANAGER, OBJECT));
                let value = match name.as_str() {
                    "InhibitDelayMaxUSec" => Variant::new(self.behaviour.limit_seconds * 1_000_000),
                    "PreparingForShutdown" => Variant::new(self.behaviour.preparing),
                    other => panic!("unknown property {other}"),
                };
                let value: OwnedVariant = value.try_into_owned().unwrap();
                self.connection.reply(&header, &value).await.unwrap();
            }
            "Inhibit" => {
                let text: (String, String, String, String) = message.body().deserialize().unwrap();
                self.calls.lock().unwrap().push(format!("Inhibit {text:?}"));
                if self.behaviour.preparing {
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
                if let Some(file) = &self.behaviour.config_file {
                    let text = tokio::fs::read_to_string(file).await.unwrap();
                    let (_, seconds) = text.trim().rsplit_once('=').unwrap();
                    self.behaviour.limit_seconds = seconds.parse().unwrap();
                }
                self.connection.reply(&header, &()).await.unwrap();
            }
            other => panic!("unknown method {other}"),
        }
    }
}

const INHIBIT: &str =
    r#"Inhibit ("shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay")"#;

#[tokio::test]
async fn a_shutdown_is_delayed_until_the_inhibitor_is_dropped() {
    let machine = Machine::new();
    let _bus = machine.start_bus().await;
    let mut logind = FakeLogind::start(&machine, PATIENT).await;
    let session = Session::open(&machine.settings()).await.unwrap();
    assert_eq!(logind.calls(), [""; 0], "a sufficient limit is not changed");
    assert!(!machine.config_file().exists());
    assert!(!session.is_preparing().await.unwrap());
    let inhibitor = session.inhibit().await.unwrap();
    assert_eq!(logind.calls(), [INHIBIT]);
    let mut held = soon(logind.inhibitors.recv()).await.unwrap();
    let error = held.try_read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "it is held");
    drop(inhibitor);
    assert_eq!(soon(held.read(&mut [0])).await.unwrap(), 0, "it is released");
}

#[tokio::test]
async fn only_signals_of_logind_itself_count() {
    let machine = Machine::new();
    let _bus = machine.start_bus().await;
    let logind = FakeLogind::start(&machine, PATIENT).await;
    let mut session = Session::open(&machine.settings()).await.unwrap();
    let other = machine.client().await;
    signal_from(&other, false).await;
    // The reply of the bus comes after it has passed the signal on.
    other.call_method(Some(BUS), "/org/freedesktop/DBus", Some(BUS), "GetId", &()).await.unwrap();
    logind.signal(true).await;
    logind.signal(false).await;
    assert!(soon(session.next()).await.unwrap());
    assert!(!soon(session.next()).await.unwrap());
}

#[tokio::test]
async fn a_limit_that_is_too_low_is_raised_in_loginds_configuration() {
    let machine = Machine::new();
    let _bus = machine.start_bus().await;
    let behaviour = Behaviour { limit_seconds: 5, config_file: Some(machine.config_file()), ..PATIENT };
    let logind = FakeLogind::start(&machine, behaviour).await;
    Session::open(&machine.settings()).await.unwrap();
    assert_eq!(logind.calls(), [r#"KillUnit ("systemd-logind.service", "all", 1)"#]);
    let content = std::fs::read_to_string(machine.config_file()).unwrap();
    assert_eq!(content, "# Kubelet logind override\n[Login]\nInhibitDelayMaxSec=30\n");
    let mode = std::fs::metadata(machine.config_file()).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o644);
}

#[tokio::test]
async fn a_limit_that_stays_too_low_is_an_error_with_a_remedy() {
    let machine = Machine::new();
    let _bus = machine.start_bus().await;
    let logind = FakeLogind::start(&machine, Behaviour { limit_seconds: 5, ..PATIENT }).await;
    let not_the_host = Settings { may_configure: false, ..machine.settings() };
    for (settings, calls) in [(not_the_host, 0), (machine.settings(), 1)] {
        let error = Session::open(&settings).await.unwrap_err().to_string();
        assert!(error.starts_with("systemd-logind delays a shutdown by at most 5 s"), "{error}");
        assert!(
            error.contains("set InhibitDelayMaxSec=30 in a file below /etc/systemd/logind.conf.d"),
            "{error}"
        );
        assert_eq!(logind.calls().len(), calls, "{settings:?}");
        assert_eq!(machine.config_file().exists(), settings.may_configure);
    }
}

#[tokio::test]
async fn no_inhibitor_is_granted_while_a_shutdown_is_prepared() {
    let machine = Machine::new();
    let _bus = machine.start_bus().await;
    let _logind = FakeLogind::start(&machine, Behaviour { preparing: true, ..PATIENT }).await;
    let session = Session::open(&machine.settings()).await.unwrap();
    assert!(session.is_preparing().await.unwrap());
    let error = session.inhibit().await.unwrap_err().to_string();
    assert_eq!(
        error,
        "cannot delay a shutdown of the machine: already running (org.freedesktop.login1.OperationInProgress)"
    );
}

#[tokio::test]
async fn a_missing_bus_and_a_missing_logind_have_errors_of_their_own() {
    let machine = Machine::new();
    let error = Session::open(&machine.settings()).await.unwrap_err();
    assert!(matches!(&error, LogindError::Connect { socket, .. } if *socket == machine.settings().socket));
    let _bus = machine.start_bus().await;
    let error = Session::open(&machine.settings()).await.unwrap_err();
    assert!(matches!(error, LogindError::NotRunning { .. }), "{error:?}");
    assert!(error.to_string().ends_with("start systemd-logind.service"), "{error}");
}

#[tokio::test]
async fn a_session_ends_when_logind_leaves_and_when_the_bus_ends() {
    let machine = Machine::new();
    let mut bus = machine.start_bus().await;
    let logind = FakeLogind::start(&machine, PATIENT).await;
    let mut session = Session::open(&machine.settings()).await.unwrap();
    logind.connection.release_name(LOGIND).await.unwrap();
    let error = soon(session.next()).await.unwrap_err();
    assert!(matches!(error, LogindError::Left), "{error:?}");

    logind.connection.request_name(LOGIND).await.unwrap();
    let mut session = Session::open(&machine.settings()).await.unwrap();
    bus.kill().await.unwrap();
    let error = soon(session.next()).await.unwrap_err();
    assert!(matches!(error, LogindError::Closed | LogindError::Failed { .. }), "{error:?}");
}

#[tokio::test]
async fn logind_is_tried_again_until_it_answers() {
    let machine = Machine::new();
    let (report, mut errors) = mpsc::channel(64);
    let settings = machine.settings();
    let opening = tokio::spawn(async move {
        Session::open_with_retry(&settings, |error| {
            let _ = report.try_send(error.to_string());
        })
        .await
    });
    let error = soon(errors.recv()).await.unwrap();
    assert!(error.starts_with("cannot connect to the system's message bus at "), "{error}");
    let _bus = machine.start_bus().await;
    let logind = FakeLogind::start(&machine, PATIENT).await;
    let mut session = soon(opening).await.unwrap();
    logind.signal(true).await;
    assert!(soon(session.next()).await.unwrap());
}
