"""visualize_sharding prints who holds what."""

import pytest
import torch
from by_hand import lay

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.debug import visualize_sharding


@pytest.fixture
def shown(capsys):
    """The lines that a call prints, without the title."""

    def show(tensor, **options):
        visualize_sharding(tensor, use_rich=False, **options)
        return capsys.readouterr().out.splitlines()[1:]

    return show


def test_one_dim_is_one_row(mesh, shown):
    assert shown(lay(torch.ones(10), mesh, [Shard(0)])) == [
        "  |  0:3   |  3:6   |  6:9   |  9:10",
        "--+--------+--------+--------+-------",
        "  | rank 0 | rank 1 | rank 2 | rank 3",
    ]


def test_two_dims_are_a_grid(square, shown):
    assert shown(lay(torch.ones(8, 3), square, [Shard(0), Shard(1)])) == [
        "     |  0:2   |  2:3",
        "-----+--------+-------",
        " 0:4 | rank 0 | rank 1",
        " 4:8 | rank 2 | rank 3",
    ]


def test_replicas_share_a_cell(square, shown):
    assert shown(lay(torch.ones(4, 2), square, [Replicate(), Shard(0)])) == [
        "     |    0:2",
        "-----+-----------",
        " 0:2 | ranks 0, 2",
        " 2:4 | ranks 1, 3",
    ]


@pytest.mark.parametrize(
    ("order", "ranks"), [((0, 1), "0123"), ((1, 0), "0213")], ids=["rows first", "columns first"]
)
def test_one_dim_over_two_axes_in_either_order(square, shown, order, ranks):
    x = lay(torch.ones(4), square, [Shard(0), Shard(0)], order)
    assert [c.strip() for c in shown(x)[2].split("|")[1:]] == [f"rank {r}" for r in ranks]


def test_three_dims_are_slices(square, shown):
    assert shown(lay(torch.ones(6, 4, 2), square, [Shard(0), Shard(2)])) == [
        "[0:3, :, :]",
        "     |  0:1   |  1:2",
        "-----+--------+-------",
        " 0:4 | rank 0 | rank 1",
        "[3:6, :, :]",
        "     |  0:1   |  1:2",
        "-----+--------+-------",
        " 0:4 | rank 2 | rank 3",
    ]


def test_ranks_that_hold_nothing_are_named(mesh, shown):
    assert shown(lay(torch.ones(3), mesh, [Shard(0)]))[-1] == "Rank 3 holds nothing."
    on_one = lay(torch.ones(4, 2), mesh, [Shard(0, sizes=(0, 4, 0, 0))])
    assert shown(on_one)[2:] == [" 0:4 | rank 1", "Ranks 0, 2, 3 hold nothing."]


def test_terms_are_not_passed_off_as_values(square, shown):
    lines = shown(lay(torch.ones(4), square, [Partial("max"), Shard(0)]))
    assert lines[-1] == "Along axis 'rows' ranks hold terms of a max, not values."


def test_a_scalar_and_an_empty_tensor(mesh, shown):
    assert shown(lay(torch.tensor(1.0), mesh, [Replicate()]))[-1] == "  | ranks 0, 1, 2, 3"
    assert shown(lay(torch.ones(0, 2), mesh, [Shard(0)]))[-1] == " 0:0 | ranks 0, 1, 2, 3"


def test_the_title_and_the_header(mesh, capsys):
    visualize_sharding(lay(torch.ones(8, 2), mesh, [Shard(0)]), "my table")
    assert capsys.readouterr().out.splitlines()[:2] == [
        "my table",
        "8x2 [S(0)], torch.float32 on mesh (4,)",
    ]


def test_in_colour(square, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    visualize_sharding(lay(torch.ones(6, 4, 2), square, [Shard(0), Shard(2)]), use_rich=True)
    printed = capsys.readouterr().out
    assert "[S(0), S(2)]" in printed
    assert "[3:6, :, :]" in printed
    for rank in range(4):
        assert f"rank {rank}" in printed
    assert "\x1b[" in printed


def test_a_plain_tensor_is_refused():
    with pytest.raises(shardwise.ArgumentError, match="found Tensor"):
        visualize_sharding(torch.ones(2))
