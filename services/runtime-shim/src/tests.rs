//! What the unit tests of several modules share. Nothing of it is in the product.

pub(crate) mod fake_runtime;
pub(crate) mod fake_streaming_server;
pub(crate) mod sync_messages;
