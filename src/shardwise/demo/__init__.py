"""The demonstration: a model trained on one device and sharded, compared.

Its models and data are here; the report that it writes is in `report`.
"""
