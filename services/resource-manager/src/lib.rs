//! Gives pods their share of the machine.
