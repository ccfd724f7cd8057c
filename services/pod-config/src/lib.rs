//! Answers what should run here, for everyone.
