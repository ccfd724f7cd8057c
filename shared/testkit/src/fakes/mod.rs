//! One scriptable fake per gRPC service: our own ones, the container runtime's and a CSI driver's.
//!
//! A fake has one public field per method. It records the requests of the method, which a test can read or await, and
//! answers as the test has set: a response, an error, a function of the request, or a stream that the test pushes
//! messages into and breaks. A [`Gate`] holds calls back, and [`cut_off`] breaks them off. A method without an answer is UNIMPLEMENTED. The field `calls`
//! has the names of the called methods in order. [`FakeServer`] serves fakes at the socket of a service.
//!
//! `Events` has no fake here: [`keelson_service_kit::EventRing`] implements it and is filled by the test.

mod conversation;
mod cri;
mod csi;
mod cut_off;
mod define;
mod gate;
mod hub;
mod method;
mod recorder;
mod runtime_shim;
mod script;
mod server;
mod services;

pub use conversation::{Bidi, Conversation, SyncMessage};
pub use cri::{FakeContainerdContent, FakeCriImages, FakeCriRuntime};
pub use csi::{FakeCsiNode, FakePluginRegistration};
pub use cut_off::cut_off;
pub use gate::Gate;
pub use hub::MessageStream;
pub use method::{ServerStream, StreamAnswer, Unary};
pub use recorder::Recorder;
pub use runtime_shim::FakeRuntimeShim;
pub use server::FakeServer;
pub use services::{
    FakeAdmin, FakeNodeStatus, FakePodConfig, FakePodSync, FakeResourceManager, FakeRuntime, FakeSupervisor,
    FakeVolumeManager,
};

#[cfg(test)]
mod tests;
