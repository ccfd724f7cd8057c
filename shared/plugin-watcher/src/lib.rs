//! Finds the plugins that register with a socket in a folder such as `<root>/plugins_registry`, and has them registered
//! (volumes.md §11.1, runtime-and-resources.md §11.1).
//!
//! A plugin serves `pluginregistration.Registration` on its socket. The watcher asks it who it is, has the handler of its
//! type register it, and answers. A plugin is unregistered when its socket disappears, and registered again when the
//! socket is replaced. Each socket has a task of its own, so that a plugin that hangs holds up no other one.
//!
//! | module | does |
//! |---|---|
//! | `watcher` | follows the folder, and keeps a task per socket |
//! | `registration` | the task of a socket: registers, retries, unregisters |
//! | `folder` | the sockets in the folder, and inotify(7) on its subfolders |
//! | `plugin` | what a plugin says about itself, and the interface of handlers |
//! | `metrics` | `plugin_manager_total_plugins` |
//!
//! Nothing is stored: after a restart the sockets are still there, and the plugins are registered again.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

mod folder;
mod metrics;
mod plugin;
mod registration;
mod watcher;

pub use plugin::{Plugin, PluginHandler};
pub use watcher::PluginWatcher;
