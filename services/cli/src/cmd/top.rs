//! `keelson top`: what services, pods and the node use, again and again.

mod rows;

use std::io::IsTerminal as _;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::signal::unix::{SignalKind, signal};

use super::Session;
use crate::agent::Agent;
use crate::args::{TopArgs, TopWhat};
use crate::error::Failure;
use crate::figures::{Rates, Sort};
use crate::output;
use crate::screen::Screen;
use crate::table::Table;
use rows::{NodeRow, PodRow, ServiceRow};

/// A service that takes longer than this is shown as one that does not answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// The time between the two looks of a single table.
const ONCE: Duration = Duration::from_secs(1);

/// Shows it once, or until the person ends it.
pub(crate) async fn run(session: &Session, args: &TopArgs) -> Result<(), Failure> {
    let mut view = View {
        agent: session.agent.within(PATIENCE),
        what: args.what,
        sort: args.sort,
        with_header: !args.no_headers,
        rates: Rates::default(),
    };
    let is_document = output::is_document(session.format());
    if args.once || is_document || !std::io::stdout().is_terminal() {
        // Rates need two looks.
        view.look(session).await?;
        tokio::time::sleep(args.interval.min(ONCE)).await;
        let seen = view.look(session).await?;
        if is_document {
            return output::print_document(session.format(), &seen.document(view.what));
        }
        seen.notices.iter().for_each(|notice| output::notice(notice));
        return output::print(&seen.text(session, &view));
    }
    live(session, view, args.interval).await
}

/// Draws until a key or a signal ends it.
async fn live(session: &Session, mut view: View, interval: Duration) -> Result<(), Failure> {
    let source = |source| Failure::Runtime { source };
    let mut ends = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()]
        .map(signal)
        .into_iter()
        .collect::<Result<Vec<_>, _>>()
        .map_err(source)?;
    let [interrupt, terminate, hangup] = ends.as_mut_slice() else { return Ok(()) };
    // The first look must be possible; it is made before the screen is taken, so that an error stays readable.
    let mut seen = Box::pin(view.look(session)).await?;
    let mut screen = Screen::take()?;
    let mut due = tokio::time::Instant::now() + interval.min(ONCE);
    loop {
        screen.draw(&seen.screen(session, &view))?;
        // Cancel-safe: a key or signal that comes meanwhile is kept, and a look that is cut off is made anew.
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
                let look = Box::pin(view.look(session));
                // Cancel-safe: see above.
                let looked = tokio::select! {
                    looked = look => Some(looked),
                    () = ended(&mut screen) => None,
                    _ = interrupt.recv() => None,
                    _ = terminate.recv() => None,
                };
                match looked {
                    None => return Ok(()),
                    Some(Ok(new)) => seen = new,
                    Some(Err(failure)) => seen.notices = vec![failure.to_string()],
                }
                due = tokio::time::Instant::now() + interval;
            }
        }
        seen.sort(view.sort);
    }
}

/// Waits for a key that ends the view; other keys are lost.
async fn ended(screen: &mut Screen) {
    while !matches!(screen.key().await, b'q' | 3 | 4) {}
}

/// What is looked at, and how it was at the last look.
#[derive(Debug)]
struct View {
    agent: Agent,
    what: Option<TopWhat>,
    sort: Sort,
    with_header: bool,
    rates: Rates,
}

/// What one look has shown.
#[derive(Debug, Default)]
struct Seen {
    node: Option<NodeRow>,
    services: Option<Vec<ServiceRow>>,
    pods: Option<Vec<PodRow>>,
    /// Who did not answer.
    notices: Vec<String>,
}

impl View {
    fn shows(&self, what: TopWhat) -> bool {
        self.what.is_none_or(|own| own == what)
    }

    /// Asks side by side. What does not answer is a notice as long as anything does.
    async fn look(&mut self, session: &Session) -> Result<Seen, Failure> {
        let agent = &self.agent;
        let node = async { if self.shows(TopWhat::Node) { Some(rows::node(agent).await) } else { None } };
        let services =
            async { if self.shows(TopWhat::Services) { Some(rows::services(agent).await) } else { None } };
        let pods = async {
            if self.shows(TopWhat::Pods) { Some(rows::pods(agent, &session.scope()).await) } else { None }
        };
        let (node, services, pods) = futures_util::future::join3(node, services, pods).await;
        let mut failures = Vec::new();
        let mut seen = Seen::default();
        match services {
            Some(Ok(services)) => seen.services = Some(services),
            Some(Err(failure)) => failures.push(failure),
            None => {}
        }
        match node {
            Some(Ok(node)) => seen.node = Some(node),
            Some(Err(failure)) => failures.push(failure),
            None => {}
        }
        match pods {
            Some(Ok((pods, absent))) => {
                seen.pods = Some(pods);
                seen.notices.extend(absent.map(|failure| failure.to_string()));
            }
            Some(Err(failure)) => failures.push(failure),
            None => {}
        }
        if seen.node.is_none() && seen.services.is_none() && seen.pods.is_none() && !failures.is_empty() {
            return Err(failures.swap_remove(0));
        }
        for failure in failures {
            let text = failure.to_string();
            if !seen.notices.contains(&text) {
                seen.notices.push(text);
            }
        }
        seen.rate(&mut self.rates);
        seen.sort(self.sort);
        Ok(seen)
    }
}

impl Seen {
    fn rate(&mut self, rates: &mut Rates) {
        let node = self.node.iter_mut().map(|row| &mut row.used);
        let services = self.services.iter_mut().flatten().map(|row| &mut row.used);
        let pods = self.pods.iter_mut().flatten().map(|row| &mut row.used);
        let mut known = std::collections::HashSet::new();
        for used in node.chain(services).chain(pods) {
            used.rate(rates);
            known.insert(used.key.clone());
        }
        rates.keep(|who| known.contains(who));
    }

    fn sort(&mut self, sort: Sort) {
        self.services.iter_mut().for_each(|rows| rows.sort_by(|a, b| a.used.order(&b.used, sort)));
        self.pods.iter_mut().for_each(|rows| rows.sort_by(|a, b| a.used.order(&b.used, sort)));
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

    /// The text with the notices above it, where they are seen.
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
