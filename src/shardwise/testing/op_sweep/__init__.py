"""Every operator of torch's own table, sharded in every way, against one device.

    python -m shardwise.testing.op_sweep                    # all of them
    python -m shardwise.testing.op_sweep 'fft.*' sort       # some, by name or pattern

`table` reads torch's table, `ways` lays samples out, `play` runs them in a simulated world and
compares, `workers` keeps a crash from ending the sweep, `report` writes the table and the JSON.
"""
