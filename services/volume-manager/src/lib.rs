//! Gives pods their volumes.
