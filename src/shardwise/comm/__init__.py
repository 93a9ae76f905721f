"""Collectives, their cost, and what ranks agree on before they run one."""
