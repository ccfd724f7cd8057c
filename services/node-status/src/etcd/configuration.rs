//! The loop `node-configuration`: what init tells of the configuration under the node's key, handed on when it changes.

use std::io;
use std::path::Path;
use std::sync::Arc;

use keelson_config::ConfigurationStatus;
use keelson_service_kit::{Context, LoopHandle};

use super::EtcdWriter;
use super::queue::Job;

/// More than init ever tells.
const MOST: usize = 4 << 20;

/// Looks at each heartbeat, until the shutdown.
pub(super) async fn run(writer: Arc<EtcdWriter>, ctx: Context) {
    let turn = ctx.progress.register("node-configuration");
    let path = ctx.config.paths.configuration_status();
    let mut told = None;
    loop {
        turn.tick();
        match read(&path).await {
            Ok(now) if told.as_ref() != Some(&now) => {
                writer.put(Job::Configuration(now.clone()), false);
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
