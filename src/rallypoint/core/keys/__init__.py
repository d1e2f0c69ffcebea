"""Decides for the client side of a key-value store (`job.store`): what to send, when, and again after a death."""
