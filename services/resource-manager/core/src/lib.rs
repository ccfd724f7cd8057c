//! The pure decisions of resource-manager: no clock, no I/O, no runtime.
