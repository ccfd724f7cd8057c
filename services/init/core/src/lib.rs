//! The pure decisions of init: no clock, no I/O, no runtime.
