"""The one room for what torch does not promise to keep: private names, private tables, frames.

Each file takes its names through `compat.Names`, with what stops working without each. A name that
this torch lacks costs that feature and nothing else. `probe()` of a file says whether this torch
still behaves as the package needs it; `shardwise doctor` prints the answers. No other room names
these parts of torch, and this one knows nothing of the package but its errors.
"""
