"""From one layout to another: steps, the search for the cheapest sequence, and its execution."""
