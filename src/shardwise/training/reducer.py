"""Reducer: reduces gradients as the contract says, in buckets, while backward runs.

Note [Buckets]
Parameters are put into buckets in reverse order, about the order in which backward reaches them. A
bucket is sent when all its gradients are there and all earlier buckets have been sent, including
those of reducers that began earlier: all ranks start the same collectives in the same order,
whatever parameters they used. At the end of backward the remaining buckets are started, with zeros
for gradients that a rank lacks, and all are awaited. Each bucket carries one flag per parameter, so
a parameter that no rank used gets no gradient. Row-sparse gradients of tables come last: their rows
are gathered.

Note [Groups of gradients]
A bucket is sent when a hook finds it complete. On a rank that uses other parameters, that happens
at another point of backward, so its order relative to the collectives of backward itself, such as
the exchanges of tables, would differ between ranks. So buckets have separate process groups, in
which their order depends only on gradients. Front doors make the groups, since all ranks call them.
Copies and forward passes may happen on one rank only, so they use an existing group.

Note [Frozen on one rank]
All ranks have to reduce the same parameters, and no rank knows what others freeze between steps. So
the buckets of a pass are of the parameters that all ranks are known to train, with zeros for what
was frozen since. Each carries two flags: this rank trains others now; it trains the same. If no
rank has changed, nothing more is sent. Else all ranks know, and compare what they train: they raise
together, or reduce what is newly trained too.

Note [One reducer for nested modules]
Declared modules that have parameters in common share a reducer: each gradient is reduced once, over
the axes that all of them declare, in one order of buckets. Declarations are copied and pickled with
a module; a reducer is made from them, and again whenever the parameters of a module have changed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise._torch.autograd import (
    after_backward,
    current_backward,
    in_backward,
    is_watched_later,
    own_hook,
)
from shardwise.comm import collectives
from shardwise.comm.watch import because, watch
from shardwise.core.mesh import Grid
from shardwise.core.untraced import untraced
from shardwise.dtensor.autograd import BUCKET_BYTES
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import UnsupportedError
from shardwise.simulation.ranks import (
    copy_per_rank,
    is_per_rank,
    one_part,
    plays_world,
    roster_of,
)
from shardwise.training.buckets import (
    ROWS,
    Bucket,
    Collective,
    SentBucket,
    agree_on_trained,
    average_rows,
    changed_on,
    changed_on_later,
    check_plain_gradients,
    collectives_for,
    flattened,
    kinds_on_all_ranks,
    make_buckets,
    put_back,
    unlike_ranks,
)
from shardwise.training.contract import (
    Axis,
    DataAxes,
    Reduction,
    is_used_alike,
    reduction_of,
    sync_values,
    tensor_axes,
)

#: The attribute of a module with its declaration.
_DECLARED = "_declared_module"
#: The reducer of each parameter, by id; a reducer keeps its parameters alive, so ids are unique.
_owners: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()
#: The reducers that wait for gradients, in the order in which their first ones arrived; also those
#: whose last backward raised, until their next forward.
_begun: list[weakref.ref[Reducer]] = []


class DeclaredModule:
    """The data axes that were declared for one module, and whether backward reduces now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.data_axes: list[DataAxes] = []
        self.bucket_bytes = BUCKET_BYTES
        #: The coordinate whose values the parameters start with; None: they keep their own.
        self.source: int | None = None
        self.enabled = True
        self.parameters: list[nn.Parameter] = []
        #: Parameters with row-sparse gradients.
        self.tables: list[nn.Parameter] = []
        #: Whether styles split the module along some axis.
        self.is_split = False
        self.reducer: Reducer | None = None

    # A copy of the module comes with a copy of this; hooks of parameters are not copied.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data_axes": self.all_data_axes(), "reducer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        make_reducer(self, together=False)

    def all_data_axes(self) -> list[DataAxes]:
        """Also those of declared modules around this one and inside of it."""
        return _data_axes([self, *(self.reducer.modules if self.reducer is not None else ())])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward reduces nothing."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def before_forward(self, *_: Any) -> None:
        """A forward pre-hook: the module's parameters may have changed."""
        # Without data axes there is nothing to do after the check of plain gradients.
        unchecked = self.reducer is not None and self.reducer.unchecked
        if (self.data_axes or unchecked) and not torch.compiler.is_compiling():
            self.update()

    @untraced
    def update(self) -> None:
        """Take over the module's current parameters."""
        found = list(self.module.parameters())
        known = self.parameters
        if len(found) != len(known) or any(a is not b for a, b in zip(found, known, strict=True)):
            before = {id(p) for p in known}
            new = [p for p in found if id(p) not in before]
            for each in self.data_axes:
                if self.source is not None:
                    sync_values(new, each.axes, self.source)
            self.refresh()
            make_reducer(self, together=False)
        elif self.reducer is not None:
            self.reducer.drop_unfinished()

    def refresh(self) -> None:
        """Record what the module has now."""
        self.parameters = list(self.module.parameters())
        self.tables = _tables(self.module)
        self.is_split = bool(tensor_axes(self.module))


def _data_axes(modules: list[DeclaredModule]) -> list[DataAxes]:
    return list(dict.fromkeys(each for declared in modules for each in declared.data_axes))


def declare(
    module: nn.Module,
    *data_axes: DataAxes,
    bucket_bytes: int | None = None,
    source: int | None = None,
) -> DeclaredModule:
    """Make these data axes of all parameters of `module`, including later ones."""
    declared: DeclaredModule | None = module.__dict__.get(_DECLARED)
    fresh = declared is None
    if declared is None:
        declared = DeclaredModule(module)
    before = dict(declared.__dict__)
    declared.data_axes = list(dict.fromkeys([*declared.data_axes, *data_axes]))
    declared.bucket_bytes = declared.bucket_bytes if bucket_bytes is None else bucket_bytes
    declared.source = declared.source if source is None else source
    declared.refresh()
    try:
        make_reducer(declared, together=True)
    except Exception:
        declared.__dict__.update(before)
        raise
    if fresh:
        module.__dict__[_DECLARED] = declared
        module.register_forward_pre_hook(declared.before_forward)
    return declared


def declared_module(module: nn.Module) -> DeclaredModule | None:
    return module.__dict__.get(_DECLARED)


def modules_with(parameters: list[nn.Parameter]) -> list[DeclaredModule]:
    """The declared modules that contain some of these parameters."""
    found: dict[int, DeclaredModule] = {}
    for parameter in parameters:
        reducer = _owners.get(id(parameter))
        for declared in reducer.modules_of[id(parameter)] if reducer is not None else ():
            found[id(declared)] = declared
    return list(found.values())


def reduction_for(parameter: torch.Tensor) -> Reduction | None:
    """The declared reduction of the gradient of a parameter."""
    reducer = _owners.get(id(parameter))
    return None if reducer is None else reducer.reductions.get(id(parameter))


def data_axes_along(module: nn.Module, grid: Grid) -> tuple[int, ...]:
    """The axes of `grid` that are data axes of a declared module."""
    declared = declared_module(module)
    found: set[int] = set()
    for each in declared.all_data_axes() if declared is not None else ():
        found.update(each.axes.meet(grid)[0])
    return tuple(sorted(found))


def update_declared(parameters: list[nn.Parameter]) -> None:
    """Update the declared modules that contain some of these parameters."""
    for declared in modules_with(parameters):
        declared.update()


def _tables(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of modules with `sparse=True`, such as torch's embeddings."""
    return [
        parameter
        for owner in module.modules()
        if getattr(owner, "sparse", False) is True
        for parameter in owner.parameters(recurse=False)
    ]


def make_reducer(declared: DeclaredModule, *, together: bool) -> None:
    """Make the reducer of a declared module and of those with parameters in common.

    With `together`, all ranks do so now.
    """
    found = [_owners.get(id(p)) for p in declared.parameters]
    reducers = list({id(r): r for r in (declared.reducer, *found) if r is not None}.values())
    others = {id(d): d for r in reducers for d in r.modules if d is not declared}
    made = Reducer([declared, *others.values()])  # raises before anything is changed
    for reducer in reducers:
        made.groups = {**reducer.groups, **made.groups}
        made.trained -= set(reducer.reductions) - reducer.trained
        made.trained |= reducer.trained & set(made.reductions)
        reducer.retire()
    made.watch(together)


class _Trained(NamedTuple):
    """The buckets of some parameters, and those of row-sparse tables, which are in none."""

    buckets: list[Bucket]
    of_rows: list[nn.Parameter]
    #: The ids of each bucket's parameters, and the number of each parameter's bucket.
    members: list[frozenset[int]]
    number: dict[int, int]


class Reducer:
    """Reduces the gradients of declared modules; see Note [Buckets]."""

    def __init__(self, modules: list[DeclaredModule]) -> None:
        self.modules = sorted(modules, key=lambda declared: -len(declared.parameters))
        self.parameters = {id(p): p for declared in self.modules for p in declared.parameters}
        self.modules_of: dict[int, list[DeclaredModule]] = {
            number: [] for number in self.parameters
        }
        for declared in self.modules:
            for parameter in declared.parameters:
                self.modules_of[id(parameter)].append(declared)
        self.reductions: dict[int, Reduction] = {}
        # Where the batch differs along an axis for one module, the loss differs, so all gradients
        # do. A mean of equal gradients changes nothing.
        data_axes = _data_axes(self.modules)
        for number, parameter in self.parameters.items():
            found = reduction_of(parameter, data_axes)
            if found is not None:
                self.reductions[number] = found
        #: What all ranks are known to train; see Note [Frozen on one rank].
        self.trained = {n for n in self.reductions if self.parameters[n].requires_grad}
        #: Flags on a GPU, which are read in the next pass: this one does not wait for them.
        self.unread: list[Callable[[], tuple[bool, bool]]] = []
        self.tables = {id(p) for declared in self.modules for p in declared.tables}
        #: The group of each axis that gradients are reduced along.
        self.groups: dict[Axis, str | None] = {}
        self.handles: list[Any] = []
        self.known_buckets: dict[Any, _Trained] = {}
        #: Whether plain gradients are still to be compared along tensor axes.
        self.unchecked = any(declared.is_split for declared in self.modules) and any(
            is_used_alike(parameter) for parameter in self.parameters.values()
        )
        self._forget()

    # -- watching ----------------------------------------------------------------------------

    def watch(self, together: bool) -> None:
        for reduction in dict.fromkeys(self.reductions.values()):
            for axis in (*reduction.sums, *reduction.means):
                if axis not in self.groups:
                    self.groups[axis] = collectives.gradient_group(*axis, together=together)
        for declared in self.modules:
            declared.reducer = self
        for number, parameter in self.parameters.items():
            _owners[number] = self
            if number in self.reductions or (self.unchecked and is_used_alike(parameter)):
                with _trained(parameter) as can_be:
                    if can_be:
                        self._hook(parameter)

    def _hook(self, parameter: nn.Parameter) -> None:
        if not parameter.is_leaf:
            raise UnsupportedError(
                f"A data-parallel module holds a tensor of shape {tuple(parameter.shape)} with a "
                "history in place of a parameter, as in torch.func.functional_call: its gradient "
                "does not end there. Write the new values into the parameters, or pass leaves."
            )
        self.handles.append(parameter.register_post_accumulate_grad_hook(self._arrived))
        if plays_world() and _may_be_shared(parameter):
            hook = _room_per_rank(parameter)
            # Not the method of DTensors, which hides that the hook is our own.
            self.handles.append(torch.Tensor.register_hook(parameter, hook))

    def retire(self) -> None:
        """Remove the hooks: another reducer takes over."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for number in self.parameters:
            if _owners.get(number) is self:
                del _owners[number]

    # -- a backward pass ---------------------------------------------------------------------

    def _forget(self) -> None:
        self.buckets: list[Bucket] = []
        self.of_rows: list[nn.Parameter] = []
        #: The reductions of what was frozen or unfrozen on this rank; whether not all ranks did.
        self.changed: set[Reduction] = set()
        self.is_unlike = False
        self.number: dict[int, int] = {}
        self.missing: list[set[int]] = []
        self.sent: list[SentBucket] = []
        self.num_started = 0
        self.queued, self.backward = False, -1
        _begun[:] = [each for each in _begun if each() not in (None, self)]

    def drop_unfinished(self) -> None:
        """Drop the state of a backward that raised."""
        if self.queued and not in_backward():
            self._forget()

    @own_hook
    @untraced
    def _arrived(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if id(parameter) in self.reductions and is_watched_later(parameter):
            raise UnsupportedError(
                f"A hook for after accumulation, on a parameter of shape {tuple(parameter.shape)} "
                "of a data-parallel module, would see the gradient of this rank's batch, before it "
                "is reduced. Do that after backward(), or use fully_shard(), whose hooks see "
                "reduced gradients."
            )
        if grad is not None and grad.requires_grad and id(parameter) in self.reductions:
            raise without_history("a data-parallel module")
        if not self.queued:
            self._begin()
        place = self.number.get(id(parameter))
        if place is None:
            return
        missing = self.missing[place]
        missing.discard(id(parameter))
        if missing:
            return  # no bucket has become complete
        for each in _begun:
            reducer = each()
            if reducer is None or reducer.backward != self.backward:
                continue
            if not reducer._start_complete():
                break  # what began later waits

    def _start_complete(self) -> bool:
        """Start the buckets whose gradients are there; whether all buckets are started."""
        while self.num_started < len(self.buckets) and not self.missing[self.num_started]:
            self._start()
        return self.num_started == len(self.buckets)

    def _begin(self) -> None:
        if not _is_captured():
            unread, self.unread = self.unread, []
            if any(some for some, _ in [read() for read in unread]):
                raise unlike_ranks()
        self.queued, self.backward = True, current_backward()
        _begun.append(weakref.ref(self))
        for number in self._active():
            if self.parameters[number].requires_grad != (number in self.trained):
                reduction = self.reductions[number]
                if reduction.means:
                    self.changed.add(reduction)
                else:  # the ranks of a DTensor run one program
                    self.trained ^= {number}
        found = self._current_buckets()
        self.buckets, self.of_rows, self.number = found.buckets, found.of_rows, found.number
        self.missing = list(map(set, found.members))
        after_backward(self._finish)

    def _active(self) -> list[int]:
        """The parameters outside of `no_sync`."""
        resting = {id(declared) for declared in self.modules if not declared.enabled}
        numbers = list(reversed(self.reductions))
        if not resting:
            return numbers
        return [n for n in numbers if not any(id(d) in resting for d in self.modules_of[n])]

    def _current_buckets(self) -> _Trained:
        """Of what is trained, outside of `no_sync`."""
        now = tuple(n for n in self._active() if n in self.trained)
        known = self.known_buckets.get(now)
        if known is None:
            pairs = [(self.parameters[n], self.reductions[n]) for n in now if not self._is_rows(n)]
            num_bytes = min(declared.bucket_bytes for declared in self.modules)
            rows = [self.parameters[n] for n in now if self._is_rows(n)]
            buckets = make_buckets(pairs, num_bytes)
            members = [frozenset(map(id, bucket.parameters)) for bucket in buckets]
            number = {id(p): i for i, b in enumerate(buckets) for p in b.parameters}
            known = self.known_buckets[now] = _Trained(buckets, rows, members, number)
        return known

    def _is_rows(self, number: int) -> bool:
        return number in self.tables and bool(self.reductions[number].means)

    def _start(self) -> None:
        bucket = self.buckets[self.num_started]
        self.num_started += 1
        alike: dict[tuple[Collective, ...], list[nn.Parameter]] = {}
        for parameter in bucket.parameters if not bucket.reduction.means else ():
            alike.setdefault(collectives_for(parameter, bucket.reduction), []).append(parameter)
        if bucket.reduction.means:  # all alike
            path = collectives_for(bucket.parameters[0], bucket.reduction)
            alike[path] = list(bucket.parameters)
        for path, members in alike.items():
            if path:
                if watch.record is not None:
                    watch.record(f"gradients of {', '.join(self._names_of(members))}")
                with torch.no_grad(), because("data_parallel", implicit=False):
                    changed = bucket.reduction in self.changed
                    row = flattened(members, path[0][0], bucket.reduction.share, changed)
                    row = self._reduce(row, path[0])
                self.sent.append(SentBucket(members, path, row))

    def _names_of(self, parameters: list[nn.Parameter]) -> list[str]:
        module = self.modules[0].module
        names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
        return [names.get(id(p), "a parameter") for p in parameters]

    @untraced
    def _finish(self) -> None:
        while self.num_started < len(self.buckets):
            self._start()
        sent, of_rows, changed = self.sent, list(self.of_rows), self.changed
        self._forget()
        with torch.no_grad(), because("data_parallel", implicit=False):
            for stage in range(1, max((len(each.collectives) for each in sent), default=1)):
                for each in sent:
                    if stage < len(each.collectives):
                        row = collectives.awaited(each.row)
                        each.row = self._reduce(row, each.collectives[stage])
            rows = [collectives.awaited(each.row) for each in sent]
            late = self._newly_trained(sent, rows, of_rows, changed)
            for each, row in zip(sent, rows, strict=True):
                put_back(each, row)
            for bucket in late:
                self._reduce_now(list(bucket.parameters), bucket.reduction)
            self._reduce_rows(of_rows, changed)
        if self.is_unlike:
            raise unlike_ranks()
        if self.unchecked:
            self._check()

    def _newly_trained(
        self,
        sent: list[SentBucket],
        rows: list[torch.Tensor],
        of_rows: list[nn.Parameter],
        changed: set[Reduction],
    ) -> list[Bucket]:
        """If ranks freeze other parameters than before, compare them; what is newly trained."""
        first: dict[Reduction, torch.Tensor] = {}
        for each, row in zip(sent, rows, strict=True):
            first.setdefault(self.reductions[id(each.parameters[0])], row)
        silent = changed - set(first) - {self.reductions[id(p)] for p in of_rows}
        found: list[Bucket] = []
        for reduction in dict.fromkeys(self.reductions.values()):
            sent_row = first.get(reduction)
            if not reduction.means or (sent_row is None and reduction not in silent):
                continue
            if sent_row is None or self._is_changed(sent_row, reduction in changed):
                new = self._agree(reduction)
                pairs = [(p, reduction) for p in new if not self._is_rows(id(p))]
                of_rows += [p for p in new if self._is_rows(id(p))]
                found += make_buckets(pairs, BUCKET_BYTES)
                changed.discard(reduction)
        return found

    def _is_changed(self, row: torch.Tensor, here: bool) -> bool:
        """Whether any rank trains other parameters than before; `here`: this one does."""
        local = one_part(row)
        if local.is_meta or _is_captured():
            return False
        if not local.is_cpu and not here:
            self.unread.append(changed_on_later(row))
            return False
        some, others = changed_on(row)
        if some and others and not local.is_cpu:
            self.is_unlike = True  # the others do not know it yet: first end this pass
            return False
        return some

    def _agree(self, reduction: Reduction) -> list[nn.Parameter]:
        """Check that all ranks train the same parameters; those that they did not train before."""
        mine = [n for n in self._active() if self.reductions[n] == reduction]
        now = {n for n in mine if self.parameters[n].requires_grad}
        frozen = [self.parameters[n] for n in reversed(mine) if n not in now]
        agree_on_trained(self._names_of(frozen), reduction.means)
        new = [self.parameters[n] for n in mine if n in now - self.trained]
        self.trained = self.trained - set(mine) | now
        return new

    def _reduce_now(self, members: list[nn.Parameter], reduction: Reduction) -> None:
        path = tuple((grid, axis, "sum") for grid, axis in reduction.means)
        row = flattened(members, path[0][0], reduction.share, changed=False)
        for each in path:
            row = collectives.awaited(self._reduce(row, each))
        put_back(SentBucket(members, path, row), row)

    def _reduce_rows(self, parameters: list[nn.Parameter], changed: set[Reduction]) -> None:
        alike: dict[Reduction, list[nn.Parameter]] = {}
        for parameter in parameters:
            alike.setdefault(self.reductions[id(parameter)], []).append(parameter)
        for reduction, members in alike.items():
            *kinds, some, _ = kinds_on_all_ranks(members, reduction.means, reduction in changed)
            if some:
                members += self._agree(reduction)
                *kinds, _, _ = kinds_on_all_ranks(members, reduction.means, changed=False)
            dense = [p for p, kind in zip(members, kinds, strict=True) if kind > ROWS]
            if dense:
                self._reduce_now(dense, reduction)
            for parameter, kind in zip(members, kinds, strict=True):
                if kind == ROWS:
                    average_rows(parameter, reduction)

    def _reduce(self, row: torch.Tensor, collective: Collective) -> torch.Tensor:
        """Start a collective."""
        grid, axis, op = collective
        return collectives.start_all_reduce(row, op, grid, axis, self.groups[grid, axis])

    def _check(self) -> None:
        """Once: check that plain gradients are equal along tensor axes; see `contract`."""
        self.unchecked = False
        for declared in self.modules:
            check_plain_gradients(declared.module)
        if not self.reductions:
            self.retire()


def _is_captured() -> bool:
    """Whether a CUDA graph is being captured, in which the host reads nothing."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def without_history(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"backward(create_graph=True) of {what}: gradients that are reduced have no history, so "
        "that they cannot be differentiated again. Use torch.autograd.grad(loss, tensors, "
        "create_graph=True) for what a penalty needs, and call backward() on the sum of loss and "
        "penalty."
    )


def _may_be_shared(parameter: torch.Tensor) -> bool:
    """Whether one tensor may hold the reduced gradient of ranks whose own gradients differ."""
    if isinstance(parameter, DTensor):
        return len(parameter._layout.grid.submeshes) > 1
    return type(parameter.data) is torch.Tensor


@contextlib.contextmanager
def _trained(parameter: nn.Parameter) -> Iterator[bool]:
    """Inside, a frozen parameter requires grad, so that hooks can be registered; it keeps them."""
    frozen = not parameter.requires_grad
    can_be = parameter.is_floating_point() or parameter.is_complex()
    if frozen and can_be:
        parameter.requires_grad_(True)
    try:
        yield can_be
    finally:
        if frozen and can_be:
            parameter.requires_grad_(False)


def _room_per_rank(parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """A hook for simulated ranks: their gradients cannot be added to one tensor."""

    @own_hook
    @untraced
    def spread(grad: Any) -> None:
        held: Any = parameter.grad
        if is_per_rank(grad) and type(held) is torch.Tensor:
            parameter.grad = copy_per_rank(held, grad)
        elif type(grad) is type(held) is DTensor and (
            roster_of(grad._local) is not roster_of(held._local)
        ):
            local = copy_per_rank(held._local, grad._local)
            parameter.grad = DTensor._wrap(local, held._layout)

    return spread
