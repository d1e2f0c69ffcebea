"""``rallypoint import``: a checkpoint of plain training becomes the snapshot with which a run begins."""
