"""Bytes between processes: transports, frames, control messages, links. Data from the network is not trusted (I9)."""
