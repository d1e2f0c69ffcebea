"""Rallypoint behind the interfaces of other libraries."""
