"""What ranks hold in the end, beside one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise import checkpoint
from shardwise.testing.differences import Difference, Values, differences
from shardwise.testing.steps.train import plain_loss
from shardwise.testing.steps.training import Training, TrainingOutcome, play_alone


@dataclass(frozen=True)
class Judgement:
    """`kind` is "ok", "refused" or "wrong"; `text` says why, and `compared` what was compared."""

    kind: str
    text: str = ""
    compared: tuple[Difference, ...] = ()


def judge(training: Training, outcomes: list[TrainingOutcome], folder: Path) -> Judgement:
    """The outcomes of all ranks, and what they saved in the folder."""
    if any(outcome.failed for outcome in outcomes):
        return Judgement("wrong", _first(outcomes, "failed"))
    refusals = {outcome.refused for outcome in outcomes}
    if refusals != {""}:
        text = _first(outcomes, "refused")
        if len(refusals) > 1:
            return Judgement("wrong", f"refused on some ranks, or for other reasons: {text}")
        return Judgement("refused", text)
    alone = play_alone(training)
    found = [
        (f"on rank {rank}: ", each)
        for rank, (one, many) in enumerate(zip(alone, outcomes, strict=True))
        for what in ("parameters", "buffers", "left")
        for each in differences(what, getattr(one, what), getattr(many, what))
    ]
    if "save" in training.options:
        try:
            found += [("", each) for each in _loaded(training, outcomes[0].parameters, folder)]
        except Exception as error:
            return Judgement("wrong", f"loading by one device: {type(error).__name__}: {error}")
    if "autocast" in training.options:
        rounding = _rounding(training, alone[0])
        every = [each for _, each in found]
        found = [(where, _roughly(each, every, rounding)) for where, each in found]
    faults = [f"{where}{_said(each)}" for where, each in found if not each.within(training.bound)]
    compared = tuple(each for _, each in found)
    return Judgement("wrong" if faults else "ok", "; ".join(faults[:4]), compared)


def _rounding(training: Training, alone: TrainingOutcome) -> dict[str, float]:
    """By parameter: three times what bfloat16 changes on one device."""
    exact = play_alone(replace(training, options=training.options - {"autocast"}))[0]
    return {
        each.name: 3 * each.largest
        for each in differences("parameters", exact.parameters, alone.parameters)
    }


def _roughly(
    each: Difference, found: Sequence[Difference], rounding: Mapping[str, float]
) -> Difference:
    """Less the rounding, and counted against a tenth of the largest: terms of a sum in bfloat16
    may be much larger than the sum."""
    largest = max(other.scale for other in found if other.what == each.what)
    gap = max(0.0, each.largest - rounding.get(each.name, 0.0))
    return replace(each, largest=gap, scale=max(each.scale, largest / 10))


def _first(outcomes: list[TrainingOutcome], what: str) -> str:
    said = [getattr(o, what) for o in outcomes if getattr(o, what)]
    # A rank that fails takes its connections with it; what it says itself is the cause.
    return next((text for text in said if "gloo/transport" not in text), said[0])


def _said(each: Difference) -> str:
    if each.remark:
        return f"{each.what} {each.name} {each.remark}"
    return f"{each.what} {each.name} off by {100 * each.largest / (each.scale or 1):.2g}%"


def _loaded(training: Training, expected: Values, folder: Path) -> Iterator[Difference]:
    """What all ranks saved, loaded by one device: the parameters that ranks hold, and the loss."""
    module, steps, _ = training.begin()
    module.eval()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    first = {name: p.detach().clone() for name, p in parameters.items()}
    checkpoint.load({"model": module}, folder / "saved")
    changes = {name: p.detach() - first[name] for name, p in parameters.items()}
    yield from differences("loaded", expected, changes)
    found = {"the loss": plain_loss(module, steps[0][0]).detach()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(first[name] + expected[name])
    yield from differences("loaded", {"the loss": plain_loss(module, steps[0][0]).detach()}, found)
