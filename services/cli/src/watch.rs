//! Follows the stream of a service across its restarts, and prints each change once.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_service_kit::{CancellationToken, Progress, Signal};
use serde_json::json;
use tonic::{Response, Status, Streaming};

use crate::agent::Agent;
use crate::args::WatchArgs;
use crate::error::CliError;
use crate::output::{self, Format};
use crate::row_tracker::{Change, Row};
use crate::table::GrowingTable;

/// The interval of polls for APIs that cannot be watched.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The state of a deleted object.
const DELETED: &str = "Deleted";

/// Prints one notice when a service stops answering, and one when it answers again.
#[derive(Debug, Default)]
pub(crate) struct OutageNotices(BTreeSet<ServiceName>);

impl OutageNotices {
    /// The service does not answer.
    pub(crate) fn lost(&mut self, service: ServiceName, error: impl FnOnce() -> CliError) {
        if self.0.insert(service) {
            output::notice(&format!("{}; waiting for {service} to come back", error()));
        }
    }

    /// The service answers again.
    pub(crate) fn back(&mut self, service: ServiceName) {
        if self.0.remove(&service) {
            output::notice(&format!("{service} is back"));
        }
    }
}

/// Whether the service may answer later.
fn is_transient(error: &CliError) -> bool {
    matches!(
        error,
        CliError::NotRunning { .. } | CliError::ServiceNotRunning { .. } | CliError::ServiceTimeout { .. }
    )
}

/// Reads a `Watch…` RPC until a permanent error. The first stream must open at once; a later
/// one is retried.
///
/// # Errors
/// Always: the reason why it ended.
pub(crate) async fn stream<T, Open, Call>(
    agent: &Agent,
    service: ServiceName,
    open: Open,
    mut on_signal: impl FnMut(Signal<T>) -> Result<(), CliError>,
) -> CliError
where
    Open: FnMut() -> Call,
    Call: Future<Output = Result<Response<Streaming<T>>, Status>>,
{
    let stop = CancellationToken::new();
    let (mut outages, mut opened) = (OutageNotices::default(), false);
    let mut end: Option<CliError> = None;
    let react = async |signal: Signal<T>| {
        if end.is_some() {
            return;
        }
        let outcome = match signal {
            Signal::Lost(status) => {
                let error = agent.call_error(service, status);
                // A stream that ends with another code than UNAVAILABLE may succeed on the next try.
                if !opened || matches!(error, CliError::SocketForbidden { .. } | CliError::CallRefused { .. })
                {
                    Err(error)
                } else {
                    outages.lost(service, || error);
                    Ok(())
                }
            }
            Signal::Opened => {
                opened = true;
                on_signal(Signal::Opened)
            }
            Signal::Message(message) => {
                outages.back(service);
                on_signal(Signal::Message(message))
            }
        };
        if let Err(error) = outcome {
            end = Some(error);
            stop.cancel();
        }
    };
    keelson_service_kit::follow(service.as_str(), &Progress::default(), &stop, open, react).await;
    end.unwrap_or(CliError::BrokenPipe)
}

/// Calls `request` once per [`POLL_INTERVAL`]. The first call must succeed; later ones are retried.
///
/// # Errors
/// Always: the reason why it ended.
pub(crate) async fn poll<T>(
    service: ServiceName,
    mut request: impl AsyncFnMut() -> Result<T, CliError>,
    mut on_answer: impl FnMut(T) -> Result<(), CliError>,
) -> Result<Infallible, CliError> {
    let (mut outages, mut answered) = (OutageNotices::default(), false);
    loop {
        match request().await {
            Ok(answer) => {
                answered = true;
                outages.back(service);
                on_answer(answer)?;
            }
            Err(error) if answered && is_transient(&error) => outages.lost(service, || error),
            Err(error) => return Err(error),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Prints changed rows: as lines of a growing table, lines of JSON, or YAML documents.
#[derive(Debug)]
pub(crate) struct Printer {
    format: Option<Format>,
    events: bool,
    table: GrowingTable,
    /// The column that shows `Deleted`; `None`: the event of each row shows it.
    state: Option<usize>,
    /// Changes buffered until the end of a replay, so that its rows are aligned together.
    buffered: Vec<(Change, Row)>,
    is_buffering: bool,
}

impl Printer {
    /// A printer of a table with these columns; `state` names the one that shows `Deleted`.
    pub(crate) fn new(format: Option<Format>, args: WatchArgs, mut header: Vec<String>, state: &str) -> Self {
        let column = header.iter().position(|name| name == state);
        if args.output_watch_events {
            header.insert(0, "EVENT".into());
        }
        Self {
            format,
            events: args.output_watch_events,
            table: GrowingTable::new(header),
            state: column,
            buffered: Vec::new(),
            is_buffering: false,
        }
    }

    /// A printer of a table whose objects have no state. Its rows always begin with the event, since nothing else would show that an
    /// object is deleted.
    pub(crate) fn without_state(format: Option<Format>, args: WatchArgs, header: Vec<String>) -> Self {
        let output_watch_events = args.output_watch_events || !output::is_document(format);
        Self::new(format, WatchArgs { output_watch_events, ..args }, header, "")
    }

    /// Buffers rows until [`release`](Self::release).
    pub(crate) fn hold(&mut self) {
        self.is_buffering = true;
    }

    /// Prints the buffered rows.
    pub(crate) fn release(&mut self) -> Result<(), CliError> {
        self.is_buffering = false;
        let buffered = std::mem::take(&mut self.buffered);
        self.print(buffered)
    }

    /// Prints or buffers a change.
    pub(crate) fn show(&mut self, change: Change, row: Row) -> Result<(), CliError> {
        if self.is_buffering {
            self.buffered.push((change, row));
            return Ok(());
        }
        self.print(vec![(change, row)])
    }

    fn print(&mut self, rows: Vec<(Change, Row)>) -> Result<(), CliError> {
        if rows.is_empty() {
            return Ok(());
        }
        let text = if output::is_document(self.format) { self.documents(rows)? } else { self.rows(rows) };
        output::print(&text)
    }

    fn documents(&self, rows: Vec<(Change, Row)>) -> Result<String, CliError> {
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
            let cell = state.and_then(|column| row.cells.get_mut(column));
            if let Some(cell) = cell.filter(|_| change == Change::Deleted) {
                DELETED.clone_into(cell);
            }
            if self.events {
                row.cells.insert(0, change.as_str().to_owned());
            }
            row.cells
        };
        let rows: Vec<Vec<String>> = rows.into_iter().map(cells).collect();
        self.table.render_batch(&rows)
    }
}
