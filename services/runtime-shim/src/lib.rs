//! Speaks to the container runtime.
