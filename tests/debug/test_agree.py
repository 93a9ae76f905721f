"""`agree` in one process; what it finds between ranks is in tests/processes/test_agree.py."""

import re

import pytest
import torch

import shardwise
from shardwise import ArgumentError, Replicate, Shard, ShardwiseError
from shardwise.comm.watch import watch
from shardwise.debug import CommDebugMode, agree
from shardwise.debug.first_difference import Account, first_difference
from shardwise.dtensor.tensor import DTensor
from shardwise.parallel import fully_shard


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "steps", None])
def test_what_every_may_be(every):
    with pytest.raises(ArgumentError, match="'step', 'collective' or a number of steps"):
        agree(every=every)


def test_the_mode_changes_no_value_and_leaves_nothing_behind():
    before = DTensor.__dict__["__torch_dispatch__"]
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = shardwise.distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
        optimizer = torch.optim.SGD([x], lr=0.1)
        expected = (x * 2.0).sum().full_tensor().agreed()
        with agree(every=2) as mode:
            for _ in range(4):
                (x * 2.0).sum().full_tensor().sum().backward()
                optimizer.step()
                x.grad = None
            with pytest.raises(ShardwiseError, match="active already"), agree():
                pass
        assert (mode.num_steps, mode.num_comparisons) == (4, 3)
        assert mode.num_calls > 20
        torch.testing.assert_close((x * 2.0).sum().full_tensor().agreed(), expected - 1.6 * 16)
    assert DTensor.__dict__["__torch_dispatch__"] is before
    assert watch.record is None
    assert not watch.steps


def test_steady_steps_make_no_new_records():
    """With a new batch and a state of the step before; also in a second session."""
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        norm = shardwise.distribute_module(torch.nn.LayerNorm(4), mesh)
        scale = shardwise.ones(4, device_mesh=mesh, placements=[Replicate()])
        optimizer = torch.optim.AdamW(norm.parameters())
        state = shardwise.zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])
        for _ in range(2):
            with agree() as mode:
                known = []
                for _ in range(6):
                    x = shardwise.distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
                    state = (norm(x) + state) * scale.detach()
                    state.square().mean().backward()
                    state = state.detach()
                    optimizer.step()
                    optimizer.zero_grad()
                    known.append(len(mode._known))
            assert known[0] < known[1]
            assert known[3:] == [known[-1]] * 3


def test_every_gather_of_a_sharded_group_is_recorded():
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        layer = fully_shard(torch.nn.Linear(4, 4), mesh, reshard_after_forward=True)
        with agree() as mode, CommDebugMode() as comm:
            layer(torch.ones(2, 4)).sum().backward()
        kinds = {key[0] for key in mode._known if isinstance(key[0], str)}
    assert [event.kind for event in comm.events].count("all_gather_into_tensor") == 2
    assert {"all_gather_into_tensor", "all_gather_into_tensor_out"} <= kinds


def account(text, start=0, **options):
    kinds = sorted(set(text))
    calls = [kinds.index(each) for each in text]
    given = {"before": None, "end": None, "sent": None, **options}
    return Account(start, kinds=[(ord(k), k) for k in kinds], calls=calls, **given)


@pytest.mark.parametrize(
    ("accounts", "said"),
    [
        ({0: account("abc"), 1: account("abd")}, "Call 2 .* rank 0: c; rank 1: d. .* that: b"),
        # A rank has read a comparison more: what came before was equal.
        ({0: account("abcd"), 1: account("ce", 2)}, "Call 3 .* rank 0: d; rank 1: e"),
        ({0: account("a", end="the end"), 1: account("ab")}, "nothing more before the end; rank 1"),
        # What a rank has not run yet, or does not tell, is no difference.
        ({0: account("a"), 1: account("ab"), 3: account("abc")}, None),
        ({0: account("a")}, None),
        (
            {0: account("a", sent=(1, "step 1", 5)), 1: account("ab", sent=(1, "step 1", 6))},
            "generators are in different states at step 1: rank 0: state 0005; rank 1: state 0006",
        ),
        (
            {0: account("a", sent=(1, "step 1", 5)), 1: account("b", 1, sent=(2, "step 2", 6))},
            None,
        ),
    ],
)
def test_the_first_difference_of_accounts(accounts, said):
    found = first_difference(accounts)
    assert (found is None) == (said is None)
    assert found is None or re.search(said, str(found))


def test_calls_that_differ_have_other_records():
    """Also where a plan's key does not tell them apart: by numbers, and by which tensor it is."""
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x, y = (
            shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
            for _ in range(2)
        )
        a, b = x + x, x + x
        with agree(every=100) as mode:
            for _ in range(4):  # planned, numbered as older tensors, known, expected
                for call in (
                    lambda: x * 2.0,
                    lambda: x * 3.0,
                    lambda: torch.add(a, b, alpha=0.5),
                    lambda: torch.add(a, b, alpha=0.25),
                    lambda: torch.add(b, a, alpha=0.5),
                    lambda: torch.cat([a, b]),
                    lambda: torch.cat([b, a]),
                    lambda: a.sum(0),
                    lambda: y.detach() * 2.0,
                ):
                    call()
                mode.step()
            texts = [record.text for record in mode._journal]
    steps = [texts[begin : begin + 10] for begin in range(0, 40, 10)]
    assert steps[2] == steps[3]
    assert len(set(steps[3])) == 10
    assert "alpha=0.25" in texts[3]


def test_a_whole_number_is_not_taken_for_a_tensor():
    with shardwise.simulate(2), agree(every="collective") as mode:
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)])
        _ = x // 3
        assert "(2 tensors back), 3, " in mode._journal[-1].text
