//! `get pods --watch`, `get node --watch` and `get events --watch` with `--etcd`: what stands under the keys of the nodes, and
//! each change of it.
//!
//! Every node has a follower of its own, of those keys alone that are shown: a person who looks at pods reads no Secrets.
//! Which nodes there are is asked again and again, by their keys without values.

use std::collections::{BTreeMap, BTreeSet};

use keelson_etcd::keys::{Named, of_any_node};
use keelson_etcd::{Change as KeyChange, Entry, EtcdError, Follower, News, NodeKeys, Range};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Duration, Instant, sleep_until};

use super::{Fleet, failure};
use crate::error::Failure;
use crate::output;
use crate::seen::{Change, Row, Seen};
use crate::watch::Printer;

/// How often it is asked which nodes there are.
const NODES_EVERY: Duration = Duration::from_secs(2);
/// News that wait to be shown.
const WAITING: usize = 16;

/// The keys of one node that are followed, by key.
pub(super) type Keys = BTreeMap<String, Entry>;

/// What a watch shows of the nodes.
pub(super) struct View<R> {
    /// Where it is printed.
    pub(super) printer: Printer,
    /// The keys of a node that it is made of.
    pub(super) range: fn(&NodeKeys) -> Range,
    /// The rows of a node, each with what it is told from the others by.
    pub(super) rows: R,
    /// Whether those are events. They end by themselves, which is no news.
    pub(super) is_of_events: bool,
}

/// The nodes that are followed.
struct Nodes {
    followers: BTreeMap<String, AbortHandle>,
    tasks: JoinSet<()>,
    sender: Sender<(String, News)>,
    news: Receiver<(String, News)>,
}

/// What has been shown.
struct Shown<R> {
    view: View<R>,
    seen: Seen,
    keys: BTreeMap<String, Keys>,
    rows: BTreeMap<String, BTreeSet<String>>,
}

/// Shows what there is, then each change of it, through whatever etcd suffers.
///
/// # Errors
/// Always: why it ended.
pub(super) async fn follow<R>(fleet: &Fleet, view: View<R>) -> Result<(), Failure>
where
    R: Fn(&str, &Keys) -> Result<Vec<(String, Row)>, Failure>,
{
    let (sender, news) = channel(WAITING);
    let mut nodes = Nodes { followers: BTreeMap::new(), tasks: JoinSet::new(), sender, news };
    let mut shown = Shown { view, seen: Seen::default(), keys: BTreeMap::new(), rows: BTreeMap::new() };
    let first = fleet.chosen().await?.names();
    first.iter().for_each(|node| nodes.add(fleet, node, shown.view.range));
    // What is there at first is laid out together.
    let mut unread = first;
    shown.view.printer.hold();
    let mut absent = false;
    let mut look = Instant::now() + NODES_EVERY;
    loop {
        if unread.is_empty() {
            shown.view.printer.release()?;
        }
        // Cancel-safe: `recv` takes nothing before it returns.
        let (node, news) = tokio::select! {
            news = nodes.news.recv() => match news {
                Some(news) => news,
                None => return Ok(()),
            },
            () = sleep_until(look), if fleet.node.is_none() => {
                // While etcd does not answer, the followers say so.
                if let Ok(now) = fleet.nodes().await {
                    let now = now.names();
                    nodes.turn_to(fleet, &now, &mut shown)?;
                    unread.retain(|node| now.contains(node));
                }
                look = Instant::now() + NODES_EVERY;
                continue;
            }
        };
        if let News::Lost(error) = news {
            lost(error, &mut absent)?;
            continue;
        }
        if std::mem::take(&mut absent) {
            output::notice("etcd is back");
        }
        // One that has left may have said something before.
        if nodes.followers.contains_key(&node) {
            shown.take(&node, news)?;
            unread.remove(&node);
        }
    }
}

/// Tells once that etcd is away.
fn lost(error: EtcdError, absent: &mut bool) -> Result<(), Failure> {
    if !error.is_transient() {
        return Err(failure(error));
    }
    if !std::mem::replace(absent, true) {
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
    fn turn_to<R>(
        &mut self,
        fleet: &Fleet,
        now: &BTreeSet<String>,
        shown: &mut Shown<R>,
    ) -> Result<(), Failure>
    where
        R: Fn(&str, &Keys) -> Result<Vec<(String, Row)>, Failure>,
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
        // Those that have ended are not kept.
        while self.tasks.try_join_next().is_some() {}
        Ok(())
    }
}

impl<R> Shown<R>
where
    R: Fn(&str, &Keys) -> Result<Vec<(String, Row)>, Failure>,
{
    fn take(&mut self, node: &str, news: News) -> Result<(), Failure> {
        let of_events = self.view.is_of_events;
        let keys = self.keys.entry(node.to_owned()).or_default();
        match news {
            News::Listed(entries) => {
                let shown = entries.into_iter().filter(|entry| is_shown(&entry.key, of_events));
                *keys = shown.map(|entry| (entry.key.clone(), entry)).collect();
            }
            News::Changed(changes) => {
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
            News::InTouch | News::Lost(_) => return Ok(()),
        }
        let rows = (self.view.rows)(node, keys)?;
        self.show(node, rows)
    }

    /// These are the rows of the node now.
    fn show(&mut self, node: &str, rows: Vec<(String, Row)>) -> Result<(), Failure> {
        let mut now = BTreeSet::new();
        for (id, row) in rows {
            let id = format!("{node}/{id}");
            let change = self.seen.set(&id, &row);
            now.insert(id);
            if let Some(change) = change {
                self.view.printer.show(change, row)?;
            }
        }
        let before = self.rows.insert(node.to_owned(), now.clone()).unwrap_or_default();
        for id in before.difference(&now) {
            if let Some(row) = self.seen.gone(id).filter(|_| !self.view.is_of_events) {
                self.view.printer.show(Change::Deleted, row)?;
            }
        }
        Ok(())
    }
}

/// Events come and go between what else is looked at.
fn is_shown(key: &str, of_events: bool) -> bool {
    matches!(of_any_node(key), Some((_, Named::Event))) == of_events
}
