"""Views, joins, indexing: ops that move values and compute none."""
