//! `get … --watch` with `--etcd` of pods, node, events, persistentvolumes and persistentvolumeclaims: shows the objects under the
//! keys of the nodes and each change of them.
//!
//! Every node has a follower of its own that watches only the keys that are shown, so a watch of pods reads no Secrets.
//! The list of nodes is polled, by their keys without values.

use std::collections::{BTreeMap, BTreeSet};

use keelson_etcd::keys::{KeyKind, parse_key};
use keelson_etcd::{Change as KeyChange, Entry, EtcdError, Follower, NodeKeys, Range, WatchEvent};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Duration, Instant, sleep_until};

use super::etcd_error::from_etcd_error;
use super::nodes::Fleet;
use crate::error::CliError;
use crate::output;
use crate::row_tracker::{Change, Row, RowTracker};
use crate::watch::Printer;

/// The interval of polls for the list of nodes.
const NODES_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The number of changes that are buffered.
const BUFFERED_CHANGES: usize = 16;

/// The keys of one node that are followed, by key.
pub(super) type Keys = BTreeMap<String, Entry>;

/// What a watch shows of each node.
pub(super) struct View<R> {
    /// Prints the rows.
    pub(super) printer: Printer,
    /// The keys of a node that are watched.
    pub(super) range: fn(&NodeKeys) -> Range,
    /// Computes the rows of a node, each with its id.
    pub(super) rows: R,
    /// Whether the rows are events, which expire without being shown as deleted.
    pub(super) is_of_events: bool,
}

/// The followed nodes.
struct Nodes {
    followers: BTreeMap<String, AbortHandle>,
    tasks: JoinSet<()>,
    sender: Sender<(String, WatchEvent)>,
    changes: Receiver<(String, WatchEvent)>,
}

/// The rows that have been shown.
struct Shown<R> {
    view: View<R>,
    tracker: RowTracker,
    keys: BTreeMap<String, Keys>,
    rows: BTreeMap<String, BTreeSet<String>>,
}

/// Shows the present objects, then each change, also across outages of etcd.
///
/// # Errors
/// Always: the reason why it ended.
pub(super) async fn follow<R>(fleet: &Fleet, view: View<R>) -> Result<(), CliError>
where
    R: Fn(&str, &Keys) -> Result<Vec<(String, Row)>, CliError>,
{
    let (sender, changes) = channel(BUFFERED_CHANGES);
    let mut nodes = Nodes { followers: BTreeMap::new(), tasks: JoinSet::new(), sender, changes };
    let mut shown =
        Shown { view, tracker: RowTracker::default(), keys: BTreeMap::new(), rows: BTreeMap::new() };
    let first = fleet.selected_nodes().await?.names();
    first.iter().for_each(|node| nodes.add(fleet, node, shown.view.range));
    // Align the rows that exist at first together.
    let mut unread = first;
    shown.view.printer.hold();
    let mut is_down = false;
    let mut next_poll = Instant::now() + NODES_POLL_INTERVAL;
    loop {
        if unread.is_empty() {
            shown.view.printer.release()?;
        }
        // Cancel-safe: `recv` takes nothing before it returns.
        let (node, news) = tokio::select! {
            change = nodes.changes.recv() => match change {
                Some(change) => change,
                None => return Ok(()),
            },
            () = sleep_until(next_poll), if fleet.node.is_none() => {
                // If etcd does not answer, the followers report it.
                if let Ok(now) = fleet.nodes().await {
                    let now = now.names();
                    nodes.follow_only(fleet, &now, &mut shown)?;
                    unread.retain(|node| now.contains(node));
                }
                next_poll = Instant::now() + NODES_POLL_INTERVAL;
                continue;
            }
        };
        if let WatchEvent::Lost(error) = news {
            report_outage(error, &mut is_down)?;
            continue;
        }
        if std::mem::take(&mut is_down) {
            output::notice("etcd is back");
        }
        // A removed node may have sent a change before.
        if nodes.followers.contains_key(&node) {
            shown.apply(&node, news)?;
            unread.remove(&node);
        }
    }
}

/// Prints one notice when etcd stops answering.
fn report_outage(error: EtcdError, is_down: &mut bool) -> Result<(), CliError> {
    if !error.is_transient() {
        return Err(from_etcd_error(error));
    }
    if !std::mem::replace(is_down, true) {
        output::notice(&format!("{error}; waiting for etcd to come back"));
    }
    Ok(())
}

impl Nodes {
    fn add(&mut self, fleet: &Fleet, node: &str, range: fn(&NodeKeys) -> Range) {
        let mut follower = Follower::new(fleet.etcd.clone(), range(&NodeKeys::new(node)));
        let (node, sender) = (node.to_owned(), self.sender.clone());
        let name = node.clone();
        let task = self.tasks.spawn(async move {
            loop {
                let news = follower.next().await;
                if sender.send((name.clone(), news)).await.is_err() {
                    return;
                }
            }
        });
        self.followers.insert(node, task);
    }

    /// Follows these nodes and no others.
    fn follow_only<R>(
        &mut self,
        fleet: &Fleet,
        now: &BTreeSet<String>,
        shown: &mut Shown<R>,
    ) -> Result<(), CliError>
    where
        R: Fn(&str, &Keys) -> Result<Vec<(String, Row)>, CliError>,
    {
        let left: Vec<String> = self.followers.keys().filter(|node| !now.contains(*node)).cloned().collect();
        for node in left {
            if let Some(task) = self.followers.remove(&node) {
                task.abort();
            }
            shown.keys.remove(&node);
            shown.show(&node, Vec::new())?;
        }
        for node in now.iter().filter(|node| !self.followers.contains_key(*node)).cloned().collect::<Vec<_>>()
        {
            self.add(fleet, &node, shown.view.range);
        }
        // Drop the tasks that have ended.
        while self.tasks.try_join_next().is_some() {}
        Ok(())
    }
}

impl<R> Shown<R>
where
    R: Fn(&str, &Keys) -> Result<Vec<(String, Row)>, CliError>,
{
    fn apply(&mut self, node: &str, news: WatchEvent) -> Result<(), CliError> {
        let of_events = self.view.is_of_events;
        let keys = self.keys.entry(node.to_owned()).or_default();
        match news {
            WatchEvent::Listed(entries) => {
                let shown = entries.into_iter().filter(|entry| is_shown(&entry.key, of_events));
                *keys = shown.map(|entry| (entry.key.clone(), entry)).collect();
            }
            WatchEvent::Changed(changes) => {
                let mut any = false;
                for change in changes {
                    match change {
                        KeyChange::Put(entry) if is_shown(&entry.key, of_events) => {
                            keys.insert(entry.key.clone(), entry);
                            any = true;
                        }
                        KeyChange::Deleted(key) => any |= keys.remove(&key).is_some(),
                        KeyChange::Put(_) => {}
                    }
                }
                if !any {
                    return Ok(());
                }
            }
            WatchEvent::Contact | WatchEvent::Lost(_) => return Ok(()),
        }
        let rows = (self.view.rows)(node, keys)?;
        self.show(node, rows)
    }

    /// Shows the changes from the previous rows of the node to these.
    fn show(&mut self, node: &str, rows: Vec<(String, Row)>) -> Result<(), CliError> {
        let mut now = BTreeSet::new();
        for (id, row) in rows {
            let id = format!("{node}/{id}");
            let change = self.tracker.set(&id, &row);
            now.insert(id);
            if let Some(change) = change {
                self.view.printer.show(change, row)?;
            }
        }
        let before = self.rows.insert(node.to_owned(), now.clone()).unwrap_or_default();
        for id in before.difference(&now) {
            if let Some(row) = self.tracker.remove(id).filter(|_| !self.view.is_of_events) {
                self.view.printer.show(Change::Deleted, row)?;
            }
        }
        Ok(())
    }
}

/// Whether a key belongs to the view: watched ranges may also contain events, or other keys between events.
fn is_shown(key: &str, of_events: bool) -> bool {
    matches!(parse_key(key), Some((_, KeyKind::Event))) == of_events
}
