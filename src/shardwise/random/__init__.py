"""One device's random numbers, drawn block by block; no communication, no DTensor."""
