//! The pure decisions of runtime-shim: no clock, no I/O, no runtime.
