"""Arithmetic: elementwise ops, products, reductions, linear algebra, search."""
