"""Conversion from and to torch's tensors and checkpoints, and torchrec's plans and tables.

torch's DTensor and torchrec are imported when a function of this package is first called; no other
folder imports them.
"""

from shardwise.interop.dtensors import (
    from_torch,
    load_torch_checkpoint,
    save_torch_checkpoint,
    state_dict_from_torch,
    state_dict_to_torch,
    to_torch,
)
from shardwise.interop.torchrec.conversion import (
    load_torchrec,
    plan_from_torchrec,
    plan_to_torchrec,
    state_dicts_to_torchrec,
    tables_from_torchrec,
)

__all__ = [
    "from_torch",
    "load_torch_checkpoint",
    "load_torchrec",
    "plan_from_torchrec",
    "plan_to_torchrec",
    "save_torch_checkpoint",
    "state_dict_from_torch",
    "state_dict_to_torch",
    "state_dicts_to_torchrec",
    "tables_from_torchrec",
    "to_torch",
]
