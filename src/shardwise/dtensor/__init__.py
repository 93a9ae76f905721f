"""The DTensor: its class and hot path, conversions, factories, autograd, compilation.

What single ops do is in `ops`; how a call is planned is in `dispatch`.
"""

from shardwise.dtensor import optimizer_steps

optimizer_steps.register()

# The ops of a DTensor come with it: they need the class, and it needs them for its first call.
import shardwise.ops.catalog  # noqa: E402, F401
