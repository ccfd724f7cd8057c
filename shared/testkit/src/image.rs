//! Small images made on the spot: one layer with a static busybox, written as an OCI archive
//! (image-spec, "image layout"), so that nothing is ever pulled.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use crate::Component;

/// The image of the tests and the examples: every busybox applet, users root and app (1000).
pub const BUSYBOX_IMAGE: &str = "keelson.local/busybox:1";

/// The sandbox image: a process that sleeps. The runtime ends it with SIGKILL.
pub const PAUSE_IMAGE: &str = "keelson.local/pause:1";

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000:app:/home/app:/bin/sh\nspy:x:1001:1001:in the group of the operators:/:/bin/sh\nagent:x:64206:1000:node-status:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n";
const GROUP: &str = "root:x:0:\napp:x:1000:\nextra:x:2000:app\nkeelson:x:64200:spy\nnogroup:x:65534:\n";
pub(crate) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

/// The configuration of an image for the container's first process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// Repository and tag.
    pub name: String,
    /// The program and its first arguments.
    pub entrypoint: Vec<String>,
    /// Arguments that a container may replace.
    pub command: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// User name or id with an optional group; empty: root.
    pub user: String,
    /// The signal that asks it to stop; empty: SIGTERM.
    pub stop_signal: String,
    /// Paths of volumes that the image declares.
    pub volumes: Vec<String>,
}

impl Image {
    /// An image `name` that runs `command`.
    pub fn new(name: &str, command: &[&str]) -> Self {
        let command = command.iter().map(|part| (*part).to_owned()).collect();
        Self { name: name.to_owned(), command, ..Self::default() }
    }
}

/// [`BUSYBOX_IMAGE`] and [`PAUSE_IMAGE`].
pub fn standard_images() -> Vec<Image> {
    let sleep = ["/bin/busybox", "sleep", "2147483647"];
    vec![
        Image::new(BUSYBOX_IMAGE, &["/bin/sh"]),
        Image {
            name: PAUSE_IMAGE.to_owned(),
            entrypoint: sleep.iter().map(|part| (*part).to_owned()).collect(),
            user: "65534:65534".to_owned(),
            ..Image::default()
        },
    ]
}

/// Writes an archive with `images`, which share one busybox layer, for `ctr images import`.
pub fn write_archive(path: &Path, images: &[Image]) -> anyhow::Result<()> {
    let layer = standard_layer()?;
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    write_layout(file, &layer, images).with_context(|| format!("cannot write {}", path.display()))
}

/// The layer that all images have.
pub(crate) fn standard_layer() -> anyhow::Result<Vec<u8>> {
    let busybox = Component::Busybox.find()?;
    let applets = applets(&busybox)?;
    let program = fs::read(&busybox).with_context(|| format!("cannot read {}", busybox.display()))?;
    Ok(busybox_layer(&program, &applets)?)
}

/// A layer of one file with so many random bytes, which no other image has.
pub(crate) fn random_layer(bytes: usize) -> anyhow::Result<Vec<u8>> {
    let mut data = vec![0; bytes];
    fastrand::fill(&mut data);
    let mut layer = Builder::new(Vec::new());
    append(&mut layer, "random", EntryType::Regular, 0o644, 0, &data)?;
    Ok(layer.into_inner()?)
}

/// `sha256:` and the digest of `data` in hexadecimal digits.
pub(crate) fn digest(data: &[u8]) -> String {
    let hex: String = Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// The applets of `busybox`, as paths below the image's root.
fn applets(busybox: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new(busybox)
        .arg("--list")
        .output()
        .with_context(|| format!("cannot run {} --list", busybox.display()))?;
    ensure!(output.status.success(), "{} --list ended with {}", busybox.display(), output.status);
    let list = String::from_utf8(output.stdout).context("busybox --list printed no text")?;
    Ok(list.lines().filter(|name| *name != "busybox").map(|name| format!("bin/{name}")).collect())
}

/// The root filesystem as a tar layer, the same bytes for the same busybox.
fn busybox_layer(busybox: &[u8], applets: &[String]) -> std::io::Result<Vec<u8>> {
    let mut layer = Builder::new(Vec::new());
    // With a read-only root the runtime can make no mount points, so they are all here.
    for folder in ["bin", "dev", "etc", "home", "proc", "root", "run", "sys", "usr", "var", "var/log"] {
        append(&mut layer, folder, EntryType::Directory, 0o755, 0, &[])?;
    }
    append(&mut layer, "home/app", EntryType::Directory, 0o755, 1000, &[])?;
    append(&mut layer, "tmp", EntryType::Directory, 0o1777, 0, &[])?;
    append(&mut layer, "bin/busybox", EntryType::Regular, 0o755, 0, busybox)?;
    append(&mut layer, "etc/passwd", EntryType::Regular, 0o644, 0, PASSWD.as_bytes())?;
    append(&mut layer, "etc/group", EntryType::Regular, 0o644, 0, GROUP.as_bytes())?;
    for file in ["etc/hosts", "etc/hostname", "etc/resolv.conf"] {
        append(&mut layer, file, EntryType::Regular, 0o644, 0, &[])?;
    }
    for applet in applets {
        let mut header = header(EntryType::Symlink, 0o777, 0, 0);
        layer.append_link(&mut header, applet, "/bin/busybox")?;
    }
    layer.into_inner()
}

fn append<W: std::io::Write>(
    archive: &mut Builder<W>,
    path: &str,
    kind: EntryType,
    mode: u32,
    owner: u64,
    data: &[u8],
) -> std::io::Result<()> {
    let mut header = header(kind, mode, owner, data.len() as u64);
    archive.append_data(&mut header, path, data)
}

fn header(kind: EntryType, mode: u32, owner: u64, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(owner);
    header.set_gid(owner);
    header.set_mtime(0);
    header.set_size(size);
    header
}

/// The image layout: `oci-layout`, `index.json` and the blobs, each named by its digest.
fn write_layout(out: impl std::io::Write, layer: &[u8], images: &[Image]) -> anyhow::Result<()> {
    let mut archive = Builder::new(out);
    let layout = json!({"imageLayoutVersion": "1.0.0"}).to_string();
    append(&mut archive, "oci-layout", EntryType::Regular, 0o644, 0, layout.as_bytes())?;
    let layer_digest = append_blob(&mut archive, layer)?;
    let mut manifests = Vec::new();
    for image in images {
        let config = config(image, &[&layer_digest]).to_string();
        let config_digest = append_blob(&mut archive, config.as_bytes())?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": config_digest,
                "size": config.len(),
            },
            "layers": [{
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": layer_digest,
                "size": layer.len(),
            }],
        })
        .to_string();
        let digest = append_blob(&mut archive, manifest.as_bytes())?;
        let (_, tag) = image.name.rsplit_once(':').context("an image name needs a tag")?;
        manifests.push(json!({
            "mediaType": MANIFEST_TYPE,
            "digest": digest,
            "size": manifest.len(),
            "annotations": {
                "io.containerd.image.name": image.name,
                "org.opencontainers.image.ref.name": tag,
            },
        }));
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    })
    .to_string();
    append(&mut archive, "index.json", EntryType::Regular, 0o644, 0, index.as_bytes())?;
    archive.finish()?;
    Ok(())
}

/// Appends a blob and returns its digest. An archive may hold the same blob twice.
fn append_blob<W: std::io::Write>(archive: &mut Builder<W>, data: &[u8]) -> std::io::Result<String> {
    let digest = digest(data);
    append(archive, &format!("blobs/{}", digest.replace(':', "/")), EntryType::Regular, 0o644, 0, data)?;
    Ok(digest)
}

/// The image configuration (image-spec, "image configuration"), with the defaults of a container.
pub(crate) fn config(image: &Image, layer_digests: &[&str]) -> Value {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let mut env = vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()];
    env.extend(image.env.iter().cloned());
    let mut process = json!({"Env": env, "WorkingDir": "/"});
    let mut set = |key: &str, value: Value, wanted: bool| {
        if wanted {
            process[key] = value;
        }
    };
    set("Entrypoint", json!(image.entrypoint), !image.entrypoint.is_empty());
    set("Cmd", json!(image.command), !image.command.is_empty());
    set("User", json!(image.user), !image.user.is_empty());
    set("StopSignal", json!(image.stop_signal), !image.stop_signal.is_empty());
    let volumes: serde_json::Map<String, Value> =
        image.volumes.iter().map(|path| (path.clone(), json!({}))).collect();
    set("Volumes", Value::Object(volumes), !image.volumes.is_empty());
    json!({
        "architecture": architecture,
        "os": "linux",
        "config": process,
        "rootfs": {"type": "layers", "diff_ids": layer_digests},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "keelson", "comment": image.name}],
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;

    fn entries(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(archive);
        let read = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
            let mut entry = entry.unwrap();
            let mut data = Vec::new();
            entry.read_to_end(&mut data).unwrap();
            (entry.path().unwrap().to_str().unwrap().to_owned(), data)
        };
        archive.entries().unwrap().map(read).collect()
    }

    #[test]
    fn the_layout_names_each_blob_by_its_digest() {
        let mut out = Vec::new();
        write_layout(&mut out, b"a layer", &standard_images()).unwrap();
        let entries = entries(&out);
        let index: Value = serde_json::from_slice(&entries["index.json"]).unwrap();
        assert_eq!(index["manifests"][1]["annotations"]["io.containerd.image.name"], PAUSE_IMAGE);
        for (path, data) in entries.iter().filter(|(path, _)| path.starts_with("blobs/")) {
            let hex: String = Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(*path, format!("blobs/sha256/{hex}"));
        }
        let digest = index["manifests"][0]["digest"].as_str().unwrap().replace("sha256:", "blobs/sha256/");
        let manifest: Value = serde_json::from_slice(&entries[&digest]).unwrap();
        assert_eq!(manifest["layers"][0]["size"], 7);
    }

    #[test]
    fn the_layer_has_the_applets_the_users_and_the_mount_points() {
        let layer = busybox_layer(b"\x7fELF", &["bin/sh".to_owned()]).unwrap();
        let entries = entries(&layer);
        for path in ["bin/busybox", "bin/sh", "tmp", "proc", "etc/resolv.conf"] {
            assert!(entries.contains_key(path), "{path} is missing in {:?}", entries.keys());
        }
        assert!(String::from_utf8_lossy(&entries["etc/passwd"]).contains("app:x:1000:"));
    }

    #[test]
    fn an_unset_part_of_the_configuration_is_left_out() {
        let config = config(&Image::new("x:1", &["sh"]), &["sha256:0"]);
        assert_eq!(config["config"]["Cmd"], json!(["sh"]));
        assert!(config["config"].get("Entrypoint").is_none());
        assert!(config["config"].get("User").is_none());
    }
}
