//! Compiles the protos, one descriptor set per service, and the table of who may call what.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use prost_reflect::prost::Message as _;
use prost_reflect::prost_types::method_options::IdempotencyLevel;
use prost_reflect::{DescriptorPool, FileDescriptor, Value};

/// The messages with secrets. `src/redacted.rs` implements `Debug` for them.
const WITH_SECRETS: [&str; 3] =
    [".csi.v1.NodeStageVolumeRequest", ".csi.v1.NodePublishVolumeRequest", ".csi.v1.NodeExpandVolumeRequest"];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let mut files = Vec::new();
    for dir in ["keelson", "containerd", "csi", "pluginregistration"] {
        collect(Path::new(dir), &mut files)?;
        println!("cargo:rerun-if-changed={dir}");
    }
    let descriptor = out.join("keelson.bin");
    tonic_prost_build::configure()
        .file_descriptor_set_path(&descriptor)
        .include_file("keelson.rs")
        .bytes("pod_json")
        .bytes("status_json")
        .skip_debug(WITH_SECRETS)
        .compile_protos(&files, &[PathBuf::from(".")])?;

    raise_limits(&out)?;

    let pool = DescriptorPool::decode(fs::read(&descriptor)?.as_slice())?;
    fs::write(out.join("callers.rs"), callers_table(&pool)?)?;
    fs::write(out.join("repeatable.rs"), repeatable_list(&pool)?)?;
    for service in pool.services() {
        let file = service.parent_file();
        fs::write(out.join(format!("{}.bin", service.package_name())), closure_of(&file))?;
    }
    Ok(())
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "proto") {
            files.push(path);
        }
    }
    files.sort();
    Ok(())
}

/// Has every generated client and server take messages up to `LONGEST_MESSAGE`, so that nobody can forget to: tonic's own
/// limit is smaller than an object may be, and one such object would end the whole stream that it is in.
fn raise_limits(out: &Path) -> Result<(), Box<dyn Error>> {
    const CLIENT: [&str; 3] = [
        "_client {",
        "tonic::client::Grpc::new(inner);",
        "tonic::client::Grpc::new(inner).max_decoding_message_size(crate::LONGEST_MESSAGE);",
    ];
    const SERVER: [&str; 3] = [
        "_server {",
        "max_decoding_message_size: None,",
        "max_decoding_message_size: Some(crate::LONGEST_MESSAGE),",
    ];
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let mut source = fs::read_to_string(&path)?;
        for [module, by_default, raised] in [CLIENT, SERVER] {
            let modules = source.lines().filter(|l| l.starts_with("pub mod ") && l.ends_with(module)).count();
            // Those of an earlier run are raised already.
            if source.matches(by_default).count() + source.matches(raised).count() != modules {
                return Err(format!("tonic generates {} in another way", path.display()).into());
            }
            source = source.replace(by_default, raised);
        }
        fs::write(&path, source)?;
    }
    Ok(())
}

/// The Rust source of `CALLERS`: method path to the names in its `callers` option.
fn callers_table(pool: &DescriptorPool) -> Result<String, Box<dyn Error>> {
    let option =
        pool.get_extension_by_name("keelson.options.v1.callers").ok_or("the callers option is missing")?;
    let mut source = String::from(
        "/// Every method of our own APIs with the services that may call it, sorted by path.\n\
         pub const CALLERS: &[(&str, &[&str])] = &[\n",
    );
    let mut rows = BTreeMap::new();
    for service in pool.services().filter(|s| s.package_name().starts_with("keelson.")) {
        for method in service.methods() {
            let options = method.options();
            let Value::List(list) = options.get_extension(&option).into_owned() else {
                return Err("callers is not a list".into());
            };
            let names: Vec<String> =
                list.iter().filter_map(|v| v.as_str().map(|s| format!("{s:?}"))).collect();
            if names.is_empty() {
                return Err(format!("{} names no callers", method.full_name()).into());
            }
            rows.insert(format!("/{}/{}", service.full_name(), method.name()), names.join(", "));
        }
    }
    for (path, names) in rows {
        writeln!(source, "    ({path:?}, &[{names}]),")?;
    }
    source.push_str("];\n");
    Ok(source)
}

/// The Rust source of `REPEATABLE`: the paths of the methods whose `idempotency_level` is `NO_SIDE_EFFECTS`.
fn repeatable_list(pool: &DescriptorPool) -> Result<String, Box<dyn Error>> {
    let mut paths = Vec::new();
    for service in pool.services().filter(|s| s.package_name().starts_with("keelson.")) {
        for method in service.methods() {
            let options = method.method_descriptor_proto().options.as_ref();
            if options.is_some_and(|o| o.idempotency_level() == IdempotencyLevel::NoSideEffects) {
                if method.is_client_streaming() {
                    return Err(
                        format!("{} streams its request, it cannot be repeated", method.full_name()).into()
                    );
                }
                paths.push(format!("/{}/{}", service.full_name(), method.name()));
            }
        }
    }
    paths.sort();
    Ok(format!(
        "/// The methods that a client may repeat by itself when the callee cannot be reached, sorted.\n\
         pub const REPEATABLE: &[&str] = &{paths:?};\n"
    ))
}

/// An encoded descriptor set of one file and all that it imports.
fn closure_of(file: &FileDescriptor) -> Vec<u8> {
    fn visit(file: &FileDescriptor, seen: &mut BTreeMap<String, ()>, set: &mut Vec<FileDescriptor>) {
        if seen.insert(file.name().to_owned(), ()).is_some() {
            return;
        }
        for import in file.dependencies() {
            visit(&import, seen, set);
        }
        set.push(file.clone());
    }
    let mut set = Vec::new();
    visit(file, &mut BTreeMap::new(), &mut set);
    prost_types_set(&set)
}

fn prost_types_set(files: &[FileDescriptor]) -> Vec<u8> {
    // `FileDescriptorSet { repeated FileDescriptorProto file = 1; }`, written by hand so that the
    // bytes of each file, unknown options included, stay as protoc made them.
    let mut bytes = Vec::new();
    for file in files {
        let encoded = file.encode_to_vec();
        prost::encoding::encode_key(1, prost::encoding::WireType::LengthDelimited, &mut bytes);
        prost::encoding::encode_varint(encoded.len() as u64, &mut bytes);
        bytes.extend_from_slice(&encoded);
    }
    let _ = prost_reflect::prost_types::FileDescriptorSet::decode(bytes.as_slice());
    bytes
}
