"""What replicas keep on a worker from round to round under local steps."""
