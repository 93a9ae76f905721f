"""ParallelStyle: one way to make a module parallel; what all styles share."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.mesh import grid_of
from shardwise.core.placements import Placement, short
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.gradients import refuse_hooks
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError, ShardwiseError
from shardwise.parallel.boundary import ModuleBoundary, tensor_axis
from shardwise.training.contract import note_tensor_axis

#: The attribute of a module with what styles decided: `{what: name of the style}`.
_DONE = "_parallel_styles"
#: The attribute with the hooks of an automatic style: ids of pre-forward and forward hooks.
_AUTOMATIC = "_automatic_hooks"


class ParallelStyle(abc.ABC):
    """What a plan maps a module's path to. Subclass it for a style of your own.

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
    #: What the style decides of a module, out of "parameters", "input" and "output". No two styles
    #: may decide the same of one module.
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
        """Raise where the style does not fit; nothing is changed. Called for a whole plan first."""
        for what in self.decides:
            if what in module.__dict__.get(_DONE, {}):
                raise LayoutError(
                    f"{self.where} is parallel already: {module.__dict__[_DONE][what]} decided its "
                    f"{what}, and {type(self).__name__} would again. Apply one of them, once."
                )

    def check_distributed(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Raise where a parameter is distributed already, differently from this style."""
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
        """A parameter that is distributed already, as a tied one is the second time."""
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


#: A partial of a module-level function, so that the module can be pickled.
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


def first_input(boundary: ModuleBoundary, given: Placement, wanted: Placement) -> Hook:
    """A hook that redistributes a module's one input, positional or keyword, to `wanted`."""
    return functools.partial(_enter_first, boundary, given, wanted)


def _enter_first(
    boundary: ModuleBoundary,
    given: Placement,
    wanted: Placement,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if args:
        return (boundary.enter(args[0], given, wanted), *args[1:]), kwargs
    if kwargs:
        name = next(iter(kwargs))
        return args, {**kwargs, name: boundary.enter(kwargs[name], given, wanted, name)}
    raise LayoutError(f"{boundary.where} was called without an input; its style expects one.")


def only_output(boundary: ModuleBoundary, wanted: Placement, local: bool) -> Hook:
    """A hook that redistributes a module's one output to `wanted`."""
    return functools.partial(_leave_only, boundary, wanted, local)


def _leave_only(boundary: ModuleBoundary, wanted: Placement, local: bool, output: Any) -> Any:
    return boundary.leave(output, wanted, local)
