"""ParallelStyle: one way to make a module parallel; ModuleBoundary: what enters and leaves it."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.collectives import Pending, alias_for_outside
from shardwise.core.mesh import Grid, grid_of
from shardwise.core.placements import REPLICATE, Placement, Shard, short
from shardwise.core.sizes import lengths
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor import autograd
from shardwise.dtensor.autograd import refuse_hooks
from shardwise.dtensor.compile import is_traced
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.training.contract import note_tensor_axis

#: The attribute of a module with what styles decided: `{what: name of the style}`.
_DONE = "_parallel_styles"
#: The attribute with the hooks of an automatic style: ids of pre-forward and forward hooks.
_AUTOMATIC = "_automatic_hooks"


class ParallelStyle(abc.ABC):
    """The value that a plan gives to a module's path. Subclass it for a style of your own.

    `_apply(module, device_mesh)` changes the module in place and returns it: it registers DTensor
    parameters and forward hooks. `parallelize_module` sets two attributes before it calls it:
    `src_data_rank`, to be passed to `distribute_tensor`, and `path`, that of the module.

    >>> import shardwise, torch
    >>> from shardwise.parallel import ParallelStyle, parallelize_module
    >>> class Whole(ParallelStyle):
    ...     '''Every parameter on every rank.'''
    ...     def _apply(self, module, device_mesh):
    ...         return shardwise.distribute_module(module, device_mesh)
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     layer = parallelize_module(torch.nn.Linear(3, 3), mesh, Whole())
    >>> layer.weight.placements
    (Replicate(),)
    """

    src_data_rank: int | None = 0
    path: str = ""
    #: The aspects of a module that the style decides: some of "parameters", "input" and "output".
    #: No two styles may decide the same aspect of a module.
    decides: tuple[str, ...] = ()

    @abc.abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make the module parallel, in place, and return it."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Check, apply, and record what was decided, so that applying twice is an error."""
        self.check(module)
        if "parameters" in self.decides:
            _withdraw_automatic(module)
        applied = self._apply(module, device_mesh)
        noted = applied.__dict__.setdefault(_DONE, {})
        noted.update(dict.fromkeys(self.decides, type(self).__name__))
        if "parameters" in self.decides:
            axis = tensor_axis(device_mesh)
            note_tensor_axis(applied, grid_of(device_mesh), axis, type(self).__name__)
        # Hooks of a style that a plan names run before those of an automatic one.
        _last(module._forward_pre_hooks, module.__dict__.get(_AUTOMATIC, ((), ()))[0])
        return applied

    def apply_automatically(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Apply it so that a style that a plan names later replaces it."""
        before, after = tuple(module._forward_pre_hooks), tuple(module._forward_hooks)
        self._apply(module, device_mesh)
        note_tensor_axis(
            module, grid_of(device_mesh), tensor_axis(device_mesh), type(self).__name__
        )
        module.__dict__[_AUTOMATIC] = (
            tuple(hook for hook in module._forward_pre_hooks if hook not in before),
            tuple(hook for hook in module._forward_hooks if hook not in after),
        )
        _last(module._forward_hooks, after)

    def check(self, module: nn.Module) -> None:
        """Raise if the style does not fit; changes nothing. Called for the whole plan first."""
        for what in self.decides:
            if what in module.__dict__.get(_DONE, {}):
                raise LayoutError(
                    f"{self.where} is parallel already: {module.__dict__[_DONE][what]} decided its "
                    f"{what}, and {type(self).__name__} would again. Apply one of them, once."
                )

    def check_distributed(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Raise if a parameter is already distributed differently from this style."""
        boundary = self.boundary(device_mesh)
        for name, placement in self.parameter_placements(module).items():
            owner, key = owner_of(module, name)
            if key not in owner._parameters:
                raise LayoutError(
                    f"{self.where}: {type(self).__name__} places parameter {name!r}, which the "
                    "module computes, as a parametrization or weight norm does. Parallelize it "
                    "first, or leave the module out of the plan."
                )
            parameter = owner._parameters[key]
            if parameter is not None:
                refuse_hooks(parameter, f"{self.where}: parameter {name!r}")
            if isinstance(parameter, DTensor):
                self._tied(name, parameter, boundary.parameter_placements(placement))

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """The placement over the tensor axis of each parameter, by name."""
        return {}

    def __repr__(self) -> str:
        hidden = ("path", "src_data_rank")
        given = {k: v for k, v in vars(self).items() if not k.startswith("_") and k not in hidden}
        said = ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None)
        return f"{type(self).__name__}({said})"

    @property
    def where(self) -> str:
        return f"Module {self.path!r}" if self.path else "The root module"

    def boundary(self, device_mesh: DeviceMesh) -> ModuleBoundary:
        return ModuleBoundary(device_mesh, tensor_axis(device_mesh), self.path)

    def place_parameters(self, module: nn.Module, boundary: ModuleBoundary) -> None:
        """Replace the parameters that the style places with DTensors."""
        for name, placement in self.parameter_placements(module).items():
            owner, key = owner_of(module, name)
            parameter = owner._parameters[key]
            if parameter is not None:
                owner._parameters[key] = self._placed(name, parameter, placement, boundary)

    def _placed(
        self, name: str, parameter: nn.Parameter, placement: Placement, boundary: ModuleBoundary
    ) -> nn.Parameter:
        wanted = boundary.parameter_placements(placement)
        if isinstance(parameter, DTensor):
            return self._tied(name, parameter, wanted)
        try:
            placed = distribute_tensor(
                parameter.detach(), boundary.mesh, wanted, src_data_rank=self.src_data_rank
            )
        except ShardwiseError as error:
            raise LayoutError(f"{self.where}: parameter {name!r}. {error}") from error
        made = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made

    def _tied(self, name: str, parameter: Any, wanted: list[Placement]) -> Any:
        """A parameter that is already distributed, such as a tied one at its second use."""
        if parameter.placements != tuple(wanted):
            raise LayoutError(
                f"{self.where}: {type(self).__name__} places parameter {name!r} as "
                f"{short(wanted)}, but it is distributed already, as "
                f"{short(parameter.placements)}: shared with a module of the plan, or "
                "parallelized before. A shared parameter needs styles that place it alike "
                "(a rowwise embedding and a colwise head)."
            )
        return parameter


def is_parallel(module: nn.Module) -> bool:
    """Whether a style, of a plan or automatic, has placed the module's parameters."""
    return _AUTOMATIC in module.__dict__ or "parameters" in module.__dict__.get(_DONE, {})


def _last(hooks: Any, ids: Iterable[int]) -> None:
    for hook in ids:
        hooks.move_to_end(hook)


def _withdraw_automatic(module: nn.Module) -> None:
    before, after = module.__dict__.pop(_AUTOMATIC, ((), ()))
    for hook in before:
        del module._forward_pre_hooks[hook]
        module._forward_pre_hooks_with_kwargs.pop(hook, None)
    for hook in after:
        del module._forward_hooks[hook]


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter itself, and the parameter's name there."""
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key


#: A function of a module or a method, or a partial of one, so that the module can be pickled.
Hook = Callable[..., Any]


def prepend_input_hook(module: nn.Module, hook: Hook) -> None:
    """Run `hook(args, kwargs) -> (args, kwargs)` before the module's forward."""
    module.register_forward_pre_hook(functools.partial(_prepare, hook), with_kwargs=True)


def _prepare(hook: Hook, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return hook(args, kwargs)


def append_output_hook(module: nn.Module, hook: Hook) -> None:
    """Run `hook(output) -> output` after the module's forward."""
    module.register_forward_hook(functools.partial(_finish, hook))


def _finish(hook: Hook, _: nn.Module, args: Any, output: Any) -> Any:
    return hook(output)


# Note [Axes of a parallel module]
# A style shards along one mesh axis, the tensor axis: the one named "tp", else the last. The others
# are data axes: parameters are replicated over them, and a plain tensor that enters is the rank's
# own shard of the batch, `Shard(0)` over each of them. A DTensor that enters keeps its placements
# there.
#
# Note [Each rank's own loss]
# Plain tensors that differ over the data axes belong to a rank and to its loss; a DTensor's
# gradient is global, that of the mean of the ranks' losses, as with torch's DDP. So the gradient of
# a plain output is divided by n, the number of ranks along the data axes, and that of a plain input
# is multiplied by n. A loss that is itself a DTensor is the global one, and nothing is scaled.
#
# In a second derivative, the gradient of a plain input is n times the global one, and belongs to
# its rank: what flows back to it is divided by n on its way in, and the factor n cancels that. So
# `Scale` multiplies a gradient, and passes a gradient of that gradient unchanged.
#
# Note [Branches overlap]
# The first read of a result waits for its collective, so it overlaps with a branch that does not
# need the result, forward and backward. Until then a plain output is `comm.collectives.Pending`,
# and so is the gradient of a plain input. The gradient of a leaf is awaited at once: users read it.
# In a simulated world collectives are synchronous, and in compiled code the compiler decides.


TENSOR_AXIS = "tp"


def tensor_axis(mesh: DeviceMesh) -> int:
    """The axis that styles shard along; see Note [Axes of a parallel module]."""
    names = mesh.mesh_dim_names
    return names.index(TENSOR_AXIS) if names and TENSOR_AXIS in names else mesh.ndim - 1


def named_axis(mesh: DeviceMesh, axis: str, caller: str) -> int:
    """The number of the axis with this name."""
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise ArgumentError(
            f"{caller}: the mesh has no axis {axis!r}, only {', '.join(names) or 'unnamed'}; name "
            f"one: init_device_mesh(device, (2, 4), mesh_dim_names=('dp', {axis!r}))."
        )
    return names.index(axis)


@dataclass(frozen=True, slots=True)
class ModuleBoundary:
    """A mesh, its tensor axis, and the path of a parallel module.

    Pickling keeps the mesh by value; loading finds an equal one in the current world.
    """

    mesh: DeviceMesh
    axis: int
    path: str = ""

    def __deepcopy__(self, memo: Any) -> ModuleBoundary:
        return self  # a mesh stands for processes, which are not copied

    def __reduce__(self) -> Any:
        return _boundary_on, (grid_of(self.mesh), self.axis, self.path)

    @property
    def where(self) -> str:
        return f"Module {self.path!r}" if self.path else "The root module"

    @property
    def num_losses(self) -> int:
        """The number of ranks along the data axes, each with its own loss."""
        return self.mesh.size() // self.mesh.size(self.axis)

    def parameter_placements(self, placement: Placement) -> list[Placement]:
        """`placement` over the tensor axis, replicated over the others."""
        placements: list[Placement] = [REPLICATE] * self.mesh.ndim
        placements[self.axis] = placement
        return placements

    def batch_placements(self, placement: Placement) -> list[Placement]:
        """`placement` over the tensor axis, the batch sharded over the others."""
        placements: list[Placement] = [Shard(0)] * self.mesh.ndim
        placements[self.axis] = placement
        return placements

    def sized(self, placement: Placement, size: int) -> Placement:
        """A shard of a dim whose global size is known: shards may then be uneven."""
        if not isinstance(placement, Shard) or placement.sizes is not None:
            return placement
        return Shard(placement.dim, lengths(size, self.mesh.size(self.axis), None))

    def enter(
        self, x: Any, given: Placement, wanted: Placement, name: str = "the input"
    ) -> DTensor:
        """`x` as a DTensor with the placement `wanted`. A plain `x` has the placement `given`."""
        if not isinstance(x, DTensor):
            if not isinstance(x, torch.Tensor):
                raise ArgumentError(
                    f"{self.where}: {name} has a layout, {given}, but is not a tensor: found "
                    f"{type(x).__name__}. Give it the layout None to leave it unchanged."
                )
            self._refuse_transformed(x, name)
            x = self._from_local(x, given, name)
            if wanted == given:
                return x
        return self.move(x, wanted, name)

    def enter_first(
        self, given: Placement, wanted: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The arguments of a module, with its first input moved to `wanted`."""
        if args:
            return (self.enter(args[0], given, wanted), *args[1:]), kwargs
        if kwargs:
            name = next(iter(kwargs))
            return args, {**kwargs, name: self.enter(kwargs[name], given, wanted, name)}
        raise LayoutError(f"{self.where} was called without an input; its style expects one.")

    def _from_local(self, x: torch.Tensor, given: Placement, name: str) -> DTensor:
        try:
            made = DTensor.from_local(
                x, self.mesh, self.batch_placements(given), async_op=not x.is_leaf
            )
        except ShardwiseError as error:
            raise LayoutError(
                f"{self.where}: {name} is a plain tensor and each rank's part of {given}, but does "
                f"not fit it. {error}"
            ) from error
        # Scaled before the gradient's collective: after it, scaling would wait for it.
        return self._scaled(made, self.num_losses)

    def move(self, x: DTensor, wanted: Placement, name: str = "the output") -> DTensor:
        """`x` with another placement over the tensor axis, differentiable."""
        placements = list(x.placements)
        if placements[self.axis] == wanted:
            return x
        placements[self.axis] = wanted
        try:
            return x.redistribute(placements=placements, async_op=True)
        except ShardwiseError as error:
            raise LayoutError(
                f"{self.where}: {name} cannot be brought to {wanted}. {error}"
            ) from error

    def leave(self, x: Any, wanted: Placement, local: bool, name: str = "the output") -> Any:
        """`x` moved to `wanted`, as a plain tensor when `local`."""
        if not isinstance(x, DTensor):
            if isinstance(x, torch.Tensor):
                self._refuse_transformed(x, name)
            raise ArgumentError(
                f"{self.where}: {name} should be a DTensor, found {type(x).__name__}: "
                "a plain tensor met only plain tensors inside the module."
            )
        if not local:
            return self.move(x, wanted, name)
        return _later(self.move(self._scaled(x, 1 / self.num_losses), wanted, name))

    def to_local(self, x: DTensor, grads: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's shard, for its own loss; see Note [Each rank's own loss].

        `grads` are the placements of its gradient, where those are not the shard's.
        """
        scaled = self._scaled(x, 1 / self.num_losses)
        return _later(scaled) if grads is None else scaled.to_local(grad_placements=grads)

    def _refuse_transformed(self, x: torch.Tensor, name: str) -> None:
        if not is_traced():
            autograd.refuse_transformed(x, f"{self.where}, {name}")

    def _scaled(self, x: DTensor, factor: float) -> DTensor:
        """`x`, with its gradient scaled; see Note [Each rank's own loss]."""
        return Scale.apply(x, 1.0, float(factor)) if factor != 1 and x.requires_grad else x


def _boundary_on(grid: Grid, axis: int, path: str) -> ModuleBoundary:
    return ModuleBoundary(grid.mesh, axis, path)


def _later(x: DTensor) -> torch.Tensor:
    """`x.to_local()`, which may be pending; see Note [Branches overlap]."""
    # In compiled code the compiler decides when to wait.
    if is_traced() or type(x._local) is not Pending:
        return x.to_local()
    if torch.is_grad_enabled() and x.requires_grad:
        return autograd.to_local(x, autograd.gradient_layout(x._layout), True)
    return alias_for_outside(x._local)


class Scale(UntracedFunction):
    """The tensor times one number, its gradient times another.

    Not the derivative of a product: one number is for tensors, the other for gradients, and they
    swap in each derivative. See Note [Each rank's own loss].
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, of_gradient: float) -> torch.Tensor:
        ctx.factors = of_gradient, factor
        return x.view_as(x) if factor == 1 else x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Scale.apply(grad, *ctx.factors), None, None


def one_per_tensor(layouts: Any, argument: str) -> tuple[Placement | None, ...]:
    """Layouts as users pass them, one placement or a sequence, as a tuple."""
    given = (layouts,) if layouts is None or isinstance(layouts, Placement) else layouts
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentError(f"{argument} takes placements, found {layouts!r}.")
    for layout in given:
        if layout is not None and not isinstance(layout, Placement):
            raise ArgumentError(f"{argument} takes placements or None, found {layout!r}.")
    return tuple(given)
