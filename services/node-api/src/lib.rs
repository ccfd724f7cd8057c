//! Answers the network.
