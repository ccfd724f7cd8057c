//! Keeps the other services running.
