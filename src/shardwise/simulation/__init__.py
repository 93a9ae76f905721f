"""The simulated world: one process that plays all ranks, behind torch.distributed's own face.

`world` enters and leaves one, `process_group` answers a user's collectives, `local_tensor` holds
one tensor per rank. Code above this room does not ask which world it is in: it maps functions over
the ranks present (`ranks`), or over what they hold (`parts`). Layouts are unknown here.
"""
