//! The wire format of our APIs only grows: neighbours one release apart work together (architecture §3).
//!
//! `wire.txt` has a line for every method, field and enum value. The test fails if a line is missing or has changed.
//! `KEELSON_WRITE=1 cargo test -p keelson-proto --test wire` adds new lines. Remove a line by hand only if no service of the previous
//! release needs it.

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use prost_reflect::{
    Cardinality, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor,
};

fn lines() -> BTreeSet<String> {
    let pool = common::pool();
    let ours = |name: &str| name.starts_with("keelson.");
    let mut lines = BTreeSet::new();
    for service in pool.services().filter(|service| ours(service.full_name())) {
        lines.extend(service.methods().map(|method| rpc(&method)));
    }
    for message in pool.all_messages().filter(|message| ours(message.full_name())) {
        lines.extend(message.fields().map(|field| line_of(&message, &field)));
    }
    for known in pool.all_enums().filter(|known| ours(known.full_name())) {
        lines.extend(values(&known));
    }
    lines
}

fn rpc(method: &MethodDescriptor) -> String {
    let shape = |name: &str, is_stream| format!("{}{name}", if is_stream { "stream " } else { "" });
    format!(
        "rpc {}: {} to {}",
        method.full_name(),
        shape(method.input().full_name(), method.is_client_streaming()),
        shape(method.output().full_name(), method.is_server_streaming())
    )
}

fn line_of(message: &MessageDescriptor, field: &FieldDescriptor) -> String {
    let kind = match field.kind() {
        Kind::Message(inner) => inner.full_name().to_owned(),
        Kind::Enum(inner) => inner.full_name().to_owned(),
        scalar => format!("{scalar:?}"),
    };
    let how = match field.cardinality() {
        Cardinality::Repeated => "repeated ",
        _ if field.containing_oneof().is_some_and(|oneof| oneof.is_synthetic()) => "optional ",
        _ => "",
    };
    let one_of = field
        .containing_oneof()
        .filter(|oneof| !oneof.is_synthetic())
        .map_or_else(String::new, |oneof| format!(" in {}", oneof.name()));
    format!("field {} {} {}: {how}{kind}{one_of}", message.full_name(), field.number(), field.name())
}

fn values(known: &EnumDescriptor) -> Vec<String> {
    let line = |value: prost_reflect::EnumValueDescriptor| {
        format!("value {} {} {}", known.full_name(), value.number(), value.name())
    };
    known.values().map(line).collect()
}

#[test]
fn the_wire_format_only_grows() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("wire.txt");
    let now = lines();
    let known: BTreeSet<String> =
        std::fs::read_to_string(&path).unwrap_or_default().lines().map(ToOwned::to_owned).collect();
    let broken: Vec<&String> = known.difference(&now).collect();
    assert!(
        broken.is_empty(),
        "services of the previous release would misread messages, because these elements of the protos were removed or changed; \
         restore them: {broken:#?}"
    );
    if common::writes() {
        let text: String = now.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, text).expect("wire.txt can be written");
        return;
    }
    let new: Vec<&String> = now.difference(&known).collect();
    assert!(
        new.is_empty(),
        "wire.txt lacks new elements; add them with: KEELSON_WRITE=1 cargo test -p keelson-proto --test wire: {new:#?}"
    );
}
