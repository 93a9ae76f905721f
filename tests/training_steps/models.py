"""Small models of the kinds that people shard, and those that are easily sharded wrongly.

Plain modules that know nothing of shards. `KINDS` lists those that training steps are checked with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.embedding import SGD, Adagrad, EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table
from shardwise.lookup.optimizers import FusedOptimizer


class CausalAttention(nn.Module):
    """Causal attention with rotary positions."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, width: int, num_heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        half = width // num_heads // 2
        speeds = 100.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(max_length), speeds).repeat(1, 2)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, self.num_heads, -1).transpose(1, 2)

        q, k = self._turn(heads(self.q(x))), self._turn(heads(self.k(x)))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, heads(self.v(x)), dropout_p=dropout, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _turn(self, x: Tensor) -> Tensor:
        """Turn each pair of features by an angle that grows with the position."""
        length = x.shape[2]
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return x * self.cosines[:length] + turned * self.sines[:length]


class Block(nn.Module):
    def __init__(
        self, width: int, num_heads: int, hidden: int, max_length: int, dropout: float
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = CausalAttention(width, num_heads, max_length, dropout)
        self.up, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        y = self.norm2(x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))


class GPT(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(
        self,
        vocabulary: int = 19,
        width: int = 16,
        num_heads: int = 4,
        hidden: int = 22,
        num_blocks: int = 2,
        max_length: int = 8,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocabulary, self.max_length = vocabulary, max_length
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, hidden, max_length, dropout) for _ in range(num_blocks)
        )
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def batch(self, size: int) -> tuple[Tensor, ...]:
        ids = torch.randint(0, self.vocabulary, (size, self.max_length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class ClickModel(nn.Module):
    """Bags of categories, an MLP for numbers, products of all pairs, an MLP on top."""

    MODES = ("sum", "mean", "max")

    def __init__(
        self, rows: tuple[int, ...] = (11, 7, 23), width: int = 6, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.rows = rows
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(count, width, mode=mode)
            for count, mode in zip(rows, itertools.cycle(self.MODES), strict=False)
        )
        self.bottom = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, width), nn.ReLU())
        pairs = (len(rows) + 1) ** 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 9), nn.ReLU(), nn.Dropout(dropout), nn.Linear(9, 1)
        )

    def forward(self, numbers: Tensor, *ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        pooled = [table(each) for table, each in zip(self.tables, ids, strict=True)]
        features = torch.stack([dense, *pooled], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([dense, products.flatten(1)], 1)).squeeze(1)

    def loss(self, numbers: Tensor, clicked: Tensor, *ids: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(numbers, *ids), clicked)

    def batch(self, size: int) -> tuple[Tensor, ...]:
        ids = [torch.randint(0, count, (size, 3)) for count in self.rows]
        return torch.randn(size, 4), torch.randint(0, 2, (size,)).float(), *ids


# -- models that return their loss ---------------------------------------------------------------
# It is a mean over the examples, so the loss of a batch is the mean of the losses of its equal
# parts.


VOCABULARY, WIDTH, HIDDEN = 11, 6, 10


class Trained(nn.Module):
    """The base: a spare layer that a step may not use, and a body that may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        #: Whether backward recomputes the body instead of keeping its activations.
        self.recompute = False
        #: Whether `spare` is used; changed between steps.
        self.reaches_spare = False
        self.spare: nn.Module | None = None
        self.spare_width = WIDTH

    def through(self, body: nn.Module, *inputs: Tensor) -> Any:
        if self.recompute:
            return checkpoint(body, *inputs, use_reentrant=False)
        return body(*inputs)

    def with_spare(self, x: Tensor) -> Tensor:
        """`x`, changed by the spare layer where that is used."""
        return x + self.spare(x) if self.reaches_spare and self.spare is not None else x


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Norms(Trained):
    """Norms, scales and a head that no plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = nn.LayerNorm(WIDTH), MLP(), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.gain = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.with_spare(x)
        x = x + self.through(self.body, self.norm(x)) * self.scale
        return F.mse_loss(self.head(torch.tanh(x)) * self.gain, target)


class Tied(Trained):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.body = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.RMSNorm(WIDTH),
            MLP(),
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.with_spare(self.tokens(ids))
        x = x + self.through(self.body, self.norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Predictions(nn.Module):
    """BERT's head: the decoder's weight is the embedding, and its bias has a second owner."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.transform, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = weight
        self.bias = nn.Parameter(torch.linspace(-0.2, 0.2, VOCABULARY))
        self.decoder.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(F.gelu(self.transform(x))))


class Bert(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(VOCABULARY, WIDTH), MLP()
        self.predictions = Predictions(self.tokens.weight)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.with_spare(self.tokens(ids))
        logits = self.predictions(x + self.through(self.body, x))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, in_features: int, out_features: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(False)
        self.a = nn.Linear(in_features, rank, bias=False)
        self.b = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class AdaptedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(WIDTH, HIDDEN), Adapted(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Adapters(Trained):
    """Adapters on a frozen base, whose norm is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(WIDTH), AdaptedMLP()
        self.head = nn.Linear(WIDTH, 3).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.with_spare(x)
        return F.mse_loss(self.head(x + self.through(self.body, self.norm(x))), target)


class Experts(nn.Module):
    def __init__(self, num_experts: int = 6) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.matrices = nn.Parameter(torch.randn(num_experts, WIDTH, WIDTH) / 3)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        each = torch.einsum("tkoi,ti->tko", self.matrices[experts], tokens) + self.shift
        return (torch.tanh(each) * weights.unsqueeze(-1)).sum(1)


class Mixture(Trained):
    """A router and the experts that it chooses among."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6)
        self.body, self.head = Experts(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.with_spare(x))
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return F.mse_loss(self.head(x + self.through(self.body, x, chosen, weights)), target)


class PositionlessAttention(nn.Module):
    def __init__(self, num_heads: int = 2) -> None:
        super().__init__()
        self.size = WIDTH // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Sequences(Trained):
    """Causal attention with learned positions, a layer and experts: one loss for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(8, WIDTH)
        self.norm, self.attention, self.body = nn.RMSNorm(WIDTH), PositionlessAttention(), MLP()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts(4)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, target: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1]).unsqueeze(0)
        x = self.with_spare(self.tokens(ids) + self.positions(position_ids))
        x = x + self.attention(self.norm(x))
        x = (x + self.through(self.body, x)).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        x = x + self.experts(x, chosen, weights)
        return F.cross_entropy(self.head(x), target.flatten())


class Tables(Trained):
    """A collection of tables and a dense part; with `optimizer` the tables update in backward."""

    FEATURES = ("user", "item", "day")
    ROWS = (13, 9, 5)

    def __init__(self, optimizer: FusedOptimizer | None = None, sparse: bool = True) -> None:
        super().__init__()
        named = zip(self.FEATURES, self.ROWS, strict=True)
        self.tables = EmbeddingBagCollection(
            [Table(name, rows, 4) for name, rows in named],
            output="tensor",
            optimizer=optimizer,
            sparse=sparse,
            dtype=torch.get_default_dtype(),
        )
        self.norm, self.body = nn.LayerNorm(12), MLP(12, 8)
        self.head = nn.Linear(12 + WIDTH, 1)

    def forward(self, ids: Jagged, x: Tensor, target: Tensor) -> Tensor:
        pooled = self.norm(self.tables(ids))
        pooled = pooled + self.through(self.body, pooled)
        return F.mse_loss(self.head(torch.cat([pooled, self.with_spare(x)], 1)).squeeze(1), target)


class TorchBags(Trained):
    """Torch's own tables, with sparse or dense gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.user = nn.Embedding(13, WIDTH, sparse=sparse)
        self.items = nn.EmbeddingBag(9, WIDTH, mode="mean", sparse=sparse)
        self.body, self.head = MLP(), nn.Linear(WIDTH, 1)

    def forward(self, user: Tensor, items: Tensor, target: Tensor) -> Tensor:
        x = self.with_spare(self.user(user) * self.items(items))
        return F.mse_loss(self.head(x + self.through(self.body, x)).squeeze(1), target)


class Statistics(Trained):
    """Batch norm, whose statistics are those of each rank's own batch, and a constant buffer."""

    anchor: Tensor

    def __init__(self) -> None:
        super().__init__()
        # No bias: the norm cancels it, and its gradient would be rounding errors.
        self.first, self.norm = nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8)
        self.body, self.head = MLP(8, 12), nn.Linear(8, 3)
        self.register_buffer("anchor", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.first(self.with_spare(x))) + self.anchor
        return F.mse_loss(self.head(x + self.through(self.body, x)), target)


class LossOf(Trained):
    """A model whose loss is a method, as a module that returns it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *batch: Tensor) -> Tensor:
        return self.body.loss(*batch)  # type: ignore[operator]


Batch = tuple[object, ...]
ANY_OPTIMIZER = ("sgd", "momentum", "adamw", "adagrad", "foreach", "fused")
MLP_PLAN = {"body.up": "colwise", "body.down": "rowwise"}


@dataclass(frozen=True)
class Kind:
    """One model.

    `plan` is for `parallelize_module`, `sharded` names the weights that `shard_module` shards,
    `attention` and `experts` the modules for `context_parallel` and `expert_parallel`, `without`
    the options that one device cannot run either, or whose result is not defined.
    """

    make: Callable[[], Trained]
    batch: Callable[[nn.Module, int], Batch]
    plan: Mapping[str, str] = field(default_factory=dict)
    sharded: tuple[str, ...] = ()
    attention: str = ""
    experts: str = ""
    collection: bool = False
    fused: bool = False
    whole_module: bool = True
    own_statistics: bool = False
    optimizers: tuple[str, ...] = ANY_OPTIMIZER
    without: frozenset[str] = frozenset()


def _numbers(_: nn.Module, size: int) -> Batch:
    return torch.randn(size, WIDTH), torch.randn(size, 3)


def _tokens(_: nn.Module, size: int, length: int = 3) -> Batch:
    return torch.randint(VOCABULARY, (size, length)), torch.randint(VOCABULARY, (size, length))


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


#: A penalty needs a gradient of the inputs.
NO_PENALTY = frozenset({"penalty"})
#: Torch cannot clip sparse gradients or set them to zero.
SPARSE = NO_PENALTY | {"clip", "clamp", "zeros"}
#: An update in backward leaves no gradient to accumulate, to scale or to set to zero.
FUSED = NO_PENALTY | {"no_sync", "zeros", "scale", "losses", "pair", "sum", "inputs"}
#: Buffers that differ between ranks have no common value to save or to set back to.
OWN_STATISTICS = frozenset({"save", "reload"})
#: Rounding decides which experts are chosen.
ROUTED = frozenset({"autocast"})
#: A model in `LossOf` has no such layers.
SPARE = frozenset({"unused", "sometimes", "recompute", "added"})

KINDS: dict[str, Kind] = {
    "norms": Kind(Norms, _numbers, MLP_PLAN),
    "tied": Kind(
        Tied,
        _tokens,
        MLP_PLAN | {"tokens": "rowwise"},
        sharded=("tokens.weight",),
        without=NO_PENALTY,
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
    "experts": Kind(
        Mixture, _numbers, {"body": "experts"}, experts="body", without=NO_PENALTY | ROUTED
    ),
    "sequences": Kind(
        Sequences,
        partial(_tokens, length=8),
        MLP_PLAN
        | dict.fromkeys(("attention.q", "attention.k", "attention.v"), "colwise")
        | {"attention.o": "rowwise"},
        attention="attention",
        experts="experts",
        without=NO_PENALTY | ROUTED,
    ),
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
        sharded=("user.weight", "items.weight"),
        without=NO_PENALTY,
    ),
    "sparse_bags": Kind(
        lambda: TorchBags(True),
        _bags,
        MLP_PLAN,
        sharded=("user.weight", "items.weight"),
        optimizers=("sgd", "adagrad"),
        without=SPARSE,
    ),
    "gpt": Kind(
        lambda: LossOf(GPT(width=8, num_heads=2, hidden=10, num_blocks=1, max_length=4)),
        _own,
        {
            "body.blocks.*.up": "colwise",
            "body.blocks.*.gate": "colwise",
            "body.blocks.*.down": "rowwise",
        },
        without=NO_PENALTY | SPARE,
    ),
    "recommender": Kind(
        lambda: LossOf(ClickModel(rows=(11, 7), width=4)),
        _own,
        {"body.bottom.0": "colwise", "body.bottom.2": "rowwise"},
        sharded=("body.tables.0.weight", "body.tables.1.weight"),
        without=NO_PENALTY | SPARE,
    ),
}
