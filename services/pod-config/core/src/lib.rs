//! The pure decisions of pod-config: no clock, no I/O, no runtime.
