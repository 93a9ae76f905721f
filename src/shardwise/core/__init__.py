"""Pure values: placements, layouts, and the arithmetic of who owns what."""
