//! A private registry (Debian's docker-registry) on loopback, with generated images.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::json;

use crate::containerd::{open_log, tail};
use crate::image::{MANIFEST_TYPE, config, digest, random_layer, standard_layer};
use crate::process::ProcessId;
use crate::scratch::remember;
use crate::{Component, Image, Remains};

/// How long the registry may take to listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The user of a registry with a password.
const USER: &str = "ann";
/// bcrypt of `hunter2`.
const PASSWORD_HASH: &str = "$2b$04$Kqt4KyvG/ISgNNFZ/jhiT.uOCYGyeoqRk9mTdLDLdTwtr6sekeGqy";

/// A running registry, ended when dropped. Its images stay as long as its folder.
#[derive(Debug)]
pub struct Registry {
    dir: PathBuf,
    address: SocketAddr,
    child: Child,
}

impl Registry {
    /// The user that may pull from [`Registry::start_private`], and the password.
    pub const LOGIN: (&str, &str) = (USER, "hunter2");

    /// Starts one that is open to all, in a folder that may hold images already.
    pub fn start(dir: &Path) -> anyhow::Result<Self> {
        Self::launch(dir, None)
    }

    /// Starts one that asks for [`Registry::LOGIN`].
    pub fn start_private(dir: &Path) -> anyhow::Result<Self> {
        Self::launch(dir, Some(format!("{USER}:{PASSWORD_HASH}\n")))
    }

    fn launch(dir: &Path, users: Option<String>) -> anyhow::Result<Self> {
        let program = Component::DockerRegistry.find()?;
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let mut settings = json!({
            "version": "0.1",
            "log": {"level": "info"},
            "storage": {
                "filesystem": {"rootdirectory": storage(dir)},
                "maintenance": {"uploadpurging": {"enabled": false}},
            },
            // The kernel chooses the port, and the log reports it.
            "http": {"addr": "127.0.0.1:0", "secret": "not shared with others"},
        });
        if let Some(users) = users {
            let path = dir.join("htpasswd");
            fs::write(&path, users).with_context(|| format!("cannot write {}", path.display()))?;
            settings["auth"] = json!({"htpasswd": {"realm": "keelson", "path": path}});
        }
        let (path, log) =
            (dir.join("config.yml"), dir.join(format!("registry-{:08x}.log", fastrand::u32(..))));
        // JSON is YAML, too.
        fs::write(&path, settings.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
        let output = open_log(&log)?;
        let mut child = Command::new(program)
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot run docker-registry")?;
        let processes = ProcessId::of(child.id()).into_iter().collect();
        remember(dir, &Remains { processes, ..Remains::default() })?;
        match address_in(&log, &mut child) {
            Ok(address) => Ok(Self { dir: dir.to_owned(), address, child }),
            Err(error) => {
                // It may have ended by itself.
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// The address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Kills the registry (SIGKILL). Its images remain in the folder.
    pub fn kill(self) {}

    /// Puts an image into the repository `name`, with a layer of `random` bytes that is nowhere else, and returns the
    /// digest of its manifest.
    pub fn put(&self, name: &str, tag: &str, random: usize) -> anyhow::Result<String> {
        let root = storage(&self.dir).join("docker/registry/v2");
        let repository = root.join("repositories").join(name);
        let layers = [standard_layer()?, random_layer(random)?];
        let digests = layers.iter().map(|layer| digest(layer)).collect::<Vec<_>>();
        let image = Image::new(&format!("{name}:{tag}"), &["/bin/sh"]);
        let config = config(&image, &digests.iter().map(String::as_str).collect::<Vec<_>>()).to_string();
        let entries = layers.iter().zip(&digests).map(|(layer, digest)| {
            json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": digest,
                "size": layer.len(),
            })
        });
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest(config.as_bytes()),
                "size": config.len(),
            },
            "layers": entries.collect::<Vec<_>>(),
        })
        .to_string();
        for blob in layers.iter().map(Vec::as_slice).chain([config.as_bytes()]) {
            let digest = put_blob(&root, blob)?;
            put_link(&repository.join("_layers").join(digest.replace(':', "/")), &digest)?;
        }
        let digest = put_blob(&root, manifest.as_bytes())?;
        let path = digest.replace(':', "/");
        put_link(&repository.join("_manifests/revisions").join(&path), &digest)?;
        put_link(&repository.join("_manifests/tags").join(tag).join("index").join(&path), &digest)?;
        put_link(&repository.join("_manifests/tags").join(tag).join("current"), &digest)?;
        Ok(digest)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // Both fail only when it has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn storage(dir: &Path) -> PathBuf {
    dir.join("storage")
}

/// A blob in the registry's own layout.
fn put_blob(root: &Path, data: &[u8]) -> anyhow::Result<String> {
    let digest = digest(data);
    let hex = digest.trim_start_matches("sha256:");
    put(&root.join("blobs/sha256").join(&hex[..2]).join(hex).join("data"), data)?;
    Ok(digest)
}

fn put_link(folder: &Path, digest: &str) -> anyhow::Result<()> {
    put(&folder.join("link"), digest.as_bytes())
}

fn put(path: &Path, data: &[u8]) -> anyhow::Result<()> {
    let folder = path.parent().context("a file is in a folder")?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, data))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Waits until the registry's log says where it listens.
fn address_in(log: &Path, child: &mut Child) -> anyhow::Result<SocketAddr> {
    let deadline = Instant::now() + START_LIMIT;
    loop {
        let text = fs::read_to_string(log).unwrap_or_default();
        if let Some(address) = listening(&text) {
            return Ok(address);
        }
        if let Some(status) = child.try_wait()? {
            bail!("docker-registry has ended with {status}:\n{}", tail(log, 30));
        }
        if Instant::now() >= deadline {
            bail!("docker-registry does not listen:\n{}", tail(log, 30));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The address in `… msg="listening on 127.0.0.1:34567" …`.
fn listening(log: &str) -> Option<SocketAddr> {
    let (_, rest) = log.split_once("listening on ")?;
    // Only a whole line has the whole port.
    let (line, _) = rest.split_once('\n')?;
    line.split(|c: char| c == '"' || c == ',' || c.is_whitespace()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_read_from_the_log_once_its_line_is_whole() {
        let line = "time=\"x\" level=info msg=\"listening on 127.0.0.1:34567\" go.version=go1";
        assert_eq!(listening(line), None);
        assert_eq!(listening(&format!("a\n{line}\n")), Some("127.0.0.1:34567".parse().unwrap()));
        assert_eq!(listening("level=info msg=x\n"), None);
    }
}
