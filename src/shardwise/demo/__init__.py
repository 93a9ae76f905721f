"""The demonstration: a model trained on one device and sharded, compared."""
