"""Run a program in a simulated world and in real processes, and compare what they do and hold."""

import dataclasses

import torch
from programs import record

import shardwise


def both(processes, program, *args):
    """`(events, held by rank)` of the simulated world and of the processes."""
    with shardwise.simulate(4):
        events, held = record(program, *args)
    answers = processes(record, program, *args)
    assert answers[0][0] == events
    for rank, (real_events, _) in enumerate(answers):
        # A simulated event counts the bytes of rank 0; others may hold longer or shorter pieces.
        assert sizeless(real_events) == sizeless(events), f"rank {rank} communicated otherwise"
    real = {name: [answer[1][name][0] for answer in answers] for name in held}
    return held, real


def sizeless(events):
    return [dataclasses.replace(event, num_bytes=0) for event in events]


def assert_bits(held, real):
    assert_close(held, real, rtol=0, atol=0, equal_nan=True)


def assert_close(held, real, **options):
    """Of every rank; a value that all simulated ranks share is held once."""
    every = {n: parts * (len(real[n]) if len(parts) == 1 else 1) for n, parts in held.items()}
    torch.testing.assert_close(real, every, **options)
