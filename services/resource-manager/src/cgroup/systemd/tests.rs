//! The client against a fake systemd on a socket.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex as Records};

use keelson_resource_manager_core::slices::{Property, PropertyValue};
use tokio::net::UnixListener;
use tokio::task::spawn_blocking;
use zbus::{Guid, ObjectPath, OwnedVariant};

use super::*;

type Requests = Arc<Records<Vec<String>>>;

/// A fake systemd that has one unit, `old.slice`, and cannot start `bad.slice`. It records requests.
struct FakeSystemd {
    _dir: tempfile::TempDir,
    systemd: Arc<Systemd>,
    requests: Requests,
}

impl FakeSystemd {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("private");
        let listener = UnixListener::bind(&socket).unwrap();
        let requests = Requests::default();
        tokio::spawn(serve(listener, Arc::clone(&requests)));
        Self { systemd: Arc::new(Systemd::at(&socket)), _dir: dir, requests }
    }

    async fn call<T: Send + 'static>(&self, call: impl FnOnce(&Systemd) -> T + Send + 'static) -> T {
        let systemd = Arc::clone(&self.systemd);
        spawn_blocking(move || call(&systemd)).await.unwrap()
    }

    fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

async fn serve(listener: UnixListener, requests: Requests) {
    loop {
        let stream = listener.accept().await.unwrap().0.into_std().unwrap();
        let builder = Builder::unix_stream(stream).server(Guid::generate()).p2p();
        let mut messages = builder.build_message_stream().await.unwrap();
        while let Some(Ok(message)) = messages.next().await {
            let connection = Connection::from(&messages);
            let header = message.header();
            let method = header.member().unwrap().to_string();
            match method.as_str() {
                "Hello" => {
                    connection.reply(&header, &":1.1").await.unwrap();
                }
                "AddMatch" | "RemoveMatch" => {
                    connection.reply(&header, &()).await.unwrap();
                }
                "Ping" => {
                    requests.lock().unwrap().push(method);
                    connection.reply(&header, &()).await.unwrap();
                }
                _ => {
                    assert_eq!(header.destination().unwrap().as_str(), SYSTEMD);
                    let (unit, text) = unit_request(&method, &message);
                    requests.lock().unwrap().push(format!("{method} {unit} {text}"));
                    if answer(&connection, &message, &method, &unit).await.is_break() {
                        break;
                    }
                }
            }
        }
    }
}

/// The unit that a request names, and the rest of the request as text.
fn unit_request(method: &str, message: &Message) -> (String, String) {
    type Pairs = Vec<(String, OwnedVariant)>;
    let body = message.body();
    match method {
        "StartTransientUnit" => {
            let (unit, mode, properties, _) =
                body.deserialize::<(String, String, Pairs, Vec<(String, Pairs)>)>().unwrap();
            (unit, format!("{mode} {properties:?}"))
        }
        "SetUnitProperties" => {
            let (unit, until_boot, properties) = body.deserialize::<(String, bool, Pairs)>().unwrap();
            (unit, format!("{until_boot} {properties:?}"))
        }
        _ => body.deserialize().unwrap(),
    }
}

/// Answers a request about a unit. Break: the connection ends instead, as when systemd restarts.
async fn answer(connection: &Connection, message: &Message, method: &str, unit: &str) -> ControlFlow<()> {
    let header = message.header();
    let error = match (method, unit) {
        ("StartTransientUnit", "old.slice") => Some(EXISTS),
        ("StopUnit" | "SetUnitProperties", "gone.slice") => Some(NO_UNIT),
        ("StartTransientUnit", "a b.slice") => Some("org.freedesktop.DBus.Error.InvalidArgs"),
        ("StartTransientUnit", "busy.slice") => Some("org.freedesktop.systemd1.Shutting"),
        ("StartTransientUnit", "restart.slice") => return ControlFlow::Break(()),
        ("StartTransientUnit", "nobody.slice") => Some("org.freedesktop.DBus.Error.ServiceUnknown"),
        _ => None,
    };
    if let Some(name) = error {
        connection.reply_error(&header, name, &"not so").await.unwrap();
    } else if method == "SetUnitProperties" {
        connection.reply(&header, &()).await.unwrap();
    } else {
        run_job(connection, message, unit).await;
    }
    ControlFlow::Continue(())
}

/// Sends the signals of the job of a request and its reply: another job, a forged signal about this job, and the real
/// one, which comes before the reply for `quick.slice` and after it for the others.
async fn run_job(connection: &Connection, message: &Message, unit: &str) {
    let header = message.header();
    let removed = |job: &str, result: &str| {
        let job = ObjectPath::try_from(job.to_owned()).unwrap();
        Message::signal(OBJECT, MANAGER, "JobRemoved")
            .build(&(7u32, job, unit.to_owned(), result.to_owned()))
            .unwrap()
    };
    let result = if unit == "bad.slice" { "failed" } else { "done" };
    let answer = ObjectPath::try_from("/job/7").unwrap();
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
async fn starting_a_slice_sets_its_properties_and_waits_for_the_job() {
    let fake = FakeSystemd::start();
    for name in ["new.slice", "quick.slice"] {
        assert!(fake.call(move |systemd| systemd.start(name, &properties())).await.unwrap(), "{name}");
        let requests = fake.take_requests();
        assert_eq!((requests.len(), requests[1].as_str()), (2, "Ping"), "until it is written: {requests:?}");
        let begin = format!("StartTransientUnit {name} replace ");
        assert!(requests[0].starts_with(&begin), "{requests:?}");
        for part in ["U64(5)", "Bool(false)", "kubepods.slice", "AllowedCPUs", "pods"] {
            assert!(requests[0].contains(part), "{part}: {requests:?}");
        }
    }
}

#[tokio::test]
async fn an_existing_slice_is_started_and_gets_its_properties() {
    let fake = FakeSystemd::start();
    assert!(!fake.call(|systemd| systemd.start("old.slice", &properties())).await.unwrap());
    assert_eq!(fake.take_requests()[1..], ["StartUnit old.slice replace", "Ping"]);
    fake.call(|systemd| systemd.set("old.slice", &properties()[..1])).await.unwrap();
    let requests = fake.take_requests();
    assert!(
        requests[0].starts_with("SetUnitProperties old.slice true ") && requests[0].contains("U64(5)"),
        "{requests:?}"
    );
}

#[tokio::test]
async fn stopping_a_missing_slice_succeeds_and_setting_its_properties_fails() {
    let fake = FakeSystemd::start();
    for name in ["old.slice", "gone.slice"] {
        fake.call(move |systemd| systemd.stop(name)).await.unwrap();
    }
    assert_eq!(fake.take_requests(), ["StopUnit old.slice replace", "StopUnit gone.slice replace"]);
    let error = fake.call(|systemd| systemd.set("gone.slice", &[])).await.unwrap_err();
    assert_eq!(error.to_string(), "systemd has no unit gone.slice");
}

#[tokio::test]
async fn systemd_errors_name_the_unit_and_quote_systemd() {
    let fake = FakeSystemd::start();
    for (name, text) in [
        ("bad.slice", "cannot start bad.slice: the job has ended as \"failed\""),
        ("busy.slice", "cannot start busy.slice: not so (org.freedesktop.systemd1.Shutting)"),
        ("a b.slice", "not so"),
    ] {
        let error = fake.call(move |systemd| systemd.start(name, &[])).await.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[tokio::test]
async fn a_lost_systemd_connection_fails_one_call_and_is_reestablished() {
    let fake = FakeSystemd::start();
    for name in ["restart.slice", "nobody.slice"] {
        let error = fake.call(move |systemd| systemd.start(name, &[])).await.unwrap_err();
        assert!(matches!(error, SliceError::Unreachable { .. }), "{name}: {error}");
    }
    assert!(fake.call(|systemd| systemd.start("new.slice", &[])).await.unwrap());
    let absent = Arc::new(Systemd::at(Path::new("/absent/private")));
    let error = spawn_blocking(move || absent.stop("x.slice")).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("/absent/private") && error.contains("cgroupDriver"), "{error}");
}
