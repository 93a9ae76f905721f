"""Checkpoints: states saved by many ranks, and loaded by any other number of them.

    state = {"model": model, "optimizer": optimizer, "step": 10}
    shardwise.checkpoint.save(state, "runs/first")
    state = shardwise.checkpoint.load(state, "runs/first")

A checkpoint is a folder of safetensors files and a JSON index, in the layout of Hugging Face's
sharded checkpoints. Nothing in it is executed.
"""

from shardwise.checkpoint.loading import load
from shardwise.checkpoint.read import (
    CheckpointReport,
    TensorReport,
    Verdict,
    convert,
    inspect,
    verify,
)
from shardwise.checkpoint.saving import Saving, save, save_async
from shardwise.checkpoint.series import Checkpoints

__all__ = [
    "CheckpointReport",
    "Checkpoints",
    "Saving",
    "TensorReport",
    "Verdict",
    "convert",
    "inspect",
    "load",
    "save",
    "save_async",
    "verify",
]
