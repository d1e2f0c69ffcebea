"""The aggregator's decisions: what to merge, what to send upstream, what to hand down."""
