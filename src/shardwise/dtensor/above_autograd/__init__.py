"""Kernels of ops that have to be handled above autograd; see Note [Above autograd]."""
