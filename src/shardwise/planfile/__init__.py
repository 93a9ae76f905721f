"""Plans as data: what several front doors share. Nothing here knows what an entry means."""
