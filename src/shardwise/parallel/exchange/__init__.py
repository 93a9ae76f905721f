"""Front doors along data axes: keys of a sequence, and tokens for experts, travel between ranks."""
