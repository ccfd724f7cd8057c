//! The loop `node-configuration`: reports init's status of the node configuration when it changes.
//!
//! Without an init nobody can try a configuration or roll it back, so none is applied: this service then reports a refusal in
//! init's place, for any value of the key, even before there is one.

use std::io;
use std::path::Path;
use std::sync::Arc;

use keelson_config::ConfigurationStatus;
use keelson_service_kit::{Context, LoopHandle};

use super::EtcdWriter;

/// The largest status that is read, in bytes: more than init ever writes.
const MAX_BYTES: usize = 4 << 20;
/// The refusal that is reported without init; the command shows its first line.
const NO_INIT: &str = "\
no init runs on this node to try a configuration, so none is taken from the key
its configuration is in files: change /etc/keelson/kubelet.yaml, or another file that `keelson-init --resolve-only` reads
or run the agent under init, as kubelet.service and `keelson up` do";

/// Checks the status at each heartbeat, until the shutdown.
pub(super) async fn run(writer: Arc<EtcdWriter>, ctx: Context, has_init: bool) {
    let handle = ctx.progress.register("node-configuration");
    let path = ctx.config.paths.configuration_status();
    let mut last = None;
    loop {
        handle.tick();
        match current_status(&path, has_init).await {
            Ok(now) if last.as_ref() != Some(&now) => {
                writer.put_configuration(now.clone());
                last = Some(now);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot read the status of the node configuration")
            }
        }
        // Cancel-safe: neither arm holds anything.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

/// The status to report now; `None`: none. A file that an earlier init has left is ignored on a node without init.
async fn current_status(path: &Path, has_init: bool) -> io::Result<Option<Vec<u8>>> {
    if has_init {
        return read(path).await;
    }
    let refusal = ConfigurationStatus::refusing_all(NO_INIT.to_owned());
    Ok(Some(serde_json::to_vec(&refusal)?))
}

/// The status that init has written; `None`: the key has no value.
async fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match tokio::fs::read(path).await {
        Ok(bytes) if bytes.len() > MAX_BYTES => Err(io::Error::other("it is too large")),
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Decodes a status; `None` if there is none or it is invalid.
pub(super) fn decode(value: Option<&Vec<u8>>) -> Option<ConfigurationStatus> {
    serde_json::from_slice(value?).ok()
}
