"""Every operator of torch's own table, in many layouts, against one device.

    python -m shardwise.testing.op_sweep                    # all of them
    python -m shardwise.testing.op_sweep 'fft.*' sort       # some, by name or pattern

    python -m shardwise.testing.op_sweep --compiled         # as compiled code, against eager code

`table` reads torch's table and runs its samples on one device, `ways` says how they are laid out,
`cases` runs them in a simulated world, `play` does all of it for one operator, eager or compiled,
and `report` plays many operators and writes the table and the JSON.
"""
