//! What the services that receive pod-sync's `Sync` stream and work towards it per pod have in common.
//!
//! | module | does |
//! |---|---|
//! | `front` | the gRPC side: reads `Sync` streams, asks the manager, waits for pods |
//! | `pods` | the manager's side: the set of wanted pods, a slot and a worker per pod |
//! | `orders` | the worker's side: what it is to bring about, and when it turns next |
//! | `runtime` | asks runtime-shim whether anything of a pod still runs |
//! | `wire` | the parts of a desire that are the same for every callee |
//! | `testing` | with the feature `testing`: a fake runtime-shim and what else tests of a callee need |
//!
//! A callee has one task, its manager, that owns a [`Pods`]: it takes the [`Command`]s of the gRPC side and of
//! the workers, and acts itself on the [`News`] that come of them. What a pod's worker has
//! brought about is in the pod's view, for which callers wait.

mod front;
mod orders;
mod pods;
mod runtime;
#[cfg(feature = "testing")]
pub mod testing;
pub mod wire;

pub use front::{Acks, Front, Item, NAMED_WITHIN, becomes, not_named};
pub use orders::{Assignment, Next, Orders, Turn, still_runs};
pub use pods::{Command, News, Pods, QUEUE, Slot, View};
pub use runtime::Runtime;
