"""One rank played without values counts what a simulated world counts."""

from __future__ import annotations

import pytest
from time_limit import cpu_limit

from shardwise.cli.model import explain_layouts, explain_step
from shardwise.report import Case, Mesh

PLAN = """
format = "shardwise plan 1"

[modules]
up = "colwise"
down = "rowwise"
"""


@pytest.fixture
def case(tmp_path, monkeypatch):
    (tmp_path / "layouts_model.py").write_text(
        """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(64), nn.Linear(64, 250)
        self.down, self.head = nn.Linear(250, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.head(x + self.down(torch.relu(self.up(self.norm(x))))).squeeze(-1)

def make():
    return Net(), torch.randn(128, 64)
"""
    )
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.syspath_prepend(tmp_path)

    def made(planned: bool, groups: tuple[str, ...]) -> Case:
        plan = str(tmp_path / "plan.toml") if planned else None
        return Case("layouts_model:make", plan, groups=groups)

    return made


@pytest.mark.parametrize(
    ("mesh", "planned", "groups"),
    [
        ("tp=2", True, ()),
        ("tp=7", True, ()),
        ("dp=8", False, ()),
        ("fsdp=8", False, ("up", "down")),
        ("dp=2,tp=4", True, ()),
        ("fsdp=4,tp=4", True, ("up",)),
        ("dp=2,fsdp=32", False, ("up",)),
    ],
)
def test_a_rank_without_values_counts_what_the_simulation_does(case, mesh, planned, groups):
    asked, said = case(planned, groups), Mesh.parse(mesh)
    simulated, found = explain_step(asked, said, "adamw"), explain_layouts(asked, said, "adamw")

    def sent(report):
        # Values are compared once, in the first step; without values there is nothing to compare.
        return [
            (e.kind, e.num_bytes, e.axis)
            for e in report.collectives
            if e.op != "a check of plain gradients"
        ]

    assert sent(found) == sent(simulated)
    assert found.ranks == (0, said.num_ranks - 1)
    for rank, memory in zip(found.ranks, found.memory, strict=True):
        other = simulated.memory[rank]
        assert memory.total == other.total > 0
        assert (memory.parameters, memory.gradients) == (other.parameters, other.gradients)


def test_ten_thousand_ranks_take_seconds(case):
    with cpu_limit(30):
        report = explain_layouts(case(True, ("up",)), Mesh.parse("fsdp=1250,tp=8"), "adamw", 12_500)
    assert report.ranks == (0, 9_999)
    assert report.memory[0].parameters > report.memory[1].parameters
    assert report.num_bytes > 0
