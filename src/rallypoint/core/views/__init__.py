"""Views on their way: what one says that the one before did not."""
