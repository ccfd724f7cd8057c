//! node-status as a process of its own.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use keelson_config::{Config, ConfigExtras};
use keelson_service_kit::store_config;

/// A process that is killed at the end of the test.
pub struct Process(Child);

impl Process {
    /// Starts node-status with this configuration, which is written into `folder`.
    pub fn start(folder: &Path, config: &Config) -> Self {
        let file = folder.join("config.json");
        store_config(&file, config, ConfigExtras::default()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_keelson-node-status"));
        command.arg("--config").arg(file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
