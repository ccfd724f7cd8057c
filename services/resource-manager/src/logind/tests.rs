//! The client against a fake logind and systemd on a bus of the test's own.

use std::os::unix::fs::PermissionsExt as _;

use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;

use keelson_testkit::logind::{Behaviour, FakeLogind, LOGIND, PATIENT, signal_from, soon};

use super::*;

/// A machine in a folder that is removed with it.
pub(crate) struct TestMachine {
    machine: Machine,
    _dir: tempfile::TempDir,
}

impl std::ops::Deref for TestMachine {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        &self.machine
    }
}

impl TestMachine {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { machine: Machine::new(dir.path()), _dir: dir }
    }

    /// Settings that need a delay of 30 s.
    fn settings(&self) -> Settings {
        Settings::for_test(self, Duration::from_secs(30))
    }

    fn config_file(&self) -> PathBuf {
        self.settings().config_dir.join(CONFIG_FILE)
    }
}

const INHIBIT: &str =
    r#"Inhibit ("shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay")"#;

#[tokio::test]
async fn a_shutdown_is_delayed_until_the_inhibitor_is_dropped() {
    let machine = TestMachine::new();
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
    let machine = TestMachine::new();
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
    let machine = TestMachine::new();
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
    let machine = TestMachine::new();
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
async fn a_configuration_that_cannot_be_written_is_an_error_with_a_remedy() {
    let machine = TestMachine::new();
    let _bus = machine.start_bus().await;
    let _logind = FakeLogind::start(&machine, Behaviour { limit_seconds: 5, ..PATIENT }).await;
    std::fs::write(machine.dir().join("etc"), "no folder").unwrap();
    let error = Session::open(&machine.settings()).await.unwrap_err().to_string();
    assert!(error.starts_with("cannot raise the limit of systemd-logind"), "{error}");
    assert!(
        error.contains("set InhibitDelayMaxSec=30 in a file below /etc/systemd/logind.conf.d"),
        "{error}"
    );
}

#[tokio::test]
async fn no_inhibitor_is_granted_while_a_shutdown_is_prepared() {
    let machine = TestMachine::new();
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
    let machine = TestMachine::new();
    let error = Session::open(&machine.settings()).await.unwrap_err();
    assert!(matches!(&error, LogindError::Connect { socket, .. } if *socket == machine.settings().socket));
    let _bus = machine.start_bus().await;
    let error = Session::open(&machine.settings()).await.unwrap_err();
    assert!(matches!(error, LogindError::NotRunning { .. }), "{error:?}");
    assert!(error.to_string().ends_with("start systemd-logind.service"), "{error}");
}

#[tokio::test]
async fn a_session_ends_when_logind_leaves_and_when_the_bus_ends() {
    let machine = TestMachine::new();
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
    let machine = TestMachine::new();
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
