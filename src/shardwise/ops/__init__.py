"""One file per family of ops: its rules, its local functions, its kernels above autograd."""
