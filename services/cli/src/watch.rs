//! Following what a service tells, through its restarts, and showing each change once.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_service_kit::{CancellationToken, Progress, Signal};
use serde_json::json;
use tonic::{Response, Status, Streaming};

use crate::agent::Agent;
use crate::args::{Format, WatchArgs};
use crate::error::Failure;
use crate::output;
use crate::seen::{Change, Row};
use crate::table::GrowingTable;

/// How often those are asked who cannot be watched.
pub(crate) const POLL: Duration = Duration::from_secs(1);

/// The text in place of the state of what is no more.
const DELETED: &str = "Deleted";

/// Tells the person, once each, which services have gone and come back.
#[derive(Debug, Default)]
pub(crate) struct Absences(BTreeSet<ServiceName>);

impl Absences {
    /// The service cannot be reached now.
    pub(crate) fn lost(&mut self, service: ServiceName, why: impl FnOnce() -> Failure) {
        if self.0.insert(service) {
            output::notice(&format!("{}; waiting for {service} to come back", why()));
        }
    }

    /// The service answers.
    pub(crate) fn back(&mut self, service: ServiceName) {
        if self.0.remove(&service) {
            output::notice(&format!("{service} is back"));
        }
    }
}

/// Whether waiting may help.
fn may_come_back(failure: &Failure) -> bool {
    matches!(failure, Failure::NotRunning { .. } | Failure::ServiceAway { .. } | Failure::Silent { .. })
}

/// Reads a `Watch…` RPC until something fails that waiting does not mend. The first stream must come about; a later
/// one is waited for.
///
/// # Errors
/// Always: why it ended.
pub(crate) async fn stream<T, Open, Call>(
    agent: &Agent,
    service: ServiceName,
    open: Open,
    mut on: impl FnMut(Signal<T>) -> Result<(), Failure>,
) -> Failure
where
    Open: FnMut() -> Call,
    Call: Future<Output = Result<Response<Streaming<T>>, Status>>,
{
    let stop = CancellationToken::new();
    let (mut absences, mut opened) = (Absences::default(), false);
    let mut end: Option<Failure> = None;
    let react = async |signal: Signal<T>| {
        if end.is_some() {
            return;
        }
        let outcome = match signal {
            Signal::Lost(status) => {
                let failure = agent.failure(service, status);
                // A service that ends its stream with another word than UNAVAILABLE may still do better next time.
                if !opened || matches!(failure, Failure::Forbidden { .. } | Failure::Refused { .. }) {
                    Err(failure)
                } else {
                    absences.lost(service, || failure);
                    Ok(())
                }
            }
            Signal::Opened => {
                opened = true;
                on(Signal::Opened)
            }
            Signal::Message(message) => {
                absences.back(service);
                on(Signal::Message(message))
            }
        };
        if let Err(failure) = outcome {
            end = Some(failure);
            stop.cancel();
        }
    };
    keelson_service_kit::follow(service.as_str(), &Progress::default(), &stop, open, react).await;
    end.unwrap_or(Failure::BrokenPipe)
}

/// Asks again and again. The first answer must come; a later one is waited for.
///
/// # Errors
/// Always: why it ended.
pub(crate) async fn poll<T>(
    service: ServiceName,
    mut ask: impl AsyncFnMut() -> Result<T, Failure>,
    mut on: impl FnMut(T) -> Result<(), Failure>,
) -> Result<Infallible, Failure> {
    let (mut absences, mut answered) = (Absences::default(), false);
    loop {
        match ask().await {
            Ok(answer) => {
                answered = true;
                absences.back(service);
                on(answer)?;
            }
            Err(failure) if answered && may_come_back(&failure) => absences.lost(service, || failure),
            Err(failure) => return Err(failure),
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Prints rows as they change: a table that grows, a line of JSON each, or YAML documents.
#[derive(Debug)]
pub(crate) struct Printer {
    format: Option<Format>,
    events: bool,
    table: GrowingTable,
    /// The column that says `Deleted`.
    state: usize,
    /// Changes that wait for the end of a replay, so that its rows are laid out together.
    held: Vec<(Change, Row)>,
    holds: bool,
}

impl Printer {
    /// A printer of a table with these columns, of which one is the state.
    pub(crate) fn new(format: Option<Format>, args: WatchArgs, mut header: Vec<String>, state: &str) -> Self {
        let column = header.iter().position(|name| name == state).unwrap_or(0);
        if args.output_watch_events {
            header.insert(0, "EVENT".into());
        }
        Self {
            format,
            events: args.output_watch_events,
            table: GrowingTable::new(header),
            state: column,
            held: Vec::new(),
            holds: false,
        }
    }

    /// Keeps rows back until [`release`](Self::release).
    pub(crate) fn hold(&mut self) {
        self.holds = true;
    }

    /// Prints what was kept back.
    pub(crate) fn release(&mut self) -> Result<(), Failure> {
        self.holds = false;
        let held = std::mem::take(&mut self.held);
        self.print(held)
    }

    /// Shows a change.
    pub(crate) fn show(&mut self, change: Change, row: Row) -> Result<(), Failure> {
        if self.holds {
            self.held.push((change, row));
            return Ok(());
        }
        self.print(vec![(change, row)])
    }

    fn print(&mut self, rows: Vec<(Change, Row)>) -> Result<(), Failure> {
        if rows.is_empty() {
            return Ok(());
        }
        let text = if output::is_document(self.format) { self.documents(rows)? } else { self.rows(rows) };
        output::print(&text)
    }

    fn documents(&self, rows: Vec<(Change, Row)>) -> Result<String, Failure> {
        let mut text = String::new();
        for (change, row) in rows {
            let document = if self.events {
                json!({"type": change.as_str(), "object": row.document})
            } else {
                row.document
            };
            if self.format == Some(Format::Yaml) {
                text.push_str("---\n");
                text.push_str(&output::yaml(&document)?);
            } else {
                text.push_str(&output::json_line(&document)?);
            }
        }
        Ok(text)
    }

    fn rows(&mut self, rows: Vec<(Change, Row)>) -> String {
        let state = self.state;
        let cells = |(change, mut row): (Change, Row)| {
            if let Some(cell) = row.cells.get_mut(state).filter(|_| change == Change::Deleted) {
                DELETED.clone_into(cell);
            }
            if self.events {
                row.cells.insert(0, change.as_str().to_owned());
            }
            row.cells
        };
        let rows: Vec<Vec<String>> = rows.into_iter().map(cells).collect();
        self.table.more(&rows)
    }
}
