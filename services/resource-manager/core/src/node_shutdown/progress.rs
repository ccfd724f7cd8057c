//! What to do when the machine prepares for a shutdown, and when it no longer does (node-and-api.md §11).

use crate::admit::Rejection;

/// The rejection of a pod while the node shuts down. It is temporary: a pod that no controller replaces, such as a static pod,
/// waits until the shutdown is cancelled or the machine has booted again.
pub fn rejection() -> Rejection {
    Rejection {
        reason: "NodeShutdown".to_owned(),
        message: "Pod was rejected as the node is shutting down.".to_owned(),
        temporary: true,
    }
}

/// How far a shutdown is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Progress {
    /// None is under way.
    #[default]
    Running,
    /// Pods are being ended, group by group.
    Ending,
    /// All groups have had their time. The machine may stop at any moment.
    Ended,
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// logind was reached, at the start or after its connection was lost.
    Connected {
        /// Its property `PreparingForShutdown`.
        preparing: bool,
        /// The state file shows that this agent began to end pods since the machine was booted, and did not complete it
        /// ([`super::times::ShutdownTimes::is_unfinished`]).
        unfinished: bool,
    },
    /// logind's signal `PrepareForShutdown`.
    Preparing(bool),
    /// The last group has ended, or had its time.
    GroupsEnded,
}

/// What to do, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Take an inhibitor that delays a shutdown, in place of one that is held.
    Inhibit,
    /// Let the shutdown continue: release the inhibitor.
    Release,
    /// Record on the Node that a shutdown has begun.
    RecordShutdown,
    /// Record on the Node that it was cancelled.
    RecordCancellation,
    /// Store that pods are being ended since now.
    StoreStart,
    /// Store that the end of pods was completed, or stopped, now.
    StoreEnd,
    /// End the pods that have not ended, group by group.
    EndGroups,
    /// End no further group. Pods that have an order still end.
    StopEnding,
}

impl Action {
    /// The message of the event `Shutdown` on the Node; none when the action records none.
    pub const fn event_message(self) -> Option<&'static str> {
        match self {
            Self::RecordShutdown => Some("Shutdown manager detected shutdown event"),
            Self::RecordCancellation => Some("Shutdown manager detected shutdown cancellation"),
            Self::Inhibit
            | Self::Release
            | Self::StoreStart
            | Self::StoreEnd
            | Self::EndGroups
            | Self::StopEnding => None,
        }
    }
}

impl Progress {
    /// Whether the node is shutting down: new pods are rejected, and the node is not ready.
    pub const fn is_shutting_down(self) -> bool {
        match self {
            Self::Running => false,
            Self::Ending | Self::Ended => true,
        }
    }

    /// Decides what follows from `input`: the next progress, and the actions that lead to it.
    ///
    /// A repeated signal changes nothing. A restarted agent that finds its own unfinished shutdown completes it without a
    /// second event. While the connection to logind is lost, the progress does not change.
    ///
    /// Parity: as the kubelet, except that a cancellation is acted on at once; a kubelet first ends all groups. A kubelet
    /// that restarts during a shutdown does not know of it.
    pub fn step(self, input: Input) -> (Self, &'static [Action]) {
        use Action::{
            EndGroups, Inhibit, RecordCancellation, RecordShutdown, StopEnding, StoreEnd, StoreStart,
        };
        let (preparing, unfinished) = match input {
            Input::Connected { preparing, unfinished } => (preparing, unfinished),
            Input::Preparing(preparing) => (preparing, false),
            Input::GroupsEnded => return self.groups_ended(),
        };
        match (self, preparing) {
            (Self::Running, true) if unfinished => (Self::Ending, &[EndGroups]),
            (Self::Running, true) => (Self::Ending, &[RecordShutdown, StoreStart, EndGroups]),
            (Self::Running, false) if unfinished => (Self::Running, &[RecordCancellation, StoreEnd, Inhibit]),
            (Self::Running, false) => (Self::Running, &[Inhibit]),
            (Self::Ending | Self::Ended, true) => (self, &[]),
            (Self::Ending, false) => (Self::Running, &[RecordCancellation, StopEnding, StoreEnd, Inhibit]),
            (Self::Ended, false) => (Self::Running, &[RecordCancellation, Inhibit]),
        }
    }

    const fn groups_ended(self) -> (Self, &'static [Action]) {
        match self {
            Self::Ending => (Self::Ended, &[Action::StoreEnd, Action::Release]),
            // The shutdown was cancelled while the last group ended.
            Self::Running | Self::Ended => (self, &[]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Action::*;
    use super::Progress::*;
    use super::*;

    const fn connected(preparing: bool, unfinished: bool) -> Input {
        Input::Connected { preparing, unfinished }
    }

    #[test]
    fn a_shutdown_is_delayed_until_the_groups_have_ended_and_forgotten_when_cancelled() {
        type Case = (Progress, Input, Progress, &'static [Action]);
        let begin: &[Action] = &[RecordShutdown, StoreStart, EndGroups];
        let cases: [Case; 20] = [
            (Running, connected(false, false), Running, &[Inhibit]),
            (Running, connected(true, false), Ending, begin),
            (Running, connected(true, true), Ending, &[EndGroups]),
            (Running, connected(false, true), Running, &[RecordCancellation, StoreEnd, Inhibit]),
            (Running, Input::Preparing(true), Ending, begin),
            (Running, Input::Preparing(false), Running, &[Inhibit]),
            (Running, Input::GroupsEnded, Running, &[]),
            (Ending, Input::Preparing(true), Ending, &[]),
            (Ending, connected(true, false), Ending, &[]),
            (Ending, connected(true, true), Ending, &[]),
            (Ending, Input::Preparing(false), Running, &[RecordCancellation, StopEnding, StoreEnd, Inhibit]),
            (Ending, connected(false, false), Running, &[RecordCancellation, StopEnding, StoreEnd, Inhibit]),
            (Ending, connected(false, true), Running, &[RecordCancellation, StopEnding, StoreEnd, Inhibit]),
            (Ending, Input::GroupsEnded, Ended, &[StoreEnd, Release]),
            (Ended, Input::Preparing(true), Ended, &[]),
            (Ended, connected(true, false), Ended, &[]),
            (Ended, connected(true, true), Ended, &[]),
            (Ended, Input::Preparing(false), Running, &[RecordCancellation, Inhibit]),
            (Ended, connected(false, false), Running, &[RecordCancellation, Inhibit]),
            (Ended, Input::GroupsEnded, Ended, &[]),
        ];
        for (progress, input, next, actions) in cases {
            assert_eq!(progress.step(input), (next, actions), "{progress:?} {input:?}");
        }
    }

    #[test]
    fn pods_are_rejected_from_the_signal_until_the_cancellation() {
        let refused = [Running, Ending, Ended].map(Progress::is_shutting_down);
        assert_eq!(refused, [false, true, true]);
        let Rejection { reason, message, temporary } = rejection();
        assert_eq!((reason.as_str(), temporary), ("NodeShutdown", true));
        assert_eq!(message, "Pod was rejected as the node is shutting down.");
    }

    #[test]
    fn only_the_begin_and_the_cancellation_have_an_event() {
        let with_event: Vec<_> = [
            Inhibit,
            Release,
            RecordShutdown,
            RecordCancellation,
            StoreStart,
            StoreEnd,
            EndGroups,
            StopEnding,
        ]
        .into_iter()
        .filter_map(Action::event_message)
        .collect();
        assert_eq!(
            with_event,
            ["Shutdown manager detected shutdown event", "Shutdown manager detected shutdown cancellation"]
        );
    }
}
