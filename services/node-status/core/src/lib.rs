//! The pure decisions of node-status: no clock, no I/O, no runtime.
