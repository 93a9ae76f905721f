"""Everything private of torch that the package uses: names, tables, frames.

Each file gets its names through `compat.Names`, and says what stops working without each. A missing
name disables that feature and nothing else. `probe()` of a file says whether this torch still
behaves as expected; `shardwise doctor` prints the results. No other folder uses these parts of
torch, and this folder imports nothing of the package but its errors.
"""
