"""Regions compiled as one graph."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend


def compiled(fn, backend="aot_eager", **options):
    """`(the compiled function, a counter of its graphs)`."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True, **options), counter
