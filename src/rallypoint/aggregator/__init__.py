"""The aggregator: merges the contributions of workers near it, sends fewer upstream, hands versions down."""
