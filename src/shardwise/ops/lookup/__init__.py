"""Embedding lookups and bags of a DTensor table, and their gradients.

Collections of tables are in `embedding`.
"""
