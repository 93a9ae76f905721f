"""Plan files: reading, writing, placements as text. Nothing here knows what an entry means."""
