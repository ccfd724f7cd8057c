//! The objects of a server in memory, and their changes.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::patch::{self, Lists};
use super::request::Target;

/// Why the server refuses a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Denied {
    pub(super) code: u16,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl Denied {
    pub(super) fn not_found(target: &Target) -> Self {
        let message = format!("{} {:?} not found", target.resource, target.name);
        Self { code: 404, reason: "NotFound", message }
    }

    pub(super) fn forbidden(message: String) -> Self {
        Self { code: 403, reason: "Forbidden", message }
    }

    pub(super) fn bad_request(message: String) -> Self {
        Self { code: 400, reason: "BadRequest", message }
    }

    fn conflict(reason: &'static str, message: String) -> Self {
        Self { code: 409, reason, message }
    }
}

/// A change of an object, in the order in which they were made.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) version: u64,
    target: Target,
    before: Option<Value>,
    /// `None` once the object is deleted; `last` then has its last state.
    after: Option<Value>,
    last: Value,
}

/// Every object, by what names it; `subresource` is empty.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub(super) version: u64,
    all: BTreeMap<Target, Value>,
    changes: Vec<Change>,
}

/// The objects of a collection that a client wants to see.
#[derive(Debug, Clone)]
pub(super) struct Selection {
    pub(super) collection: Target,
    pub(super) fields: BTreeMap<String, String>,
}

impl Selection {
    fn takes(&self, target: &Target, object: &Value) -> bool {
        let collection = &self.collection;
        target.group == collection.group
            && target.resource == collection.resource
            && (collection.namespace.is_empty() || collection.namespace == target.namespace)
            && self.fields.iter().all(|(field, wanted)| {
                let found = object.pointer(&format!("/{}", field.replace('.', "/")));
                found.and_then(Value::as_str).unwrap_or_default() == wanted
            })
    }

    /// The event that a watch of it shows for a change; none where it is about something else.
    pub(super) fn event(&self, change: &Change) -> Option<Value> {
        let saw = change.before.as_ref().is_some_and(|object| self.takes(&change.target, object));
        let sees = change.after.as_ref().is_some_and(|object| self.takes(&change.target, object));
        let kind = match (saw, sees) {
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
            (false, false) => return None,
        };
        Some(json!({"type": kind, "object": change.last}))
    }
}

impl Objects {
    pub(super) fn get(&self, target: &Target) -> Option<&Value> {
        self.all.get(target)
    }

    /// A core object.
    pub(super) fn core(&self, resource: &str, namespace: &str, name: &str) -> Option<&Value> {
        let [resource, namespace, name] = [resource, namespace, name].map(ToOwned::to_owned);
        self.get(&Target { resource, namespace, name, ..Target::default() })
    }

    pub(super) fn selected(&self, selection: &Selection) -> Vec<&Value> {
        self.all.iter().filter(|(target, object)| selection.takes(target, object)).map(|(_, o)| o).collect()
    }

    /// The changes after `version`.
    pub(super) fn since(&self, version: u64) -> &[Change] {
        let from = self.changes.partition_point(|change| change.version <= version);
        self.changes.get(from..).unwrap_or_default()
    }

    /// Makes an object: with a UID, its times and a name of its own where it asks for one.
    pub(super) fn create(&mut self, collection: &Target, mut object: Value) -> Result<Value, Denied> {
        let metadata = &mut object["metadata"];
        if let Some(prefix) = metadata["generateName"].as_str().filter(|_| metadata["name"].is_null()) {
            metadata["name"] = format!("{prefix}{:05x}", fastrand::u32(..0x10_0000)).into();
        }
        let Some(name) = metadata["name"].as_str().map(ToOwned::to_owned) else {
            return Err(Denied::bad_request("the object has no name".to_owned()));
        };
        if !collection.namespace.is_empty() {
            metadata["namespace"] = collection.namespace.clone().into();
        }
        metadata["uid"] = uid().into();
        metadata["creationTimestamp"] = now().into();
        let target = Target { name, subresource: String::new(), ..collection.clone() };
        if self.all.contains_key(&target) {
            let message = format!("{} {:?} already exists", target.resource, target.name);
            return Err(Denied::conflict("AlreadyExists", message));
        }
        if target.resource == "pods" && object["status"].is_null() {
            object["status"] = json!({"phase": "Pending", "qosClass": "BestEffort"});
        }
        Ok(self.store(target, object))
    }

    /// Replaces an object, unless it has changed since it was read.
    pub(super) fn replace(&mut self, target: &Target, object: Value) -> Result<Value, Denied> {
        let old = self.get(target).ok_or_else(|| Denied::not_found(target))?;
        let version = &object["metadata"]["resourceVersion"];
        if !version.is_null() && version != &old["metadata"]["resourceVersion"] {
            let message = format!("{} {:?} has been changed since", target.resource, target.name);
            return Err(Denied::conflict("Conflict", message));
        }
        Ok(self.store(target.clone(), object))
    }

    /// The result of a patch to an object; a subresource's patch changes only its own part.
    pub(super) fn patched(&self, target: &Target, change: &Value, lists: Lists) -> Result<Value, Denied> {
        let whole = Target { subresource: String::new(), ..target.clone() };
        let old = self.get(&whole).ok_or_else(|| Denied::not_found(target))?;
        let wanted = change.pointer("/metadata/uid").filter(|uid| !uid.is_null());
        if wanted.is_some_and(|uid| uid != &old["metadata"]["uid"]) {
            let message = format!("{} {:?}: the UID is that of another object", target.resource, target.name);
            return Err(Denied::conflict("Conflict", message));
        }
        let mut new = old.clone();
        patch::apply(&mut new, change, lists);
        if target.subresource == "status" {
            new["spec"] = old["spec"].clone();
        }
        Ok(new)
    }

    /// Removes an object, or, where a pod has containers that may have to end, says when they have to.
    pub(super) fn delete(&mut self, target: &Target, options: &Value) -> Result<Value, Denied> {
        let mut object = self.get(target).cloned().ok_or_else(|| Denied::not_found(target))?;
        let wanted = options.pointer("/preconditions/uid").filter(|uid| !uid.is_null());
        if wanted.is_some_and(|uid| uid != &object["metadata"]["uid"]) {
            let message =
                format!("the UID in the precondition is not that of {} {:?}", target.resource, target.name);
            return Err(Denied::conflict("Conflict", message));
        }
        let spec = &object["spec"];
        let is_bound_pod = target.resource == "pods" && spec["nodeName"].is_string();
        let grace = options["gracePeriodSeconds"]
            .as_i64()
            .unwrap_or_else(|| spec["terminationGracePeriodSeconds"].as_i64().unwrap_or(30));
        if is_bound_pod && grace > 0 {
            let ends = Timestamp::now() + SignedDuration::from_secs(grace);
            object["metadata"]["deletionTimestamp"] = format!("{ends:.0}").into();
            object["metadata"]["deletionGracePeriodSeconds"] = grace.into();
            return Ok(self.store(target.clone(), object));
        }
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let before = self.all.remove(target);
        self.changes.push(Change {
            version: self.version,
            target: target.clone(),
            before,
            after: None,
            last: object.clone(),
        });
        Ok(object)
    }

    /// Takes an object as it is.
    pub(super) fn put(&mut self, target: Target, object: Value) {
        self.all.insert(target, object);
    }

    pub(super) fn store(&mut self, target: Target, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let before = self.all.insert(target.clone(), object.clone());
        let (after, last) = (Some(object.clone()), object.clone());
        self.changes.push(Change { version: self.version, target, before, after, last });
        object
    }
}

pub(super) fn now() -> String {
    format!("{:.0}", Timestamp::now())
}

fn uid() -> String {
    let random = format!("{:032x}", fastrand::u128(..));
    let (a, rest) = random.split_at(8);
    let (b, rest) = rest.split_at(4);
    let (c, rest) = rest.split_at(4);
    let (d, e) = rest.split_at(4);
    format!("{a}-{b}-{c}-{d}-{e}")
}
