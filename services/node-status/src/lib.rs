//! Tells the control plane about this node.
