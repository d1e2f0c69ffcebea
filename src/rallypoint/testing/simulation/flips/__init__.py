"""Servers that audit themselves on a simulated cluster, and bits that flip in their memory."""
