"""Checkpoints: states saved by many ranks, and loaded by any other number of them.

    state = {"model": model, "optimizer": optimizer, "step": 10}
    shardwise.checkpoint.save(state, "runs/first")
    state = shardwise.checkpoint.load(state, "runs/first")

A checkpoint is a folder of safetensors files and a JSON index, in the layout of Hugging Face's
sharded checkpoints. Nothing in it is executed.
"""

from shardwise.checkpoint.convert import convert
from shardwise.checkpoint.inspect import CheckpointReport, TensorReport, Verdict, inspect, verify
from shardwise.checkpoint.load import load
from shardwise.checkpoint.pieces import Piece, Pieces
from shardwise.checkpoint.save import Saving, save, save_async
from shardwise.checkpoint.series import Checkpoints

__all__ = [
    "CheckpointReport",
    "Checkpoints",
    "Piece",
    "Pieces",
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
