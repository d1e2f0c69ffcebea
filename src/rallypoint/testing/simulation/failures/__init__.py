"""What a run that failed says: how to play it again, and what everybody waited for."""
