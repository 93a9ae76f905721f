"""The DTensor: its class and hot path, conversions, factories, autograd, compilation.

What single ops do is in `ops`; how a call is planned is in `dispatch`.
"""

from shardwise._torch.functions import allow_in_foreach
from shardwise.dtensor import optimizer_steps
from shardwise.dtensor.tensor import DTensor

optimizer_steps.register()
allow_in_foreach(DTensor)

# The ops of a DTensor come with it: they need the class, and it needs them for its first call.
import shardwise.ops.catalog  # noqa: E402, F401
