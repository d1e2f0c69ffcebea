"""What is known of machines and links, and what follows for where shards are placed."""
