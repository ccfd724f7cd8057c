//! Whole-agent tests live in `tests/tests`.
