"""Who gives orders to a simulated job."""
