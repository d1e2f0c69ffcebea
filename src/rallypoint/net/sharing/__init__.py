"""Messages of the caches of data sets that hosts share."""
