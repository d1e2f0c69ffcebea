"""Tables in the simulation: embeddings whose rows are on the servers only, and pulls of rows."""
