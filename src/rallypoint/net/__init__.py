"""Bytes between processes: transports, frames, control messages, links. Nothing from the network is trusted (I9)."""
