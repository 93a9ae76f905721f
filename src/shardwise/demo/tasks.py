"""The tasks and their data: a recommender on a click log, a small language model on text."""

from __future__ import annotations

import itertools
import math
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardwise.embedding import EmbeddingBagCollection, Jagged, Plan, RowWiseAdagrad, Table
from shardwise.errors import ArgumentError, LayoutError
from shardwise.parallel import data_parallel, load_plan, parallelize_module
from shardwise.testing.loop import per_rank, split_batch

TABLE_RATE = 0.1


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a smooth activation.

    With ReLU, rounding decides whether a value near zero has a gradient, and two trainings that
    differ only by rounding would drift apart.
    """
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.GELU()] * (number > 0) + [nn.Linear(before, after)]
    return nn.Sequential(*layers)


class Recommender(nn.Module):
    """Predicts the log-odds of a click, as DLRM: tables, two MLPs, products of their outputs."""

    pairs: torch.Tensor

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables, output="tensor", optimizer=RowWiseAdagrad(lr=TABLE_RATE)
        )
        self.num_features = len(self.tables.features)
        self.bottom = mlp(NUM_DENSE, 64, WIDTH)
        num_vectors = self.num_features + 1
        self.top = mlp(WIDTH * num_vectors + num_vectors * (num_vectors - 1) // 2, 64, 1)
        row, column = torch.tril_indices(num_vectors, num_vectors, -1)
        self.register_buffer("pairs", row * num_vectors + column, persistent=False)

    def forward(self, dense: torch.Tensor, ids: Jagged) -> torch.Tensor:
        known = self.bottom(dense).unsqueeze(1)
        looked_up = self.tables(ids).unflatten(1, (self.num_features, WIDTH))
        vectors = torch.cat([known, looked_up], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([vectors.flatten(1), products], 1)).squeeze(1)

    def loss(self, dense: torch.Tensor, ids: Jagged, clicks: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self(dense, ids), clicks)


EXAMPLES_PER_STEP = 1024
DENSE_RATE = 0.05

#: Large tables by rows, the next by columns, small ones on one rank, tiny ones on all.
MIXED_PLAN = Plan(
    {
        "user": "row_wise",
        "item": "column_wise",
        "campaign": "table_wise",
        "city": {"kind": "grid", "ranks": [0, 1]},
        "category": "table_wise",
        "*": "data_parallel",
    }
)


@dataclass
class Recommending:
    """The task: predict clicks, of a synthetic log without `data`."""

    num_steps: int
    seed: int
    plan: Plan
    data: ClickFile | None = None
    size: int = EXAMPLES_PER_STEP
    title: str = "A recommender"

    def tables(self) -> list[Table]:
        return self.data.tables() if self.data is not None else tables()

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Recommender(self.tables())

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
        return [torch.optim.SGD(dense, lr=DENSE_RATE, momentum=0.9)]

    def optimizers_within(self, model: Any) -> list[Any]:
        """Optimizers that are part of the model and update it in backward."""
        return [model.tables.optimizer]

    def identity(self) -> dict[str, Any]:
        """Equal for two runs of one training, whatever the number of steps and ranks."""
        tables = {table.name: table.num_embeddings for table in self.tables()}
        return {"model": "dlrm", "seed": self.seed, "examples": self.size, "tables": tables}

    def shard(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        model.tables.shard(mesh, self.plan)
        return data_parallel(model, mesh)

    def batches(self) -> Iterator[Batch]:
        if self.data is not None:
            return self.data.batches(self.num_steps, self.size)
        return ClickLog(self.seed).batches(self.num_steps, self.size)

    def loss(self, model: Any, batch: Batch, num_ranks: int) -> torch.Tensor:
        """Each rank's loss; `num_ranks` is 0 on one device."""
        whole = (batch.dense, batch.ids, batch.clicks)
        if not num_ranks:
            return model.loss(*whole)
        parts = split_batch(whole, num_ranks)
        return model.loss(*per_rank(parts, lambda rank: rank))

    @torch.no_grad()
    def examine(self, model: nn.Module) -> dict[str, Any]:
        """Metrics on new examples: loss, and how often the true side of 50% is predicted."""
        if self.data is not None:
            return {}
        log = ClickLog(self.seed)
        for _ in log.batches(self.num_steps, self.size):
            pass
        fresh = list(log.batches(4, self.size))
        odds = torch.cat([model(b.dense, b.ids) for b in fresh])
        clicks = torch.cat([b.clicks for b in fresh])
        truth = torch.cat([b.truth for b in fresh if b.truth is not None])
        loss = F.binary_cross_entropy_with_logits(odds, clicks)
        share = clicks.mean()
        return {
            "loss": float(loss),
            "best loss": float(F.binary_cross_entropy_with_logits(truth, clicks)),
            "blind loss": float(-(share * share.log() + (1 - share) * (1 - share).log())),
            "accuracy": float(((odds > 0) == (truth > 0)).float().mean()),
        }


# -- language ------------------------------------------------------------------------------------
# A small language model as a task: tensor-parallel, on text that ships with Python.


MODEL_WIDTH, NUM_HEADS, NUM_BLOCKS, LENGTH = 64, 8, 2, 64
NUM_SYMBOLS = 128
TEXTS_PER_STEP = 16
RATE = 3e-3

#: Attention and MLP are sharded by columns and then by rows: one all-reduce each in forward.
TENSOR_PLAN: dict[str, Any] = {
    "embed": "rowwise",
    "position": "replicate",
    "blocks.*.norm_[12]": "replicate",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "norm": "replicate",
    "head": "colwise_rep",
}


class TransformerBlock(nn.Module):
    """Attention, then an MLP, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(MODEL_WIDTH), nn.LayerNorm(MODEL_WIDTH)
        self.q, self.k, self.v = (nn.Linear(MODEL_WIDTH, MODEL_WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(MODEL_WIDTH, MODEL_WIDTH)
        self.up, self.down = (
            nn.Linear(MODEL_WIDTH, 4 * MODEL_WIDTH),
            nn.Linear(4 * MODEL_WIDTH, MODEL_WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm_1(x)
        # Each rank has some of the heads, so their number is inferred.
        q, k, v = (
            layer(seen).unflatten(-1, (-1, MODEL_WIDTH // NUM_HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_SYMBOLS, MODEL_WIDTH)
        self.position = nn.Embedding(LENGTH, MODEL_WIDTH)
        self.blocks = nn.Sequential(*(TransformerBlock() for _ in range(NUM_BLOCKS)))
        self.norm = nn.LayerNorm(MODEL_WIDTH)
        self.head = nn.Linear(MODEL_WIDTH, NUM_SYMBOLS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        place = torch.arange(text.shape[-1]).expand(text.shape)
        return self.head(self.norm(self.blocks(self.embed(text) + self.position(place))))


def python_text() -> torch.Tensor:
    """The language reference that comes with Python (what `help()` shows), as ASCII codes."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.int64)


@dataclass
class Writing:
    """The task: predict the next character of Python's documentation."""

    num_steps: int
    seed: int
    plan: str | os.PathLike[str] | None = None
    size: int = TEXTS_PER_STEP
    title: str = "A language model"
    _text: torch.Tensor = field(default_factory=python_text)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return LanguageModel()

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        # A larger epsilon: Adam amplifies gradients that are only rounding errors.
        return [torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-5)]

    def optimizers_within(self, model: nn.Module) -> list[Any]:
        return []

    def identity(self) -> dict[str, Any]:
        return {"model": "gpt", "seed": self.seed, "examples": self.size}

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if NUM_HEADS % mesh.size():
            raise LayoutError(
                f"The model has {NUM_HEADS} heads, which {mesh.size()} ranks cannot share evenly: "
                f"use 1, 2, 4 or 8 ranks."
            )
        plan = TENSOR_PLAN if self.plan is None else load_plan(self.plan)
        return parallelize_module(model, mesh, plan, strict=True)

    def _excerpts(self, generator: torch.Generator, first: int, last: int) -> torch.Tensor:
        starts = torch.randint(first, last - LENGTH - 1, (self.size, 1), generator=generator)
        return self._text[starts + torch.arange(LENGTH + 1)]

    @property
    def _split(self) -> int:
        return len(self._text) * 9 // 10

    def batches(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return (self._excerpts(generator, 0, self._split) for _ in range(self.num_steps))

    def loss(self, model: nn.Module, batch: torch.Tensor, num_ranks: int) -> torch.Tensor:
        scores = model(batch[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def examine(self, model: nn.Module) -> dict[str, Any]:
        """Metrics on text that the model has not seen."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        excerpts = [self._excerpts(generator, self._split, len(self._text)) for _ in range(4)]
        scores = torch.cat([model(excerpt[:, :-1]) for excerpt in excerpts]).flatten(0, 1)
        target = torch.cat([excerpt[:, 1:] for excerpt in excerpts]).flatten()
        share = torch.bincount(self._text[: self._split], minlength=NUM_SYMBOLS) / self._split
        return {
            "loss": float(F.cross_entropy(scores, target)),
            "blind loss": float(-(share[target].clamp(min=1e-6).log()).mean()),
            "next characters right": float((scores.argmax(1) == target).float().mean()),
        }


#: A model, how it is sharded, and its examples; picklable, for processes.
Task = Recommending | Writing


# -- click logs ----------------------------------------------------------------------------------
# Ids of the synthetic log follow a power law: the r-th most frequent of a table is drawn about 1/r
# as often as the first. Every id has a hidden score and some have a hidden taste; the log-odds of a
# click are a sum of scores, a product of the tastes of user and item, and a linear function of the
# dense features.
#
# A line of Criteo's format has a label, 13 integers and 26 hexadecimal ids, separated by tabs. A
# field may be empty. Lines of another form are counted, and the first are listed. Only the examples
# that are used, and one line, are in memory.


WIDTH = 16
NUM_DENSE = 13
HISTORY = 5

#: Name -> rows, from a table to shard to one to replicate.
SIZES = {
    "user": 60_000,
    "item": 30_000,
    "campaign": 4_000,
    "city": 1_000,
    "category": 300,
    "device": 40,
    "hour": 24,
}


@dataclass(frozen=True)
class Batch:
    """Examples: dense features, bags of ids, clicks, and the log-odds that they were drawn from.

    Logs from elsewhere have no `truth`.
    """

    dense: torch.Tensor
    ids: Jagged
    clicks: torch.Tensor
    truth: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.clicks)


def tables() -> list[Table]:
    """A table per kind of id; the items' table has two features: the item shown, and those seen."""
    features = {"item": ("item", "seen")}
    return [
        Table(name, rows, WIDTH, features=features.get(name, (name,)), pooling="mean")
        for name, rows in SIZES.items()
    ]


class ClickLog:
    """Draws batches; the same seed gives the same log."""

    def __init__(self, seed: int) -> None:
        planted = torch.Generator().manual_seed(seed)
        self._draws = torch.Generator().manual_seed(seed + 1)
        # Frequent ids are anywhere in a table, not in its first rows.
        self._order = {n: torch.randperm(rows, generator=planted) for n, rows in SIZES.items()}
        self._score = {n: torch.randn(rows, generator=planted) for n, rows in SIZES.items()}
        self._taste = {
            name: torch.randn(SIZES[name], 2, generator=planted) for name in ("user", "item")
        }
        self._dense = torch.randn(NUM_DENSE, generator=planted) / math.sqrt(NUM_DENSE)

    def batch(self, size: int) -> Batch:
        dense = torch.randn(size, NUM_DENSE, generator=self._draws)
        ids = {name: self._ids(name, size) for name in SIZES}
        seen = self._ids("item", size * HISTORY).view(size, HISTORY)
        truth = self._truth(dense, ids, seen)
        clicks = torch.rand(size, generator=self._draws) < truth.sigmoid()
        return Batch(dense, _bags(ids, seen), clicks.float(), truth)

    def batches(self, num: int, size: int) -> Iterator[Batch]:
        return (self.batch(size) for _ in range(num))

    def _ids(self, name: str, num: int) -> torch.Tensor:
        order = self._order[name]
        uniform = torch.rand(num, generator=self._draws, dtype=torch.float64)
        frequency_rank = ((len(order) + 1.0) ** uniform).long() - 1
        return order[frequency_rank.clamp_(0, len(order) - 1)]

    def _truth(
        self, dense: torch.Tensor, ids: dict[str, torch.Tensor], seen: torch.Tensor
    ) -> torch.Tensor:
        odds = dense @ self._dense
        for name, which in ids.items():
            odds = odds + 0.6 * self._score[name][which]
        odds = odds + 0.8 * self._score["item"][seen].mean(1)
        return odds + (self._taste["user"][ids["user"]] * self._taste["item"][ids["item"]]).sum(1)


def _bags(ids: dict[str, torch.Tensor], seen: torch.Tensor) -> Jagged:
    """One id per bag, and a bag of the items that a user saw before."""
    values, lengths, features = [], [], []
    for table in tables():
        for feature in table.features:
            bag = seen if feature == "seen" else ids[feature][:, None]
            features.append(feature)
            values.append(bag.reshape(-1))
            lengths.append(torch.full((len(bag),), bag.shape[1]))
    return Jagged(features, torch.cat(values), lengths=torch.cat(lengths))


# -- Criteo's format -------------------------------------------------------------------------

NUM_IDS = 26
MOST_ROWS = 20_000
#: Characters of a line; good ones have less than a tenth of this.
MAX_LINE = 16 << 10
#: How many bad lines are listed with what is wrong; the others are counted.
MOST_NAMED = 1000

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{1,16}")


@dataclass
class ClickFile:
    """The good lines of a file as numbers, and which lines were bad and why."""

    path: str
    labels: torch.Tensor
    dense: torch.Tensor
    #: One column per field; -1 where the field is empty.
    ids: torch.Tensor
    #: Line number -> what is wrong with it, of the first bad lines.
    bad: dict[int, str] = field(default_factory=dict)
    num_bad: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def tables(self) -> list[Table]:
        """A table per field with a row per id, up to a limit: then some ids share a row."""
        return [
            Table(f"c{number + 1}", min(MOST_ROWS, self._num_ids(number)), WIDTH, pooling="mean")
            for number in range(NUM_IDS)
        ]

    def _num_ids(self, number: int) -> int:
        return max(1, len(self.ids[:, number].unique()))

    def batches(self, num: int, size: int) -> Iterator[Batch]:
        """`num` batches; at its end the file starts again."""
        tables = self.tables()
        for start in range(0, num * size, size):
            rows = torch.arange(start, start + size) % len(self)
            yield Batch(self.dense[rows], _criteo_bags(self.ids[rows], tables), self.labels[rows])


def _criteo_bags(ids: torch.Tensor, tables: list[Table]) -> Jagged:
    values, lengths = [], []
    for number, table in enumerate(tables):
        column = ids[:, number]
        values.append(column[column >= 0] % table.num_embeddings)
        lengths.append((column >= 0).long())
    names = [table.name for table in tables]
    return Jagged(names, torch.cat(values), lengths=torch.cat(lengths))


def read_clicks(path: str, most: int | None = None) -> ClickFile:
    """Read a file, or its first `most` examples; bad lines are left out and listed."""
    if not Path(path).is_file():
        raise ArgumentError(f"There is no file {path!r} to train on.")
    labels, dense, ids = array("b"), array("f"), array("q")
    bad: dict[int, str] = {}
    num_bad = 0
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(_lines(file), start=1):
            if most is not None and len(labels) >= most:
                break
            try:
                label, counts, names = _fields(line)
            except ValueError as error:
                num_bad += 1
                if num_bad <= MOST_NAMED:
                    bad[number] = str(error)
                continue
            labels.append(label)
            dense.extend(counts)
            ids.extend(names)
    if not labels:
        why = "; ".join(f"line {n}: {text}" for n, text in list(bad.items())[:3])
        raise ArgumentError(f"{path} has no line in Criteo's format. {why or 'It is empty.'}")
    counts_of = torch.frombuffer(dense, dtype=torch.float32).view(len(labels), NUM_DENSE)
    return ClickFile(
        path,
        torch.frombuffer(labels, dtype=torch.int8).float(),
        counts_of.clamp(min=0).log1p_(),
        torch.frombuffer(ids, dtype=torch.int64).view(len(labels), NUM_IDS),
        bad,
        num_bad,
    )


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file without line ends; only the start of one that is too long."""
    while line := file.readline(MAX_LINE):
        rest = line
        while not rest.endswith("\n") and (rest := file.readline(MAX_LINE)):
            pass
        yield line.rstrip("\r\n")


def _fields(line: str) -> tuple[int, list[int], list[int]]:
    """
    >>> label, counts, ids = _fields("1" + 13 * "\\t2" + 25 * "\\t0a" + "\\t")
    >>> label, counts[0], ids[0], ids[-1]
    (1, 2, 10, -1)
    """
    if len(line) >= MAX_LINE:
        raise ValueError(f"it has {MAX_LINE} characters or more")
    fields = line.split("\t")
    wanted = 1 + NUM_DENSE + NUM_IDS
    if len(fields) != wanted:
        raise ValueError(f"{len(fields)} fields, not {wanted}")
    if fields[0] not in ("0", "1"):
        raise ValueError(f"the label is {fields[0][:40]!r}, not 0 or 1")
    counts = [_integer(text, place) for place, text in enumerate(fields[1:14], start=2)]
    names = [_id(text, place) for place, text in enumerate(fields[14:], start=15)]
    return int(fields[0]), counts, names


def _integer(text: str, place: int) -> int:
    if not text:
        return 0
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"field {place} is {text[:40]!r}, not an integer")
    return int(text)


def _id(text: str, place: int) -> int:
    if not text:
        return -1
    if _HEXADECIMAL.fullmatch(text) is None:
        raise ValueError(f"field {place} is {text[:40]!r}, not a hexadecimal id")
    number = int(text, 16)
    if number >= 2**63:
        raise ValueError(f"field {place} is {text!r}, not an id of at most 63 bits")
    return number
