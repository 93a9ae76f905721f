"""The models of the prover as data: how each is made, fed, planned, and what it cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.embedding import SGD, Adagrad, Jagged, RowWiseAdagrad
from shardwise.testing.steps.modules import (
    VOCABULARY,
    WIDTH,
    Adapters,
    Bert,
    Mixture,
    Norms,
    SmallGPT,
    SmallRecommender,
    Statistics,
    Tables,
    Tied,
    TorchBags,
    Trained,
)

Batch = tuple[object, ...]
ANY_OPTIMIZER = ("sgd", "momentum", "adamw", "adagrad")
MLP_PLAN = {"body.up": "colwise", "body.down": "rowwise"}


@dataclass(frozen=True)
class Kind:
    """One model.

    `plan` is for `parallelize_module`, `cut` names the weights that `shard_module` shards,
    `without` the options that one device cannot do either, or that have no single answer.
    """

    make: Callable[[], Trained]
    batch: Callable[[nn.Module, int], Batch]
    plan: Mapping[str, str] = field(default_factory=dict)
    cut: tuple[str, ...] = ()
    collection: bool = False
    fused: bool = False
    whole_module: bool = True
    own_statistics: bool = False
    optimizers: tuple[str, ...] = ANY_OPTIMIZER
    without: frozenset[str] = frozenset()


def _numbers(_: nn.Module, size: int) -> Batch:
    return torch.randn(size, WIDTH), torch.randn(size, 3)


def _tokens(_: nn.Module, size: int) -> Batch:
    return torch.randint(VOCABULARY, (size, 3)), torch.randint(VOCABULARY, (size, 3))


def _bags(_: nn.Module, size: int) -> Batch:
    user, items = torch.randint(13, (size,)), torch.randint(9, (size, 2))
    return user, items, torch.randn(size)


def _jagged(module: nn.Module, size: int) -> Batch:
    assert isinstance(module, Tables), "a batch of bags is for tables"
    lengths = torch.randint(0, 3, (len(module.FEATURES), size))
    counts = lengths.sum(1).tolist()
    ids = [torch.randint(rows, (n,)) for rows, n in zip(module.ROWS, counts, strict=True)]
    batch = Jagged(module.FEATURES, torch.cat(ids), lengths=lengths.flatten())
    return batch, torch.randn(size, WIDTH), torch.randn(size)


def _own(module: nn.Module, size: int) -> Batch:
    return module.body.batch(size)  # type: ignore[union-attr, operator]


#: What needs a gradient of the inputs, and inputs that have one.
NO_PENALTY = frozenset({"penalty"})
#: Torch has no norm, and no zeros, of a gradient of rows alone.
SPARSE = NO_PENALTY | {"clip", "zeros"}
#: An update in backward leaves nothing to clip or to put off.
FUSED = NO_PENALTY | {"no_sync", "zeros"}
#: Buffers that differ between ranks have no common value to save.
OWN_STATISTICS = frozenset({"save"})
#: Rounding decides which experts are chosen.
ROUTED = frozenset({"autocast"})
#: The models of `testing.models` have no such layers.
SPARE = frozenset({"unused", "sometimes", "recompute"})

KINDS: dict[str, Kind] = {
    "norms": Kind(Norms, _numbers, MLP_PLAN),
    "tied": Kind(
        Tied, _tokens, MLP_PLAN | {"tokens": "rowwise"}, cut=("tokens.weight",), without=NO_PENALTY
    ),
    "tied_head": Kind(
        Tied, _tokens, MLP_PLAN | {"head": "colwise_rep"}, whole_module=False, without=NO_PENALTY
    ),
    "bert": Kind(Bert, _tokens, MLP_PLAN | {"tokens": "rowwise"}, without=NO_PENALTY),
    "bert_decoder": Kind(
        Bert,
        _tokens,
        {"predictions.decoder": "colwise_rep"},
        whole_module=False,
        without=NO_PENALTY,
    ),
    "adapters": Kind(
        Adapters,
        _numbers,
        {
            "body.up.base": "colwise",
            "body.up.b": "colwise",
            "body.down.base": "rowwise",
            "body.down.a": "rowwise",
        },
    ),
    "experts": Kind(Mixture, _numbers, {"body": "experts"}, without=NO_PENALTY | ROUTED),
    "statistics": Kind(
        Statistics, _numbers, MLP_PLAN, own_statistics=True, without=NO_PENALTY | OWN_STATISTICS
    ),
    "fused_sgd": Kind(
        lambda: Tables(SGD(lr=0.3)), _jagged, collection=True, fused=True, without=FUSED
    ),
    "fused_adagrad": Kind(
        lambda: Tables(Adagrad(lr=0.1)), _jagged, collection=True, fused=True, without=FUSED
    ),
    "fused_rows": Kind(
        lambda: Tables(RowWiseAdagrad(lr=0.1)), _jagged, collection=True, fused=True, without=FUSED
    ),
    "tables": Kind(
        lambda: Tables(sparse=False), _jagged, MLP_PLAN, collection=True, without=NO_PENALTY
    ),
    "sparse_tables": Kind(
        Tables, _jagged, collection=True, optimizers=("sgd", "adagrad"), without=SPARSE
    ),
    "bags": Kind(
        lambda: TorchBags(False),
        _bags,
        MLP_PLAN | {"user": "rowwise"},
        cut=("user.weight", "items.weight"),
        without=NO_PENALTY,
    ),
    "sparse_bags": Kind(
        lambda: TorchBags(True),
        _bags,
        MLP_PLAN,
        cut=("user.weight", "items.weight"),
        optimizers=("sgd", "adagrad"),
        without=SPARSE,
    ),
    "gpt": Kind(
        SmallGPT,
        _own,
        {
            "body.blocks.*.up": "colwise",
            "body.blocks.*.gate": "colwise",
            "body.blocks.*.down": "rowwise",
        },
        without=NO_PENALTY | SPARE,
    ),
    "recommender": Kind(
        SmallRecommender,
        _own,
        {"body.bottom.0": "colwise", "body.bottom.2": "rowwise"},
        cut=("body.tables.0.weight", "body.tables.1.weight"),
        without=NO_PENALTY | SPARE,
    ),
}
