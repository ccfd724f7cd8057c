//! iscsi volumes (volumes.md §10.4).
//!
//! | module | answers |
//! |---|---|
//! | [`portal`] | how portals are written in full, and in which other spellings they occur |
//! | [`disk`] | which disk a volume's source means, and what cannot be one |
//! | [`folder`] | how the global folders of a disk are called, and what the name of a folder says |
//! | [`record`] | what `iscsi.json` contains |
//! | [`commands`] | which iscsiadm calls log in and out, and what their exit codes mean |
//! | [`device`] | which session, which link and which device belong to a disk |
//! | [`rounds`] | whether another round of logins follows |
//! | [`logout`] | from which portals the node logs out when a volume is unmounted |

pub mod commands;
pub mod device;
pub mod disk;
pub mod folder;
pub mod logout;
pub mod portal;
pub mod record;
pub mod rounds;
