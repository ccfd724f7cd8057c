//! `keelson top`: CPU and memory of services, pods and the node, refreshed.

mod rows;

use std::io::IsTerminal as _;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::signal::unix::{SignalKind, signal};

use crate::agent::Agent;
use crate::args::{TopArgs, TopWhat};
use crate::error::CliError;
use crate::metrics::{CpuRates, Sort};
use crate::output;
use crate::screen::Screen;
use crate::session::Session;
use crate::table::Table;
use rows::{NodeRow, PodRow, ServiceRow};

/// A service that takes longer than this counts as not answering.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest time between the two samples of a single table.
const MAX_FIRST_INTERVAL: Duration = Duration::from_secs(1);

/// Shows one measurement, or refreshes it until a key ends it.
pub(crate) async fn run(session: &Session, args: &TopArgs) -> Result<(), CliError> {
    let mut view = View {
        agent: session.agent.with_deadline(CALL_TIMEOUT),
        what: args.what,
        sort: args.sort,
        with_header: !args.no_headers,
        rates: CpuRates::default(),
    };
    let is_document = output::is_document(session.format());
    if args.once || is_document || !std::io::stdout().is_terminal() {
        // CPU rates need two samples.
        view.refresh(session).await?;
        tokio::time::sleep(args.interval.min(MAX_FIRST_INTERVAL)).await;
        let snapshot = view.refresh(session).await?;
        if is_document {
            return output::print_document(session.format(), &snapshot.document(view.what));
        }
        snapshot.notices.iter().for_each(|notice| output::notice(notice));
        return output::print(&snapshot.text(session, &view));
    }
    live(session, view, args.interval).await
}

/// Draws until a key or a signal ends it.
async fn live(session: &Session, mut view: View, interval: Duration) -> Result<(), CliError> {
    let source = |source| CliError::AsyncRuntime { source };
    let mut signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()]
        .map(signal)
        .into_iter()
        .collect::<Result<Vec<_>, _>>()
        .map_err(source)?;
    let [interrupt, terminate, hangup] = signals.as_mut_slice() else { return Ok(()) };
    // The first refresh must succeed. It runs before the alternate screen, so that an error stays readable.
    let mut snapshot = Box::pin(view.refresh(session)).await?;
    let mut screen = Screen::enter()?;
    let mut due = tokio::time::Instant::now() + interval.min(MAX_FIRST_INTERVAL);
    loop {
        screen.draw(&snapshot.screen(session, &view))?;
        // Cancel-safe: keys and signals stay in their channels, and an aborted refresh is repeated.
        let key = tokio::select! {
            key = screen.key() => Some(key),
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
            () = tokio::time::sleep_until(due) => None,
        };
        match key {
            // Ctrl-C, Ctrl-D.
            Some(b'q' | 3 | 4) => return Ok(()),
            Some(b'c') => view.sort = Sort::Cpu,
            Some(b'm') => view.sort = Sort::Memory,
            Some(b'n') => view.sort = Sort::Name,
            Some(_) => {}
            None => {
                let refresh = Box::pin(view.refresh(session));
                // Cancel-safe: see above.
                let result = tokio::select! {
                    result = refresh => Some(result),
                    () = wait_for_quit(&mut screen) => None,
                    _ = interrupt.recv() => None,
                    _ = terminate.recv() => None,
                };
                match result {
                    None => return Ok(()),
                    Some(Ok(new)) => snapshot = new,
                    Some(Err(error)) => snapshot.notices = vec![error.to_string()],
                }
                due = tokio::time::Instant::now() + interval;
            }
        }
        snapshot.sort(view.sort);
    }
}

/// Waits for a key that ends the view; other keys are ignored.
async fn wait_for_quit(screen: &mut Screen) {
    while !matches!(screen.key().await, b'q' | 3 | 4) {}
}

/// What is shown, and the samples of the previous refresh.
#[derive(Debug)]
struct View {
    agent: Agent,
    what: Option<TopWhat>,
    sort: Sort,
    with_header: bool,
    rates: CpuRates,
}

/// The result of one refresh.
#[derive(Debug, Default)]
struct Snapshot {
    node: Option<NodeRow>,
    services: Option<Vec<ServiceRow>>,
    pods: Option<Vec<PodRow>>,
    /// Errors of services that did not answer.
    notices: Vec<String>,
}

impl View {
    fn shows(&self, what: TopWhat) -> bool {
        self.what.is_none_or(|own| own == what)
    }

    /// Calls the services concurrently. Errors become notices as long as any call succeeds.
    async fn refresh(&mut self, session: &Session) -> Result<Snapshot, CliError> {
        let agent = &self.agent;
        let node = async { if self.shows(TopWhat::Node) { Some(rows::node(agent).await) } else { None } };
        let services =
            async { if self.shows(TopWhat::Services) { Some(rows::services(agent).await) } else { None } };
        let pods = async {
            if self.shows(TopWhat::Pods) { Some(rows::pods(agent, &session.scope()).await) } else { None }
        };
        let (node, services, pods) = futures_util::future::join3(node, services, pods).await;
        let mut errors = Vec::new();
        let mut snapshot = Snapshot::default();
        match services {
            Some(Ok(services)) => snapshot.services = Some(services),
            Some(Err(error)) => errors.push(error),
            None => {}
        }
        match node {
            Some(Ok(node)) => snapshot.node = Some(node),
            Some(Err(error)) => errors.push(error),
            None => {}
        }
        match pods {
            Some(Ok((pods, missing))) => {
                snapshot.pods = Some(pods);
                snapshot.notices.extend(missing.map(|error| error.to_string()));
            }
            Some(Err(error)) => errors.push(error),
            None => {}
        }
        if snapshot.node.is_none()
            && snapshot.services.is_none()
            && snapshot.pods.is_none()
            && !errors.is_empty()
        {
            return Err(errors.swap_remove(0));
        }
        for error in errors {
            let text = error.to_string();
            if !snapshot.notices.contains(&text) {
                snapshot.notices.push(text);
            }
        }
        snapshot.apply_rates(&mut self.rates);
        snapshot.sort(self.sort);
        Ok(snapshot)
    }
}

impl Snapshot {
    fn apply_rates(&mut self, rates: &mut CpuRates) {
        let node = self.node.iter_mut().map(|row| &mut row.used);
        let services = self.services.iter_mut().flatten().map(|row| &mut row.used);
        let pods = self.pods.iter_mut().flatten().map(|row| &mut row.used);
        let mut known = std::collections::HashSet::new();
        for used in node.chain(services).chain(pods) {
            used.apply_rate(rates);
            known.insert(used.key.clone());
        }
        rates.retain(|key| known.contains(key));
    }

    fn sort(&mut self, sort: Sort) {
        self.services.iter_mut().for_each(|rows| rows.sort_by(|a, b| a.used.compare(&b.used, sort)));
        self.pods.iter_mut().for_each(|rows| rows.sort_by(|a, b| a.used.compare(&b.used, sort)));
    }

    fn text(&self, session: &Session, view: &View) -> String {
        let now = keelson_service_kit::now_unix_nanos();
        let render = |header: Vec<&str>, rows: Vec<Vec<String>>| {
            let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
            rows.into_iter().for_each(|row| table.row(row));
            let text = table.render(0);
            if view.with_header {
                text
            } else {
                text.split_once('\n').map_or_else(String::new, |(_, rest)| rest.to_owned())
            }
        };
        let mut tables = Vec::new();
        if let Some(node) = &self.node {
            tables.push(render(NodeRow::HEADER.to_vec(), vec![node.cells()]));
        }
        if let Some(services) = &self.services {
            tables.push(render(
                ServiceRow::HEADER.to_vec(),
                services.iter().map(|row| row.cells(now)).collect(),
            ));
        }
        if let Some(pods) = &self.pods {
            let all = session.global.all_namespaces;
            tables.push(render(PodRow::header(all), pods.iter().map(|row| row.cells(all, now)).collect()));
        }
        tables.join("\n")
    }

    /// The notices, the tables and the keys.
    fn screen(&self, session: &Session, view: &View) -> String {
        let mut text = String::new();
        for notice in &self.notices {
            text.push_str(&crate::table::printable(notice));
            text.push('\n');
        }
        text.push_str(&self.text(session, view));
        text.push_str("\nc, m, n: sort by CPU, memory, name; q: end\n");
        text
    }

    fn document(&self, what: Option<TopWhat>) -> Value {
        let items = |items: Vec<Value>| Value::Object(Map::from_iter([("items".to_owned(), items.into())]));
        let node = || self.node.iter().map(NodeRow::document).collect::<Vec<_>>();
        let services = || self.services.iter().flatten().map(ServiceRow::document).collect::<Vec<_>>();
        let pods = || self.pods.iter().flatten().map(PodRow::document).collect::<Vec<_>>();
        match what {
            Some(TopWhat::Node) => items(node()),
            Some(TopWhat::Services) => items(services()),
            Some(TopWhat::Pods) => items(pods()),
            None => serde_json::json!({"nodes": node(), "services": services(), "pods": pods()}),
        }
    }
}
