"""Every operator of torch's own table, sharded in every way, against one device.

    python -m shardwise.testing.op_sweep                    # all of them
    python -m shardwise.testing.op_sweep 'fft.*' sort       # some, by name or pattern

    python -m shardwise.testing.op_sweep --compiled         # as compiled code, against eager code

`table` reads torch's table, `ways` says how its samples are laid out, `alone` runs them on one
device and `cases` in a simulated world, `compare` tells them apart, and `play` does all of it for
one operator, `compiled` the same for compiled code. `workers` keeps a crash from ending the sweep,
`report` writes the table and the JSON.
"""
