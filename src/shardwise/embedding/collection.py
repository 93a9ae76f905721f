"""Collections: many tables that are looked up, exchanged and updated together."""

from __future__ import annotations

import copy
import operator
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.dispatch import without_subclass_functions
from shardwise.comm import collectives
from shardwise.comm.agreement import agreeing
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid, grid_of
from shardwise.core.untraced import breaks_graph
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.embedding.batch import prefetch_batch
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.lookup import (
    CollectionEngine,
    enroll,
    form_of,
    jagged_in_graph,
    lengths_in_graph,
    look_up_in_graph,
    num_bags_in_graph,
    run_lookup,
)
from shardwise.embedding.plan import Entry, Plan, check_exchange_dtype, describe
from shardwise.embedding.stacks import (
    Stacks,
    Watched,
    WriteCount,
    draw_tables,
    whole_of,
)
from shardwise.errors import ArgumentError, BatchError, LayoutError, ShardwiseError
from shardwise.lookup.backends.backend import Backend
from shardwise.lookup.backends.registry import is_fused, make_backend
from shardwise.lookup.ids import edges_of
from shardwise.lookup.optimizers import FusedOptimizer, check_fused
from shardwise.lookup.prefetch import PrefetchedBatch
from shardwise.lookup.routing import Route
from shardwise.lookup.tiling import Table, TableTiling, checked_tables
from shardwise.simulation.ranks import agreed, localize

REDUCTIONS = ("mean", "sum")
_ADDRESS = torch.Tensor.data_ptr
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class _Weight(nn.Module):
    """Holds the parameter of one table, under the name that torchrec's modules give it."""

    #: The collection's plan decides its layout: `fully_shard` leaves it alone.
    lays_out_itself = True

    def __init__(self, weight: torch.Tensor, sparse: bool) -> None:
        super().__init__()
        self.__dict__["_parameters"] = Watched()
        # `data` has a separate version counter; views of one stack share one.
        self.weight = nn.Parameter(weight.data)
        self.sparse = sparse


class _Collection(nn.Module):
    """The base class of pooled and unpooled collections."""

    _pooled: bool
    _child: str

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: FusedOptimizer | None = None,
        sparse: bool = True,
        backend: str | Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        check: str = "auto",
    ) -> None:
        super().__init__()
        if check not in ("auto", "now"):
            raise ArgumentError(f"check is 'auto' or 'now', found {check!r}.")
        #: When an invalid batch raises; see `synchronize`.
        self._check = check
        self.tables = checked_tables(tables)
        self.plan: Plan | None = None
        self._backend = make_backend(backend)
        self._sparse = sparse
        check_fused(optimizer)
        self._settings = optimizer
        #: All features, in the order of the output.
        self.features = [feature for table in self.tables for feature in table.features]
        #: The parameters in the order of tables, and when they were listed.
        self._listed: tuple[Any, list[torch.Tensor]] = (None, [])
        self._writes = WriteCount()
        #: Stands for the collection in a graph; see Note [Collections in compiled code].
        self._handle = enroll(self)
        tiling = Plan.of("table_wise").tiling(self.tables, 1)
        place = torch.device(device) if device is not None else torch.get_default_device()
        stacks = Stacks(tiling, None, dtype or torch.get_default_dtype(), place)
        if place.type != "meta":
            draw_tables(stacks)
        weights = {t.name: _Weight(stacks.table(i), sparse) for i, t in enumerate(self.tables)}
        held = nn.ModuleDict(weights)
        held.__dict__["_modules"] = Watched(held._modules)
        self.add_module(self._child, held)
        self._settle(stacks, scale=1.0)

    # -- weights -----------------------------------------------------------------------------

    def parameter(self, table: str) -> nn.Parameter:
        """The parameter of a table: a DTensor once the collection is sharded."""
        return self.get_submodule(f"{self._child}.{table}").weight  # type: ignore[return-value]

    def _parameters_in_order(self) -> list[torch.Tensor]:
        held: Any = self._modules[self._child]
        when = (Watched.num_changes, id(held))
        if self._listed[0] != when:  # otherwise no Python per table
            modules = held._modules.values()
            try:
                self._listed = when, [module._parameters["weight"] for module in modules]
            except KeyError:  # a parametrized weight is computed
                return [self.parameter(table.name) for table in self.tables]
        return self._listed[1]

    def _settle(
        self,
        stacks: Stacks,
        scale: float,
        exchange_dtype: torch.dtype | None = None,
        optimizer: InBackward | None = None,
    ) -> None:
        """Use these stacks from now on, with a new optimizer unless there is one."""
        if self._settings is not None and optimizer is None:
            optimizer = InBackward(self._settings, stacks, self._backend)
        route = Route(stacks.tiling, pooled=self._pooled, dtype=stacks.dtype)
        self._engine = CollectionEngine(
            route=route,
            grid=stacks.grid,
            stacks=stacks,
            backend=self._backend,
            optimizer=optimizer,
            sparse=self._sparse,
            scale=scale,
            exchange_dtype=exchange_dtype,
            writes=self._writes,
            alone=make_alone(self._backend, route, stacks, optimizer, wait=self._check == "now"),
        )
        self._form = self._output_form()
        #: The state of the parameters when they were last checked to be views of the stacks.
        self._known: Any = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the stacks and the parameters, for `to`, `double` and the like."""
        stacks = self._engine.stacks
        if stacks.grid is not None:
            if all(
                w.dtype == fn(w[:0]).dtype and w.device == fn(w[:0]).device for w in stacks.all()
            ):
                return self
            raise ShardwiseError(
                "A sharded collection stays in the dtype and on the device it was sharded with: "
                "convert it before shard()."
            )
        was_meta = stacks.device.type == "meta"
        stacks.convert(fn)
        if was_meta and stacks.device.type != "meta":
            self._replace_parameters(stacks)
            self._settle(stacks, scale=1.0)
            return self
        if self.optimizer is not None:
            self.optimizer.convert(fn)
        self._settle(stacks, scale=1.0, optimizer=self.optimizer)
        self._alias_parameters()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = fn(parameter.grad)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load whole tables into sharded ones, and sharded tables into whole ones."""
        for table in self.tables:
            name = f"{prefix}{self._child}.{table.name}.weight"
            value, mine = state_dict.get(name), self.parameter(table.name)
            if isinstance(value, DTensor) and not isinstance(mine, DTensor):
                state_dict[name] = whole_of(value)
            whole = type(value) in (torch.Tensor, nn.Parameter) and value.shape == mine.shape
            if whole and isinstance(mine, DTensor):
                state_dict[name] = distribute_tensor(
                    value.detach(), mine.device_mesh, mine.placements, src_data_rank=None
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        copied._is_new()
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_new()

    def _is_new(self) -> None:
        """After it was copied or loaded."""
        self._handle, self._form = enroll(self), self._output_form()
        self._known, self._listed = None, (None, [])
        self._alias_parameters()

    def _alias_parameters(self) -> None:
        """Make the parameters views of the stacks again."""
        stacks = self._engine.stacks
        for number, table in enumerate(self.tables):
            parameter, view = self.parameter(table.name), stacks.table(number)
            if isinstance(view, DTensor):
                assert isinstance(parameter, DTensor), "parameters of sharded tables are DTensors"
                parameter._local = view._local
            else:
                parameter.data = view

    @property
    def optimizer(self) -> InBackward | None:
        """The optimizer whose updates are fused into backward, if there is one."""
        return self._engine.optimizer

    def __checkpoint_beside__(self) -> list[torch.Tensor]:
        """The state of the fused optimizer, which the state dict does not have."""
        if self.optimizer is None:
            return []
        places = range(len(self._engine.stacks.ranks))
        return [state for place in places for state in self.optimizer.states_of(place)]

    # -- sharding ----------------------------------------------------------------------------

    def shard(
        self,
        mesh: DeviceMesh,
        plan: Plan | str | Mapping[str, Entry] | os.PathLike[str],
        *,
        grad_reduction: str = "mean",
        exchange_dtype: torch.dtype | None = None,
    ) -> Any:
        """Shard the tables over the ranks of `mesh`, with the weights of its first rank.

        In place; returns the collection. Afterwards each rank passes its own batch. Gradients are
        those of the mean of the ranks' losses, or of their sum.

        With `exchange_dtype` (torch.bfloat16 or torch.float16) rows and gradients are sent in that
        dtype, in half the bytes of float32; sums keep the tables' dtype. The default is the plan's
        `exchange_dtype`.

        A collection on the `meta` device is allocated here, only each rank's shards, with the
        initial values that one device would draw from the first rank's generator.

        Of a mesh with several axes pass one, such as `mesh["dev"]`: tables are sharded along it,
        with a replica for each coordinate of the others, which `data_parallel` keeps equal.

        A rank outside the mesh calls this too. It holds no rows, and looks up zeros.
        """
        if self._engine.grid is not None:
            raise ShardwiseError("The collection is sharded already; make another one.")
        grid = grid_of(mesh)
        if grid.num_axes != 1:
            raise LayoutError(
                f"A collection is sharded over a mesh with one axis, found {grid!r}. Take one "
                "axis (mesh['name'], with the names given as mesh_dim_names), or make a mesh of "
                f"all ranks: init_device_mesh({grid.device_type!r}, ({grid.world.size},))."
            )
        chosen, tiling, sent = self._agreed(grid, plan, grad_reduction, exchange_dtype)
        old = self._engine.stacks
        stacks = Stacks(tiling, grid, old.dtype, torch.device(grid.device_type))
        if grid.outside:
            pass  # the ranks of the mesh have the tables
        elif old.device.type == "meta":
            draw_tables(stacks)
        else:
            self._send_weights(grid, stacks)
        self.plan = chosen
        self._replace_parameters(stacks)
        scale = 1.0 / grid.num_ranks if grad_reduction == "mean" else 1.0
        self._settle(stacks, scale, sent)
        return self

    def _send_weights(self, grid: Grid, stacks: Stacks) -> None:
        """Fill the stacks with the weights that the first rank has."""
        for number, table in enumerate(self.tables):
            whole = self.parameter(table.name).detach().to(grid.device_type)
            with because("shard", implicit=False):
                value = collectives.broadcast(localize(grid, whole), 0, grid, 0)
            stacks.fill_rows(number, 0, agreed(value))

    def reset_parameters(self) -> None:
        """Draw initial values again, as `shard` does for a collection on the `meta` device."""
        stacks = self._engine.stacks
        if stacks.grid is None or not stacks.grid.outside:
            draw_tables(stacks)

    def _agreed(
        self,
        grid: Grid,
        plan: Plan | str | Mapping[str, Entry] | os.PathLike[str],
        grad_reduction: str,
        exchange_dtype: torch.dtype | None,
    ) -> tuple[Plan, TableTiling, torch.dtype | None]:
        """The plan, its tiling and the dtype of exchanges, once all ranks agree on them."""
        old = self._engine.stacks
        values = "no values (meta)" if old.device.type == "meta" else "values"
        updates = "no" if self._settings is None else repr(self._settings)
        with agreeing(grid, "the plan of a collection") as lines:
            lines += [
                f"{type(self).__name__}, grad_reduction={grad_reduction}",
                f"{old.dtype}, {values}, {updates} updates in backward",
            ]
            if grad_reduction not in REDUCTIONS:
                raise ArgumentError(f"grad_reduction is 'mean' or 'sum', found {grad_reduction!r}.")
            chosen = Plan.of(plan)
            sent = exchange_dtype or chosen.exchange_dtype
            check_exchange_dtype(sent, old.dtype)
            tiling = chosen.tiling(self.tables, grid.num_ranks)
            lines.append(f"exchange_dtype={sent}")
            lines += [
                f"{table.name} ({table.num_embeddings}×{table.embedding_dim}): {split.kind} "
                f"{list(split.sizes)}, {table.pooling} of {', '.join(table.features)}"
                for table, split in zip(self.tables, tiling.splits, strict=True)
            ]
        return chosen, tiling, sent

    def describe(self, *, batch_size: int = 2048, ids_per_bag: float = 1) -> str:
        """Bytes per rank, their balance, and what a step of such batches communicates."""
        stacks = self._engine.stacks
        return describe(
            stacks.tiling,
            pooled=self._pooled,
            batch_size=batch_size,
            ids_per_bag=ids_per_bag,
            dtype=stacks.dtype,
            exchange_dtype=self._engine.exchange_dtype,
            sums_squares=self._settings is not None and self._settings.needs_whole_rows,
        )

    def _replace_parameters(self, stacks: Stacks) -> None:
        for number, table in enumerate(self.tables):
            module = self.get_submodule(f"{self._child}.{table.name}")
            trained, value = self.parameter(table.name).requires_grad, stacks.table(number)
            if stacks.grid is None or self._settings is None:
                module.weight = nn.Parameter(value, requires_grad=trained)
            else:
                module.weight = self._writes.parameter(value, trained=trained)

    # -- a batch -----------------------------------------------------------------------------

    def prefetch(self, batch: Any) -> PrefetchedBatch:
        """Start to exchange a batch; give the result to the collection instead of the batch.

        This does not wait for other ranks. The ids are sent during the collection's next exchange
        of rows or gradients, while other work goes on. An invalid batch, on any rank, raises when
        it is used.
        """
        # Whether its lookup will be under autograd is not known yet.
        prefetched = self._prefetch(batch, self._parameters_in_order(), may_train=True)
        self._engine.queue.add(prefetched)
        return prefetched

    def _prefetch(
        self, batch: Any, parameters: list[torch.Tensor], *, may_train: bool
    ) -> PrefetchedBatch:
        trained: list[bool] = []
        if may_train and self._engine.grid is not None:
            with without_subclass_functions():  # there may be a thousand tables
                trained = list(map(_REQUIRES_GRAD, parameters))
        return prefetch_batch(
            self._engine.route,
            self._engine.grid,
            self._engine.alone,
            batch,
            self._trouble(parameters),
            side_by_side=self._side_by_side,
            may_train=may_train,
            tables_train=any(trained),
            frozen=0 if all(trained) else self._frozen_copies(trained),
        )

    def _frozen_copies(self, trained: list[bool]) -> int:
        """A digest of which replicated tables are frozen; 0 if none is."""
        splits = self._engine.stacks.tiling.splits
        copies = [flag for flag, split in zip(trained, splits, strict=True) if split.replicated]
        return 0 if all(copies) else zlib.crc32(bytes(copies)) | 1

    def synchronize(self) -> None:
        """Wait until all batches so far are checked; raise if one was invalid.

        On a GPU, a single rank does not wait for the check of its batch: an invalid batch changes
        no row, its output is meaningless, and the next lookup raises at the latest. With
        `check="now"` the lookup raises at once, as it does everywhere else.
        """
        if self._engine.alone is not None:
            self._engine.alone.synchronize()

    def _trouble(self, parameters: list[torch.Tensor]) -> str | None:
        """The fault if tables have no memory or a parameter was replaced; else None."""
        stacks = self._engine.stacks
        if stacks.device.type == "meta":
            return "the tables are on the meta device: shard() or to_empty() gives them memory"
        # A DTensor's local tensor does not change; the data of a plain parameter may.
        plain = self._engine.grid is None
        seen = tuple(map(_ADDRESS, (*stacks.all(), *parameters))) if plain else ()
        if self._known is not None and parameters is self._known[0] and seen == self._known[1]:
            return None
        trouble = self._replaced()
        self._writes.follow(parameters)
        self._known = (parameters, seen) if trouble is None else None
        return trouble

    def _replaced(self) -> str | None:
        """The error text for a parameter that is no longer a view of its stack."""
        stacks = self._engine.stacks
        for number, table in enumerate(self.tables):
            if not stacks.holds(number, self.parameter(table.name)):
                return (
                    f"the parameter of table {table.name!r} was replaced by a tensor of its own; "
                    "write into it instead (parameter.copy_(values) under torch.no_grad())"
                )
        return None

    @property
    def _side_by_side(self) -> bool:
        """Whether the features form one tensor."""
        return False

    def _run(self, batch: Any) -> tuple[PrefetchedBatch, tuple[torch.Tensor, ...]]:
        parameters, joined = self._parameters_in_order(), self._side_by_side
        prefetched = batch
        if not isinstance(batch, PrefetchedBatch):
            prefetched = self._prefetch(batch, parameters, may_train=torch.is_grad_enabled())
        if prefetched.route is not self._engine.route:
            raise BatchError("The batch was prefetched by another collection, or before sharding.")
        prefetched.check()
        stacks = self._engine.stacks
        if stacks.grid is not None and stacks.grid.outside:
            trained = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
            rows = prefetched.zeros(stacks.dtype, stacks.device, joined=joined, trained=trained)
            return prefetched, rows
        return prefetched, run_lookup(self._engine, prefetched, parameters, joined=joined)

    # -- in compiled code --------------------------------------------------------------------

    def _output_form(self) -> str:
        """A graph's knowledge of the results."""
        dims = self._engine.route.dims
        return form_of(self._engine.stacks, [sum(dims)] if self._side_by_side else dims)

    def _look_up_in_graph(self, batch: Jagged, num_bags: Sequence[int]) -> Sequence[torch.Tensor]:
        """`_run` as torch.compile traces it; `num_bags` of each feature, in the order of output."""
        sizes = num_bags[:1] if self._side_by_side else num_bags
        if not self._pooled:
            # With one feature all ids are its own; with more, the counts are data-dependent.
            sizes = [batch.values_in_graph().shape[0]] if len(num_bags) == 1 else []
        return look_up_in_graph(self._handle, self._form, batch, sizes)

    def extra_repr(self) -> str:
        rows = sum(table.num_embeddings for table in self.tables)
        where = "" if self._engine.grid is None else f", sharded over {self._engine.grid!r}"
        return f"{len(self.tables)} tables, {rows} rows{where}"


def make_alone(
    backend: Backend,
    route: Route,
    stacks: Stacks,
    optimizer: InBackward | None,
    *,
    wait: bool,
) -> Any:
    """The fused path of a single rank, if its kernels support the collection; otherwise None."""
    if not stacks.weights:  # a rank outside the mesh
        return None
    weights = stacks.weights[0]
    states = [] if optimizer is None else optimizer.states_of(0)
    if not route.pooled or route.num_ranks > 1 or not is_fused(backend, weights, states):
        return None
    # Imported here: nothing else needs Triton.
    from shardwise.embedding.alone import OneRank

    return OneRank(route, stacks, optimizer, wait=wait)


def is_traced_batch(batch: Any) -> bool:
    """Whether torch.compile is tracing, with a batch that an op can take."""
    return torch.compiler.is_compiling() and not isinstance(batch, PrefetchedBatch)


for _method in (_Collection.prefetch, _Collection._run):
    breaks_graph(_method, "prefetch sends a batch, which no graph can hold")


class EmbeddingBagCollection(_Collection):
    """Tables whose rows are pooled over bags of ids.

    `output="dict"` returns a tensor (bags × embedding_dim) per feature; `output="tensor"` one
    tensor with the features side by side in the declared order, which needs the same number of bags
    in each.

    >>> from shardwise.embedding import Jagged
    >>> tables = [Table("user", 10, 4), Table("item", 20, 8, features=("seen", "bought"))]
    >>> bags = EmbeddingBagCollection(tables)
    >>> batch = Jagged.from_lists({"user": [[1], [2, 3]], "seen": [[], [19]], "bought": [[4], [5]]})
    >>> {feature: tuple(rows.shape) for feature, rows in bags(batch).items()}
    {'user': (2, 4), 'seen': (2, 8), 'bought': (2, 8)}
    """

    _pooled = True
    _child = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        output: str = "dict",
        optimizer: FusedOptimizer | None = None,
        sparse: bool = True,
        backend: str | Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        check: str = "auto",
    ) -> None:
        if output not in ("dict", "tensor"):
            raise ArgumentError(f"output is 'dict' or 'tensor', found {output!r}.")
        self.output = output
        super().__init__(
            tables,
            optimizer=optimizer,
            sparse=sparse,
            backend=backend,
            device=device,
            dtype=dtype,
            check=check,
        )

    @property
    def _side_by_side(self) -> bool:
        return self.output == "tensor"

    def forward(self, batch: Any) -> Any:
        outputs: Sequence[torch.Tensor]
        if is_traced_batch(batch):
            batch = jagged_in_graph(batch)
            num_bags = num_bags_in_graph(batch, self.features, equal=self._side_by_side)
            outputs = self._look_up_in_graph(batch, num_bags)
        else:
            _, outputs = self._run(batch)
        if self._side_by_side:
            return outputs[0]
        return dict(zip(self.features, outputs, strict=True))


@dataclass(slots=True)
class JaggedRows:
    """The rows of one feature: one per id, in order, and the lengths of the bags they form."""

    values: torch.Tensor
    lengths: torch.Tensor

    def to_nested(self) -> torch.Tensor:
        """As a nested tensor of layout `torch.jagged`, bags × (ids) × embedding_dim."""
        return torch.nested.nested_tensor_from_jagged(self.values, edges_of(self.lengths))


class EmbeddingCollection(_Collection):
    """Tables whose rows are looked up one by one: a row for each id.

    >>> from shardwise.embedding import Jagged
    >>> rows = EmbeddingCollection([Table("word", 10, 4)])
    >>> found = rows(Jagged.from_lists({"word": [[1, 2], [3]]}))
    >>> tuple(found["word"].values.shape), found["word"].lengths.tolist()
    ((3, 4), [2, 1])
    """

    _pooled = False
    _child = "embeddings"

    def forward(self, batch: Any) -> dict[str, JaggedRows]:
        outputs: Sequence[torch.Tensor]
        if is_traced_batch(batch):
            batch = jagged_in_graph(batch)
            num_bags = num_bags_in_graph(batch, self.features)
            outputs = self._look_up_in_graph(batch, num_bags)
            lengths = lengths_in_graph(batch, self.features)
        else:
            prefetched, outputs = self._run(batch)
            lengths = prefetched.lengths_per_feature()
        return {
            feature: JaggedRows(rows, length)
            for feature, rows, length in zip(self.features, outputs, lengths, strict=True)
        }
