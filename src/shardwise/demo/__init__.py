"""The demonstration: a model trained on one device and sharded, and what the two have in common."""
