//! What a group of settings is.

use crate::outcome::Outcome;
use crate::reader::Reader;

/// The configuration files.
#[derive(Debug)]
pub(crate) struct Files<'a> {
    /// The KubeletConfiguration, merged from all files and flags.
    pub(crate) kubelet: Reader<'a>,
    /// Whether there is a KubeletConfiguration; without one, the default thresholds do not apply.
    pub(crate) has_kubelet: bool,
    /// The KeelsonConfiguration.
    pub(crate) keelson: Reader<'a>,
}

/// A group of settings: it reads its fields, and resolves its part of the configuration.
pub(crate) trait Settings: Sized {
    /// Reads the fields of the group, and reports those that are invalid.
    fn read(files: &mut Files<'_>) -> Self;

    /// Checks the rules of its fields that have no effect here yet, and of fields that exclude or need each other.
    fn check(_kubelet: &mut Reader<'_>) {}

    /// Applies the fields and flags to the configuration.
    fn resolve(self, out: &mut Outcome<'_>);
}

/// Fields that were read, ready to be applied.
trait Apply {
    fn apply(self: Box<Self>, out: &mut Outcome<'_>);
}

impl<S: Settings> Apply for S {
    fn apply(self: Box<Self>, out: &mut Outcome<'_>) {
        self.resolve(out);
    }
}

/// The fields that a group has read.
pub(crate) struct ReadSettings(Box<dyn Apply>);

impl ReadSettings {
    /// Applies them to the configuration.
    pub(crate) fn resolve(self, out: &mut Outcome<'_>) {
        self.0.apply(out);
    }
}

/// A group, as the composer lists it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group {
    /// See [`Settings::read`].
    pub(crate) read: fn(&mut Files<'_>) -> ReadSettings,
    /// See [`Settings::check`].
    pub(crate) check: fn(&mut Reader<'_>),
}

impl Group {
    /// The group whose fields are `S`.
    pub(crate) const fn of<S: Settings + 'static>() -> Self {
        Self { read: |files| ReadSettings(Box::new(S::read(files))), check: S::check }
    }
}
