//! The loop `node-configuration`: what init tells of the configuration under the node's key, handed on when it changes.
//!
//! Where no init keeps the services, nobody tries a configuration or takes one back, so none is taken: that is told in
//! init's place, of whatever may stand under the key, before anybody has put something there.

use std::io;
use std::path::Path;
use std::sync::Arc;

use keelson_config::ConfigurationStatus;
use keelson_service_kit::{Context, LoopHandle};

use super::EtcdWriter;

/// More than init ever tells.
const MOST: usize = 4 << 20;
/// What is told without init; the command shows its first line.
const WITHOUT_INIT: &str = "\
no init runs on this node to try it, so nothing is taken from the key
the configuration is in files there: change /etc/keelson/kubelet.yaml, or what else `keelson-init --resolve-only` reads
or run the agent under init, as kubelet.service and `keelson up` do";

/// Looks at each heartbeat, until the shutdown.
pub(super) async fn run(writer: Arc<EtcdWriter>, ctx: Context, is_kept_by_init: bool) {
    let turn = ctx.progress.register("node-configuration");
    let path = ctx.config.paths.configuration_status();
    let mut told = None;
    loop {
        turn.tick();
        match what_is_told(&path, is_kept_by_init).await {
            Ok(now) if told.as_ref() != Some(&now) => {
                writer.put_configuration(now.clone());
                told = Some(now);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot tell of the node configuration")
            }
        }
        // Cancel-safe: neither arm holds anything.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

/// What there is to tell now; `None`: nothing. A file that an init has left behind says nothing of a node that has none.
async fn what_is_told(path: &Path, is_kept_by_init: bool) -> io::Result<Option<Vec<u8>>> {
    if is_kept_by_init {
        return read(path).await;
    }
    let refusal = ConfigurationStatus::refusing_all(WITHOUT_INIT.to_owned());
    Ok(Some(serde_json::to_vec(&refusal)?))
}

/// What init tells; `None`: nothing stands under the key.
async fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match tokio::fs::read(path).await {
        Ok(bytes) if bytes.len() > MOST => Err(io::Error::other("it is too large")),
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What a value under the key says; `None` for one that is not there or says nothing.
pub(super) fn decoded(value: Option<&Vec<u8>>) -> Option<ConfigurationStatus> {
    serde_json::from_slice(value?).ok()
}
