//! The pure decisions of volume-manager: no clock, no I/O, no runtime.
