//! Generates the pages of docs/api from the protos and their comments.
//!
//! `KEELSON_WRITE=1 cargo test -p keelson-proto --test docs` writes the pages; without the variable, the test compares them.
//! `tests/tests/api_docs.rs` runs the examples against a whole agent.

mod common;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use keelson_proto::CALLERS;
use prost_reflect::{Cardinality, DescriptorPool, FileDescriptor, Kind, MessageDescriptor, MethodDescriptor};

/// A page of one API: file name, service, API, description and example.
struct Page {
    file: &'static str,
    service: &'static str,
    api: &'static str,
    about: &'static str,
    example: &'static str,
}

const PAGES: [Page; 9] = [
    Page {
        file: "pod-config",
        service: "pod-config",
        api: "keelson.pod_config.v1.PodConfig",
        about: "Reads and merges the manifests of the node.",
        example: "keelson grpc call pod-config ListSources",
    },
    Page {
        file: "pod-sync",
        service: "pod-sync",
        api: "keelson.pod_sync.v1.PodSync",
        about: "Reconciles pods: starts, restarts and stops containers.",
        example: "keelson grpc call pod-sync ListPods",
    },
    Page {
        file: "runtime-shim",
        service: "runtime-shim",
        api: "keelson.runtime.v1.Runtime",
        about: "Talks to the container runtime. The same socket serves CRI v1, for root.",
        example: "keelson grpc call runtime-shim ListImages",
    },
    Page {
        file: "volume-manager",
        service: "volume-manager",
        api: "keelson.volume_manager.v1.VolumeManager",
        about: "Sets up and removes the volumes of pods.",
        example: "keelson grpc call volume-manager PodVolumeStats",
    },
    Page {
        file: "resource-manager",
        service: "resource-manager",
        api: "keelson.resource_manager.v1.ResourceManager",
        about: "Admits pods and manages their cgroups.",
        example: "keelson grpc call resource-manager NodeStats",
    },
    Page {
        file: "node-status",
        service: "node-status",
        api: "keelson.node_status.v1.NodeStatus",
        about: "Reports to the control plane.",
        example: "keelson grpc call node-status GetNode",
    },
    Page {
        file: "supervisor",
        service: "init",
        api: "keelson.supervisor.v1.Supervisor",
        about: "Starts and supervises the other services.",
        example: "keelson grpc call init ListServices",
    },
    Page {
        file: "admin",
        service: "node-api",
        api: "keelson.admin.v1.Admin",
        about: "What every service reports about itself.",
        example: "keelson grpc call node-api GetProgress\nkeelson grpc call node-api GetUsage\nkeelson grpc call pod-sync ListSpans",
    },
    Page {
        file: "events",
        service: "pod-sync",
        api: "keelson.events.v1.Events",
        about: "The Kubernetes events that every service records.",
        example: "keelson grpc call pod-sync ListEvents",
    },
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api")
}

/// The comment before the element at `path` of a file (descriptor.proto, `SourceCodeInfo`).
fn comment(file: &FileDescriptor, path: &[i32]) -> String {
    let info = file.file_descriptor_proto().source_code_info.as_ref();
    let found = info.and_then(|info| info.location.iter().find(|location| location.path == path));
    let text = found.and_then(|location| location.leading_comments.clone()).unwrap_or_default();
    text.lines().map(str::trim).collect::<Vec<_>>().join("\n").trim().to_owned()
}

/// A comment as one line for a cell of a table.
fn cell(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}

fn page(pool: &DescriptorPool, page: &Page) -> String {
    let api = pool.get_service_by_name(page.api).expect("the API exists");
    let file = api.parent_file();
    let mut text = format!(
        "# {}\n\n{} Socket: `<run-dir>/{}/{}.sock`. Generated from [`{}`](../../proto/{}) and its comments.\n\n```sh\n{}\n```\n",
        api.full_name(),
        page.about,
        page.service,
        page.service,
        file.name(),
        file.name(),
        page.example
    );
    let note = comment(&file, api.path());
    if !note.is_empty() {
        let _ = write!(text, "\n{note}\n");
    }
    let mut messages = BTreeSet::new();
    let _ = write!(text, "\n## Methods\n");
    for method in api.methods() {
        text.push_str(&section(&file, &method));
        for message in [method.input(), method.output()] {
            reach(&message, &mut messages);
        }
    }
    let _ = write!(text, "\n## Messages\n");
    for name in messages {
        let message = pool.get_message_by_name(&name).expect("the message exists");
        text.push_str(&table(&message));
    }
    text
}

fn section(file: &FileDescriptor, method: &MethodDescriptor) -> String {
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let callers = CALLERS.iter().find(|(known, _)| *known == path).map(|(_, names)| names.join(", "));
    let stream = |is_stream| if is_stream { "stream " } else { "" };
    let mut text = format!(
        "\n### {}\n\n`{}{}` → `{}{}`; callers: {}.\n",
        method.name(),
        stream(method.is_client_streaming()),
        method.input().name(),
        stream(method.is_server_streaming()),
        method.output().name(),
        callers.unwrap_or_default()
    );
    let note = comment(file, method.path());
    if !note.is_empty() {
        let _ = write!(text, "\n{note}\n");
    }
    text
}

/// Adds to `found` the names of a message and of all our messages that it may contain.
fn reach(message: &MessageDescriptor, found: &mut BTreeSet<String>) {
    if message.is_map_entry() {
        message.fields().for_each(|field| reach_field(&field.kind(), found));
        return;
    }
    if message.full_name().starts_with("keelson.") && found.insert(message.full_name().to_owned()) {
        message.fields().for_each(|field| reach_field(&field.kind(), found));
    }
}

fn reach_field(kind: &Kind, found: &mut BTreeSet<String>) {
    if let Kind::Message(inner) = kind {
        reach(inner, found);
    }
}

fn table(message: &MessageDescriptor) -> String {
    let file = message.parent_file();
    let mut text = format!("\n### {}\n", message.full_name());
    let note = comment(&file, message.path());
    if !note.is_empty() {
        let _ = write!(text, "\n{note}\n");
    }
    if message.fields().len() == 0 {
        text.push_str("\nNo fields.\n");
        return text;
    }
    text.push_str("\n| field | type | |\n|---|---|---|\n");
    for field in message.fields() {
        let kind = match field.kind() {
            Kind::Message(inner) if inner.is_map_entry() => "map".to_owned(),
            Kind::Message(inner) => inner.name().to_owned(),
            Kind::Enum(inner) => {
                let values: Vec<String> = inner.values().map(|value| value.name().to_owned()).collect();
                values.join(", ")
            }
            scalar => format!("{scalar:?}").to_lowercase(),
        };
        let repeated =
            if field.cardinality() == Cardinality::Repeated && !field.is_map() { "repeated " } else { "" };
        let one_of = field.containing_oneof().filter(|oneof| !oneof.is_synthetic());
        let one_of = one_of.map_or_else(String::new, |oneof| format!(", one of `{}`", oneof.name()));
        let note = cell(&comment(&file, field.path()));
        let _ =
            writeln!(text, "| `{}` = {} | {repeated}{kind}{one_of} | {note} |", field.name(), field.number());
    }
    text
}

fn index() -> String {
    let mut text = "# The APIs of the services\n\n\
        gRPC over unix sockets, one per service below the run folder; `keelson grpc list` shows every method, `keelson grpc call`\n\
        calls one. Each method lists its callers; uid 0 may call everything, members of the operator group what `cli` may.\n\
        Kubernetes objects are JSON in fields called `*_json`. Services of consecutive releases interoperate: the wire format only\n\
        grows, which a test checks with `proto/wire.txt`.\n\n| | |\n|---|---|\n"
        .to_owned();
    for page in PAGES {
        let _ = writeln!(text, "| [{}]({}.md) | {} |", page.api, page.file, page.about);
    }
    text.push_str(
        "\nnode-api has no API of its own, only those of every service: Admin and Events. It serves the kubelet API to the network;\n\
        [services/node-api](../../services/node-api) has the paths.\n",
    );
    text
}

#[test]
fn pages_of_docs_api_match_the_protos() {
    let pool = common::pool();
    let apis: Vec<String> = pool
        .services()
        .map(|service| service.full_name().to_owned())
        .filter(|name| name.starts_with("keelson."))
        .collect();
    let mut paged: Vec<&str> = PAGES.iter().map(|page| page.api).collect();
    paged.sort_unstable();
    let mut sorted = apis.clone();
    sorted.sort_unstable();
    assert_eq!(paged, sorted, "each API has a page");
    let mut pages: Vec<(PathBuf, String)> =
        PAGES.iter().map(|p| (folder().join(format!("{}.md", p.file)), page(&pool, p))).collect();
    pages.push((folder().join("README.md"), index()));
    for (path, text) in pages {
        if common::writes() {
            std::fs::create_dir_all(folder()).expect("the folder can be created");
            std::fs::write(&path, text).expect("the page can be written");
            continue;
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == text,
            "{} does not match the protos; rewrite it with: KEELSON_WRITE=1 cargo test -p keelson-proto --test docs",
            path.display()
        );
    }
}
