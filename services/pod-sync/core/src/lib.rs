//! The pure decisions of pod-sync: no clock, no I/O, no runtime.
