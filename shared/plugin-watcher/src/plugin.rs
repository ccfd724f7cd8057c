//! What a plugin says about itself, and who registers it.

use std::path::PathBuf;

use futures_util::future::BoxFuture;

/// A plugin, from its answer to `GetInfo`. Nothing in it is checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// `CSIPlugin`, `DevicePlugin` or `DRAPlugin`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// The socket that it is called on.
    pub endpoint: PathBuf,
    /// The versions of its API.
    pub supported_versions: Vec<String>,
    /// The socket that it registers on.
    pub socket: PathBuf,
}

/// Registers the plugins of one kind.
pub trait PluginHandler: Send + Sync + 'static {
    /// Registers a plugin, or refuses it with a text that the plugin gets. It is called again later if it refuses. The
    /// future is dropped when the plugin's socket disappears.
    fn register<'a>(&'a self, plugin: &'a Plugin) -> BoxFuture<'a, Result<(), String>>;

    /// Unregisters a plugin whose socket is gone or was replaced. It is called after each [`Self::register`], even if
    /// that has refused or was dropped, and must then change nothing of other plugins.
    fn unregister<'a>(&'a self, plugin: &'a Plugin) -> BoxFuture<'a, ()>;
}
