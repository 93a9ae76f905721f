"""A step of one rank on a GPU: kernels read the batch directly, and the host never waits.

Everything that depends only on the plan (addresses, sizes, where results go) is in device arrays,
made with the first batch of each form. A step makes the same calls for any number of tables.

Note [Late checks]
A batch is checked on the device, before its lookup (see Note [Records] in `kernels.tables`). An
invalid one changes no row. The host reads the result when the next step begins, earlier if the
lookup has reported it by then, or in `synchronize`. With `check="now"` the lookup itself waits for
it. A CUDA graph cannot run such code: its record accumulates the results of all replays, and
`synchronize` reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardwise.comm.agreement import Fault, joint_error
from shardwise.embedding.batch import bags_of, bags_per_feature, unfit
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.stacks import Stacks
from shardwise.errors import UnsupportedError
from shardwise.kernels.launch import is_captured
from shardwise.kernels.lookup import Trace, pooled_lookup
from shardwise.kernels.tables import IdBags, OutputRows, Records, TableSet, check_bags, first_bags
from shardwise.lookup.backends.triton_kernels import step_rows
from shardwise.lookup.bags import FeatureBags
from shardwise.lookup.messages import RankBatch
from shardwise.lookup.optimizers import Adam
from shardwise.lookup.prefetch import PrefetchedBatch
from shardwise.lookup.routing import Route
from shardwise.simulation.ranks import one_tensor

#: Forms of batches that are kept.
_FORMS = 64


class _Form(NamedTuple):
    """The state shared by batches with the same features and numbers of bags."""

    tables: TableSet
    #: Per state of the optimizer, one tensor per table.
    states: tuple[list[torch.Tensor], ...]
    first_bag: torch.Tensor
    max_bags: int
    rows: OutputRows
    mode: str
    #: The shape of the joined output, or of each feature's.
    shapes: list[tuple[int, int]]


class OneRank:
    """The lookups of a collection whose tables are all on one rank."""

    def __init__(
        self, route: Route, stacks: Stacks, optimizer: InBackward | None, *, wait: bool
    ) -> None:
        self.route, self.stacks, self.optimizer = route, stacks, optimizer
        self.wait = wait
        self.records = Records(stacks.weights[0][0].device)
        self._forms: dict[Any, _Form] = {}
        self._addresses: tuple[int, ...] = ()
        #: Looked up, and not known to be valid.
        self._late: list[OneRankBatch] = []
        #: Batches that are part of a graph.
        self._captured: list[OneRankBatch] = []

    def __reduce__(self) -> Any:
        """A copy has its own records and knows of no batch."""
        return _make, (self.route, self.stacks, self.optimizer, self.wait)

    def prefetch(self, batch: Jagged, *, joined: bool, train: bool) -> OneRankBatch | Fault | None:
        """The batch, being checked; None if it is not for the kernels."""
        device = self.records.device
        given = (batch.values, batch._lengths, batch._offsets, batch._weights)
        if batch.problem is not None or not all(x is None or _is_plain(x, device) for x in given):
            return None
        if batch.sizes == () or not batch.num_bags:
            return None
        form = self._form(batch, joined)
        if isinstance(form, Fault):
            return form
        weights = batch._weights
        if weights is not None and weights.shape != batch.values.shape:
            return None  # `bags_of` says what is wrong
        return OneRankBatch(self, batch, form, joined=joined, train=train)

    def _form(self, batch: Jagged, joined: bool) -> _Form | Fault:
        weights = self.stacks.weights[0]
        kept = [] if self.optimizer is None else self.optimizer.states_of(0)
        addresses = tuple(map(torch.Tensor.data_ptr, (*weights, *kept)))
        if addresses != self._addresses or len(self._forms) > _FORMS:
            self._forms, self._addresses = {}, addresses
        key = (batch.features, batch.sizes, batch.num_bags, joined)
        form = self._forms.get(key)
        if form is None:
            sizes = bags_per_feature(self.route.features, batch, side_by_side=joined)
            if isinstance(sizes, Fault):
                return sizes
            form = self._forms[key] = self._make_form(batch.features, sizes, joined)
        return form

    def _make_form(self, features: Sequence[str], sizes: Sequence[int], joined: bool) -> _Form:
        stacks, tables = self.stacks, self.route.tiling.tables
        numbers = {table.name: number for number, table in enumerate(tables)}
        owners = self.route.features.owners
        shards = [self.route.tiling.shards[number][0] for number in range(len(tables))]
        states = []
        if self.optimizer is not None:
            for name in self.optimizer.settings.states:
                stacked = [
                    (self.optimizer.state_of(0, shard.stack, name), shard) for shard in shards
                ]
                states.append([state[at.base :][: at.num_rows] for state, at in stacked])
        means = [owners[feature].pooling == "mean" for feature in features]
        table_set = TableSet(
            [stacks.rows(0, shard) for shard in shards],
            [numbers[owners[feature].name] for feature in features],
            means=means,
        )
        size_of = dict(zip(features, sizes, strict=True))
        dims = [table.embedding_dim for table in owners.values()]
        shapes = [(size_of[f], t.embedding_dim) for f, t in owners.items()]
        if joined:
            shapes = [(sizes[0], sum(dims))]
            begins, stride = dict(zip(owners, _starts(dims), strict=False)), sum(dims)
            places = [(begins[feature], stride) for feature in features]
        else:
            begins = dict(zip(owners, _starts([n * d for n, d in shapes]), strict=False))
            places = [(begins[feature], owners[feature].embedding_dim) for feature in features]
        rows = OutputRows(
            tuple(start for start, _ in places),
            tuple(stride for _, stride in places),
            sum(n * d for n, d in shapes),
        )
        first = first_bags(tuple(sizes), table_set.device)
        mode = "mean" if any(means) else "sum"
        return _Form(table_set, tuple(states), first, max(sizes), rows, mode, shapes)

    # -- see Note [Late checks] ------------------------------------------------------------------

    def begin(self, batch: OneRankBatch) -> None:
        """Begin a step: read the results of earlier checks, but not yet that of the new batch."""
        self.raise_late()
        if batch.is_captured:
            self._captured.append(batch)
        elif self.wait:
            batch.raise_if_invalid()
        else:
            self._late.append(batch)

    def raise_late(self) -> None:
        late, self._late = self._late, []
        for batch in late:
            batch.raise_if_invalid()

    def forget(self, batch: OneRankBatch) -> None:
        """Do not raise for this batch again."""
        self._late = [other for other in self._late if other is not batch]

    def synchronize(self) -> None:
        """Wait for all checks; raise if a batch was invalid."""
        self.raise_late()
        for batch in self._captured:
            batch.raise_if_invalid()


class OneRankBatch(PrefetchedBatch):
    """A batch whose bags and ids are being checked on the device."""

    is_alone = True

    def __init__(
        self, alone: OneRank, batch: Jagged, form: _Form, *, joined: bool, train: bool
    ) -> None:
        self.route, self.grid = alone.route, alone.stacks.grid
        self.weights = batch._weights
        self.alone, self.batch, self.form, self.joined = alone, batch, form, joined
        self.weights_train = train
        #: The update that this batch made, if any, to be taken back if the batch is invalid.
        self.updated: InBackward | None = None
        self._general: PrefetchedBatch | None = None
        ids = batch.values.contiguous()
        offsets = batch.offsets.contiguous()
        self.bags = IdBags(ids, offsets, form.first_bag, form.max_bags, form.rows)
        self.is_captured = is_captured(ids.device)
        self.record = alone.records.take()
        check_bags(form.tables, self.bags, self.record.numbers, padded=batch.padded)

    def look_up(self, *, trace: bool) -> tuple[tuple[torch.Tensor, ...], Trace | None]:
        """The output of each feature, or the joined one."""
        form, alone = self.form, self.alone
        weights = self.weights
        flat, known = pooled_lookup(
            form.tables,
            self.bags,
            form.mode,
            None if weights is None else weights.detach().contiguous(),
            trace,
            alone.stacks.dtype,
            self.record._replace(seen=None) if self.is_captured else self.record,
            not self.batch.padded,
        )
        if self.is_captured:
            alone.records.add_to_graphs(self.record)
        if self.joined:
            outputs = [flat.view(form.shapes[0])]
        else:
            parts = flat.split([num * dim for num, dim in form.shapes])
            outputs = list(map(torch.Tensor.view, parts, form.shapes))
        if self.grid is not None:
            outputs = [one_tensor(self.grid, [out]) for out in outputs]
        return tuple(outputs), known

    def update(self, trace: Trace, grads: Sequence[torch.Tensor | None]) -> None:
        """Step the rows that were looked up."""
        form, optimizer = self.form, self.alone.optimizer
        assert optimizer is not None, "an update needs an optimizer"
        if self.record.has_arrived():
            self.raise_if_invalid()
        if self.joined:
            assert grads[0] is not None, "backward of nothing"
            flat = grads[0].reshape(-1)
        else:
            flat = torch.cat([_flat(g, s, grads) for g, s in zip(grads, form.shapes, strict=True)])
        if self.is_captured and isinstance(optimizer.settings, Adam):
            raise UnsupportedError(
                "Adam in a CUDA graph: its correction depends on the number of the step, and a "
                "graph repeats one. Use another optimizer, or leave the collection out of it."
            )
        self.updated = optimizer
        optimizer.num_steps += 1
        step_rows(
            optimizer.settings, optimizer.num_steps, form.tables, trace, flat, form.states,
            self.record.numbers,
        )  # fmt: skip

    # -- see Note [Late checks] ------------------------------------------------------------------

    def raise_if_invalid(self) -> None:
        """Raise if the batch is invalid; waits if that is not known yet."""
        if self.record.has_arrived() and not self.record.is_invalid():
            return
        numbers = self.alone.records.of_graphs if self.is_captured else self.record.numbers
        invalid, bag, at, _ = numbers.tolist()
        if not invalid:
            return
        if self.is_captured:
            numbers.zero_()
        self.alone.forget(self)
        if self.updated is not None:
            self.updated.num_steps -= 1
            self.updated = None
        fault = None if self.is_captured else self._bags()
        if not isinstance(fault, Fault):
            fault = unfit(self._described(bag, at))
        raise joint_error("", {0: fault}, 1)

    def _bags(self) -> FeatureBags | Fault:
        weights = None if self.weights is None else self.weights.detach()
        return bags_of(
            self.route.features,
            self.batch.with_weights(weights),
            weights_train=self.weights_train,
            side_by_side=self.joined,
        )

    def _described(self, bag: int, at: int) -> str:
        """The fault as the record describes it, for a batch that has been overwritten."""
        num_bags, num_ids = self.batch.num_bags, self.bags.ids.shape[0]
        if bag:
            return f"a batch had bags that do not fit its {num_ids} ids, from bag {num_bags - bag}"
        return f"a batch had an id, number {num_ids - at} of all, out of the range of its table"

    # -- what the kernels do not do ----------------------------------------------------------------

    def send_ids(self) -> None:
        """Do nothing: there is no other rank to send ids to."""

    def check(self) -> None:
        self.alone.begin(self)

    def lengths_per_feature(self) -> list[torch.Tensor]:
        return self._as_others().lengths_per_feature()

    def arrive(self) -> list[RankBatch]:
        """The batch as several ranks exchange it, for gradients of parameters and weights."""
        return self._as_others().arrive()

    def _as_others(self) -> PrefetchedBatch:
        if self._general is None:
            self._general = PrefetchedBatch(self.route, self.grid, [self._bags()], self.weights)
        return self._general


def _make(route: Route, stacks: Stacks, optimizer: InBackward | None, wait: bool) -> OneRank:
    return OneRank(route, stacks, optimizer, wait=wait)


def _is_plain(x: torch.Tensor, device: torch.device) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device == device


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))


def _flat(
    grad: torch.Tensor | None, shape: tuple[int, int], grads: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    if grad is not None:
        return grad.reshape(-1)
    sample = next(one for one in grads if one is not None)
    return sample.new_zeros(shape[0] * shape[1])
