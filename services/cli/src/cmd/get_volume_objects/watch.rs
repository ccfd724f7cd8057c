//! `keelson get persistentvolumes -w` and `keelson get persistentvolumeclaims -w`.

use std::collections::BTreeMap;

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1::{
    ObjectReference, WatchVolumeObjectsRequest, WatchVolumeObjectsResponse,
    watch_volume_objects_response::Item,
};
use keelson_service_kit::Signal;
use serde_json::Value;

use super::{Selection, cells, header};
use crate::agent::read_volume_object;
use crate::args::WatchArgs;
use crate::cmd::volume_objects::{name, namespace};
use crate::error::CliError;
use crate::output;
use crate::row_tracker::{Change, Row, RowTracker};
use crate::session::Session;
use crate::watch::{self, Printer};

/// Namespace and name of an object.
type Key = (String, String);

/// The objects that have been shown.
struct ObjectWatch<'a> {
    session: &'a Session,
    selection: &'a Selection<'a>,
    printer: Printer,
    tracker: RowTracker,
    /// A stream has been opened.
    was_opened: bool,
    /// The objects of the current replay after a restart of the service, which shows them in passing as it reads its sources. `None`
    /// outside of one, and in the first stream.
    replay: Option<BTreeMap<Key, Value>>,
}

/// Shows the objects in `present`, then each change.
///
/// # Errors
/// Always: the reason why it ended.
pub(super) async fn follow(
    session: &Session,
    selection: &Selection<'_>,
    present: &[&Value],
    args: WatchArgs,
) -> Result<(), CliError> {
    let printer = Printer::new(session.format(), args, header(session, selection.kind), "STATUS");
    let tracker = RowTracker::default();
    let mut shown = ObjectWatch { session, selection, printer, tracker, was_opened: false, replay: None };
    shown.show_all(present.iter().copied())?;
    let open = || {
        let kind = selection.kind.as_str().to_owned();
        let request = session.agent.request(WatchVolumeObjectsRequest { kind });
        let mut client = session.agent.pod_config();
        async move { client.watch_volume_objects(request).await }
    };
    let end = watch::stream(&session.agent, ServiceName::PodConfig, open, |signal| match signal {
        Signal::Opened => {
            shown.begin_replay();
            Ok(())
        }
        Signal::Lost(_) => Ok(()),
        Signal::Message(WatchVolumeObjectsResponse { item }) => item.map_or(Ok(()), |item| shown.take(item)),
    });
    Err(end.await)
}

impl ObjectWatch<'_> {
    fn begin_replay(&mut self) {
        self.tracker.begin_replay();
        self.replay = std::mem::replace(&mut self.was_opened, true).then(BTreeMap::new);
    }

    fn take(&mut self, item: Item) -> Result<(), CliError> {
        match item {
            Item::ObjectJson(json) => {
                let object = read_volume_object(self.selection.kind.as_str(), &json)?;
                if !self.selection.contains(&object) {
                    return Ok(());
                }
                match &mut self.replay {
                    Some(replay) => drop(replay.insert(key_of(&object), object)),
                    None => self.show(&object)?,
                }
                Ok(())
            }
            Item::Gone(ObjectReference { namespace, name, .. }) => {
                let key = (namespace, name);
                if let Some(replay) = &mut self.replay {
                    replay.remove(&key);
                }
                let row = self.tracker.remove(&id(&key));
                row.map_or(Ok(()), |row| self.printer.show(Change::Deleted, row))
            }
            Item::Synced(_) => {
                let replay = self.replay.take().unwrap_or_default();
                self.show_all(replay.values())?;
                for row in self.tracker.end_replay() {
                    self.printer.show(Change::Deleted, row)?;
                }
                Ok(())
            }
        }
    }

    /// Shows several objects, their rows aligned together.
    fn show_all<'v>(&mut self, objects: impl Iterator<Item = &'v Value>) -> Result<(), CliError> {
        self.printer.hold();
        for object in objects {
            self.show(object)?;
        }
        self.printer.release()
    }

    fn show(&mut self, object: &Value) -> Result<(), CliError> {
        let row = self.row(object);
        match self.tracker.set(&id(&key_of(object)), &row) {
            Some(change) => self.printer.show(change, row),
            None => Ok(()),
        }
    }

    fn row(&self, object: &Value) -> Row {
        if output::is_document(self.session.format()) {
            return Row { mark: object.to_string(), cells: Vec::new(), document: object.clone() };
        }
        let cells = |now| cells(self.session, self.selection.kind, object, now);
        // At time 0 all ages are equal.
        let mark = cells(0).join("\0");
        Row { mark, cells: cells(keelson_service_kit::now_unix_nanos()), document: Value::Null }
    }
}

fn key_of(object: &Value) -> Key {
    (namespace(object).to_owned(), name(object).to_owned())
}

/// The key of an object in the tracker.
fn id((namespace, name): &Key) -> String {
    format!("{namespace}/{name}")
}
