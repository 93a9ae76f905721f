"""The simulated world: one process that runs all ranks, under torch.distributed's own API.

`world` enters and leaves a simulated world and defines its process group. `local_tensor` holds one
tensor per rank: its *parts*, one for each set of ranks that share a tensor. Code above this folder
does not ask which world it is in: it maps functions over the ranks present, or over the parts that
they hold (`ranks`). Nothing here knows layouts.
"""
