//! One call: its fault, its work and its line in the log.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tonic::{Code, Response, Status};

use crate::arguments::Arguments;
use crate::garbling::Garbage;

/// Time between two reads of the file of faults while a call hangs.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The driver. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Driver(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    arguments: Arguments,
    /// How often a fault was used, by method; with its text, so that a new fault counts anew.
    used: Mutex<HashMap<String, (String, u64)>>,
    log: Mutex<()>,
    /// Held while volumes change.
    volumes: tokio::sync::Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a call does instead of its work.
#[derive(Debug, Clone)]
enum Fault {
    Fail(Status),
    Hang,
    Garbage(Garbage),
    Lie,
    Exit(i32),
}

impl Driver {
    pub(super) fn new(arguments: Arguments) -> Self {
        Self(Arc::new(Inner {
            arguments,
            used: Mutex::default(),
            log: Mutex::default(),
            volumes: tokio::sync::Mutex::default(),
        }))
    }

    /// The fault of a method, if there is one.
    fn fault(&self, method: &str) -> Option<Fault> {
        let text = fs::read_to_string(self.0.arguments.faults.as_ref()?).ok()?;
        let faults: Value = serde_json::from_str(&text).ok()?;
        let fault = faults.get(method)?;
        if let Some(fail) = fault.get("fail") {
            let mut used = lock(&self.0.used);
            let (known, count) = used.entry(method.to_owned()).or_default();
            let text = fault.to_string();
            if *known != text {
                (*known, *count) = (text, 0);
            }
            *count += 1;
            if fail["times"].as_u64().is_some_and(|times| *count > times) {
                return None;
            }
            let code = fail["code"].as_i64().and_then(|code| i32::try_from(code).ok()).unwrap_or(2);
            let message = fail["message"].as_str().unwrap_or("made to fail");
            return Some(Fault::Fail(Status::new(Code::from_i32(code), message)));
        }
        if let Some(code) = fault["exit"].as_i64() {
            return Some(Fault::Exit(i32::try_from(code).unwrap_or(1)));
        }
        match fault["garbage"].as_str() {
            Some("large") => return Some(Fault::Garbage(Garbage::Large)),
            Some("broken") => return Some(Fault::Garbage(Garbage::Broken)),
            Some(_) => return Some(Fault::Garbage(Garbage::Empty)),
            None => {}
        }
        if fault["hang"] == true {
            return Some(Fault::Hang);
        }
        (fault["lie"] == true).then_some(Fault::Lie)
    }

    /// Does the work of a call, unless there is a fault, and writes it to the log.
    pub(super) async fn handle<A: Default>(
        &self,
        method: &'static str,
        request: Value,
        work: impl FnOnce(&Arguments) -> Result<A, Status>,
    ) -> Result<Response<A>, Status> {
        let mut fault = self.fault(method);
        if matches!(fault, Some(Fault::Hang)) {
            self.log(method, &request, "hang");
            while matches!(fault, Some(Fault::Hang)) {
                tokio::time::sleep(POLL_INTERVAL).await;
                fault = self.fault(method);
            }
        }
        match fault {
            Some(Fault::Fail(status)) => {
                self.log(method, &request, &format!("{:?}", status.code()));
                Err(status)
            }
            Some(Fault::Garbage(garbage)) => {
                self.log(method, &request, "garbage");
                let mut response = Response::new(A::default());
                response.extensions_mut().insert(garbage);
                Ok(response)
            }
            Some(Fault::Lie) => {
                self.log(method, &request, "lie");
                Ok(Response::new(A::default()))
            }
            Some(Fault::Exit(code)) => {
                self.log(method, &request, "exit");
                std::process::exit(code)
            }
            Some(Fault::Hang) | None => {
                let (result, took) = self.in_turn(method, work).await;
                let code = result.as_ref().map_or_else(Status::code, |_| Code::Ok);
                let name = if code == Code::Ok { "OK".to_owned() } else { format!("{code:?}") };
                self.write_line(method, &request, &name, Some(took));
                result.map(Response::new)
            }
        }
    }

    /// Does the work of a call when no other one is done, and returns how long it took.
    async fn in_turn<A>(
        &self,
        method: &str,
        work: impl FnOnce(&Arguments) -> Result<A, Status>,
    ) -> (Result<A, Status>, Duration) {
        let _volumes = self.0.volumes.lock().await;
        let begun = Instant::now();
        if method.ends_with("Volume") {
            tokio::time::sleep(self.0.arguments.call_time).await;
        }
        let result = work(&self.0.arguments);
        (result, begun.elapsed())
    }

    fn log(&self, method: &str, request: &Value, result: &str) {
        self.write_line(method, request, result, None);
    }

    fn write_line(&self, method: &str, request: &Value, result: &str, took: Option<Duration>) {
        let context = &request["volume_context"];
        let part = |key: &str| context[format!("csi.storage.k8s.io/pod.{key}")].as_str().unwrap_or_default();
        let pod = match (part("namespace"), part("name")) {
            ("", "") => Value::Null,
            (namespace, name) => json!(format!("{namespace}/{name}")),
        };
        let mut line = json!({"method": method, "request": request, "pod": pod, "result": result});
        if let Some(took) = took {
            line["micros"] = json!(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        }
        let _log = lock(&self.0.log);
        let file = self.0.arguments.state.join("calls.jsonl");
        let opened = OpenOptions::new().create(true).append(true).open(file);
        if let Ok(mut file) = opened {
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
    }
}
