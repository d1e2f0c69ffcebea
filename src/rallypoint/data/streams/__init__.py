"""Iterables as data: each part is read from its beginning on, and its items are numbered as they come."""
