"""From a plan to the modules that it changes: styles written as words or tables, and all checks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.core.encode import decode_placement, encode_placement
from shardwise.core.placements import Placement, Replicate, Shard
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.parallel.experts import ExpertParallel
from shardwise.parallel.style import ParallelStyle
from shardwise.parallel.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    SharedHeads,
    SharedKeyParallel,
)
from shardwise.plans import Entry, did_you_mean, matching_modules, no_match


@dataclass(frozen=True, slots=True)
class Target:
    """One module that one entry of a plan changes. The style is the target's own copy."""

    pattern: str
    path: str
    module: nn.Module
    style: ParallelStyle


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan applied to a module: its targets, and a message for each entry without any."""

    targets: tuple[Target, ...]
    unmatched: tuple[str, ...]


def styles_of(plan: Any) -> dict[str, ParallelStyle]:
    """A plan in any of its forms, as styles by pattern."""
    if plan is None:
        return {}
    if isinstance(plan, (ParallelStyle, str)):
        return {"": style_of(plan, "")}
    if not isinstance(plan, Mapping):
        raise ArgumentError(
            "parallelize_plan is a style, a word for one, or a dict from paths to them; found "
            f"{type(plan).__name__}."
        )
    styles, wrong = readable(plan)
    for error in wrong:
        raise error
    return styles


def readable(plan: Mapping[str, Any]) -> tuple[dict[str, ParallelStyle], list[ShardwiseError]]:
    """The valid entries of a plan as styles, and the errors of the others."""
    kept: dict[str, ParallelStyle] = {}
    wrong: list[ShardwiseError] = []
    for pattern, entry in with_experts_joined(plan).items():
        try:
            if not isinstance(pattern, str):
                raise ArgumentError(f"A path in a plan is a string, found {pattern!r}.")
            kept[pattern] = style_of(entry, pattern)
        except ShardwiseError as error:
            wrong.append(error)
    return kept, wrong


def resolve(
    module: nn.Module, plan: Any, src_data_rank: int | None = 0, *, check: bool = True
) -> Resolved:
    """The targets of a plan. With `check`, a style that does not fit its module raises."""
    styles = styles_of(plan)
    targets: list[Target] = []
    unmatched: list[str] = []
    for pattern, style in styles.items():
        found = matching_modules(module, pattern)
        if not found:
            unmatched.append(pattern)
        for path, match in found:
            own = copy.copy(style)
            own.path, own.src_data_rank = path, src_data_rank
            targets.append(Target(pattern, path, match, own))
    targets = _without_repeats(targets)
    if check:
        for problem in problems(targets):
            raise problem
    messages = tuple(_no_match(module, p, len(unmatched), styles, targets) for p in unmatched)
    return Resolved(tuple(targets), messages)


def _without_repeats(targets: list[Target]) -> list[Target]:
    """The targets without repeats: one entry changes a module with several paths only once."""
    seen: dict[tuple[int, str], Target] = {}
    for target in targets:
        seen.setdefault((id(target.module), target.pattern), target)
    return list(seen.values())


def _no_match(
    module: nn.Module,
    pattern: str,
    num_unmatched: int,
    styles: Mapping[str, ParallelStyle],
    targets: list[Target],
) -> str:
    modules = f"{len(targets)} module{'' if len(targets) == 1 else 's'}"
    return (
        f"parallelize_plan: {no_match(module, pattern)} "
        f"{len(styles) - num_unmatched} of {len(styles)} entries apply, to {modules}."
    )


#: What modules call the width of a head.
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
#: What latent attention calls the part of a key that all its heads share. There a head has another
#: width in each layer.
_SHARED_WIDTH = "qk_rope_head_dim"


def fit_heads(root: nn.Module, targets: Iterable[Target], num_ranks: int) -> list[Target]:
    """The targets, with `SharedHeads` where layers have fewer heads than ranks, and with widths.

    The layers of an attention module that pass heads on as plain tensors must be split between
    heads. Raises if they cannot be.
    """
    found = list(targets)
    heads: dict[str, dict[int, int]] = {}
    for number, target in enumerate(found):
        parent, _, name = target.path.rpartition(".")
        _find_width(root.get_submodule(parent), target)
        count = _num_heads(root.get_submodule(parent), target) if name else None
        if count is not None:
            heads.setdefault(parent, {})[number] = count
    for parent, counts in heads.items():
        most = max(counts.values())
        for number, count in counts.items():
            if count % num_ranks == 0:
                continue
            target = found[number]
            possible = [n for n in range(1, most + 1) if _heads_fit(set(counts.values()), n)]
            if num_ranks not in possible:
                raise LayoutError(
                    f"Module {parent!r}: {num_ranks} ranks cannot split {target.path!r} between "
                    f"its {count} heads; its layers have {', '.join(map(str, counts.values()))} "
                    f"heads. A tensor axis of {', '.join(map(str, possible))} works, or the style "
                    '"colwise_rep" for these layers, which gathers their heads.'
                )
            style: Any = target.style
            found[number] = replace(target, style=SharedHeads(style, count, most // num_ranks))
    return found


def _heads_fit(counts: set[int], num_ranks: int) -> bool:
    """Whether each rank gets as many query heads, with the key heads that they use."""
    return max(counts) % num_ranks == 0 and not any(n % num_ranks and num_ranks % n for n in counts)


def _num_heads(parent: nn.Module, target: Target) -> int | None:
    """The heads of a colwise layer that passes plain shards on; None for any other target."""
    style, module = target.style, target.module
    if type(style) is not ColwiseParallel or not isinstance(module, nn.Linear):
        return None
    if not style.use_local_output or style.output_layouts not in (None, Shard(-1)):
        return None
    num_heads = getattr(parent, "num_heads", None)
    if hasattr(parent, _SHARED_WIDTH) and type(num_heads) is int:
        return num_heads if module.out_features % num_heads == 0 else None
    widths = [getattr(parent, name, None) for name in _HEAD_WIDTHS]
    width = next((w for w in widths if type(w) is int and w > 0), None)
    if width is None or module.out_features % width:
        return None
    return module.out_features // width


def _find_width(parent: nn.Module, target: Target) -> None:
    style = target.style
    if isinstance(style, SharedKeyParallel) and style.width is None:
        style.width = getattr(parent, _SHARED_WIDTH, None)
        if style.width is None:
            raise ArgumentError(
                f"{style.where}: how many of its last columns all heads share is not known, since "
                f"the module around it has no {_SHARED_WIDTH!r}. Give it in the plan: "
                '{"style": "SharedKeyParallel", "width": 64}.'
            )


def problems(targets: list[Target]) -> list[ShardwiseError]:
    """All that is wrong with a plan, before anything is changed."""
    found: list[ShardwiseError] = []
    for target in targets:
        try:
            target.style.check(target.module)
        except ShardwiseError as error:
            found.append(error)
    return found + _decided_twice(targets) + note_placed({}, targets)


def fits(target: Target) -> bool:
    try:
        target.style.check(target.module)
    except ShardwiseError:
        return False
    return True


def _decided_twice(targets: list[Target]) -> list[ShardwiseError]:
    decided: dict[tuple[int, str], Target] = {}
    found: list[ShardwiseError] = []
    for target in targets:
        for what in target.style.decides:
            first = decided.setdefault((id(target.module), what), target)
            if first is not target:
                found.append(
                    LayoutError(
                        f"{target.style.where} matches {first.pattern!r} and {target.pattern!r}, "
                        f"and both {type(first.style).__name__} and "
                        f"{type(target.style).__name__} decide its {what}. Let one entry match it."
                    )
                )
                break
    return found


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter's placement by a plan, and the name under which the plan places it."""

    name: str
    placement: Placement


def note_placed(placed: dict[int, Placed], targets: Iterable[Target]) -> list[ShardwiseError]:
    """Add the placements of targets, by the id of each parameter; returns the contradictions."""
    found: list[ShardwiseError] = []
    for target in filter(fits, targets):
        parameters = dict(target.module.named_parameters(remove_duplicate=False))
        for name, placement in target.style.parameter_placements(target.module).items():
            if name not in parameters:
                continue
            full = f"{target.path}.{name}" if target.path else name
            first = placed.setdefault(id(parameters[name]), Placed(full, placement))
            if first.placement != placement:
                found.append(
                    LayoutError(
                        f"{first.name!r} and {full!r} are one parameter, and the plan places it as "
                        f"{first.placement} and as {placement}. Name both modules in the plan, "
                        "with styles that place it alike, such as a rowwise embedding and a "
                        "colwise head."
                    )
                )
    return found


# Most words of a `tp_plan` are styles here too. A mixture of experts takes several entries there:
# one for the module that holds the experts, one for each of its parameters, and perhaps one for the
# router. `ExpertParallel` does what they say together: each rank has some of the experts, and the
# ranks' results are added. Where a plan splits every expert instead, as in a config's
# `base_model_tp_plan`, the results are the same, and so is what is sent.


#: Words for a module whose experts are split, for its parameters, and for the router before it.
#: "gather" and "local..." are those of transformers 5.0.
_EXPERTS = ("ep_dispatch_experts", "moe_tp_experts", "gather")
_STACKED = ("grouped_gemm", "packed_colwise", "packed_rowwise", "local_colwise", "local_rowwise")
_OF_PARAMETERS = (*_STACKED, "colwise", "rowwise")
_ROUTER = "ep_router"

_INSTEAD = (
    'Say "experts" for the module that holds them, or use the config\'s base_model_ep_plan: each '
    "rank then has some of the experts."
)

_PAIR = (
    'Say "colwise" for the layers that come first and "rowwise" for the one that ends the parallel '
    "part, and nothing for the module around them."
)

#: Words without a style here, and what to write instead.
WITHOUT_COUNTERPART = {
    "packed_colwise": f"It splits the halves of a packed parameter one by one. {_INSTEAD}",
    "packed_rowwise": f"It splits the halves of a packed parameter one by one. {_INSTEAD}",
    "moe_tp_experts": f"It adds the results of experts that are each split themselves. {_INSTEAD}",
    "ep_dispatch_experts": f"Its parameters should be {_STACKED[0]!r}. {_INSTEAD}",
    "grouped_gemm": f"It splits a single parameter by experts. {_INSTEAD}",
    "moe_identity_expert": f"It goes with experts that are each split themselves. {_INSTEAD}",
    "gather": f"It adds what the modules inside of it computed. {_PAIR}",
    "local": f"It goes with experts that are each split themselves. {_INSTEAD}",
    "local_colwise": f"Its output is added later, by a module around it. {_PAIR}",
    "local_rowwise": f"Its output is added later, by a module around it. {_PAIR}",
    "local_packed_rowwise": f"It splits the halves of a packed parameter one by one. {_INSTEAD}",
    "local_params": "It lets a module use the shards of its own parameters. Leave it out, and the "
    "parameter too, where every rank may use all of it.",
    "all_reduce": "It adds up what ranks computed by themselves. Write a ParallelStyle of your "
    'own, or use "rowwise" for the layer that ends the parallel part.',
}


def with_experts_joined(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with one entry, "experts", for each group that splits stacks of experts.

    >>> plan = {
    ...     "mlp.router": "ep_router",
    ...     "mlp.experts": "moe_tp_experts",
    ...     "mlp.experts.up": "grouped_gemm",
    ...     "mlp.experts.down": "grouped_gemm",
    ... }
    >>> with_experts_joined(plan)
    {'mlp.experts': 'experts'}
    >>> with_experts_joined(plan | {"mlp.experts.up": "packed_colwise", "mlp.norm": "replicate"})
    {'mlp.experts': 'experts', 'mlp.norm': 'replicate'}
    """
    joined: dict[str, Any] = dict(plan)
    for path, word in plan.items():
        if word not in _EXPERTS:
            continue
        inside = [p for p in plan if isinstance(p, str) and p.startswith(f"{path}.")]
        words = {plan[p] if isinstance(plan[p], str) else "" for p in inside}
        if words.intersection(_STACKED) and words.issubset(_OF_PARAMETERS):
            joined[path] = "experts"
            for parameter in inside:
                del joined[parameter]
    # Every rank routes all tokens, and selects those of its experts itself.
    return {path: word for path, word in joined.items() if word != _ROUTER}


#: The style of each word: those of `tp_plan` that mean the same here, and "experts", our own.
#: `WITHOUT_COUNTERPART` has the others.
WORDS: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    # A norm of each head, between a colwise and a rowwise layer: (..., heads, head width).
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=-2, use_local_output=True
    ),
    "replicate": ReplicateParallel,
    "mla_kv_a_proj": SharedKeyParallel,
    "experts": ExpertParallel,
}

STYLES: dict[str, type[ParallelStyle]] = {
    style.__name__: style
    for style in (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        ReplicateParallel,
        SharedKeyParallel,
        ExpertParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        PrepareModuleInputOutput,
    )
}

_NOTHING = "None"


def style_of(entry: Any, pattern: str) -> ParallelStyle:
    """A plan's entry as a style."""
    if isinstance(entry, ParallelStyle):
        return entry
    if isinstance(entry, str):
        return _named(entry, pattern)()
    if isinstance(entry, Mapping):
        return _with_options(dict(entry), pattern)
    if isinstance(entry, type) and issubclass(entry, ParallelStyle):
        raise ArgumentError(
            f"The plan gives {pattern!r} the class {entry.__name__}; give an instance, "
            f"{entry.__name__}()."
        )
    raise ArgumentError(
        f"The plan gives {pattern!r} a {type(entry).__name__}; it takes a ParallelStyle, a table "
        f"with a style, or one of the names {', '.join(WORDS)}."
    )


def _named(name: Any, pattern: str) -> Callable[..., ParallelStyle]:
    make = (WORDS.get(name) or STYLES.get(name)) if isinstance(name, str) else None
    if make is None and isinstance(name, str) and name in WITHOUT_COUNTERPART:
        raise ArgumentError(
            f"The plan says {name!r} for {pattern!r}, a word of Hugging Face's that has no "
            f"counterpart here. {WITHOUT_COUNTERPART[name]}"
        )
    if make is None:
        hint = did_you_mean(str(name), [*WORDS, *STYLES])
        raise ArgumentError(
            f"The plan says {name!r} for {pattern!r}, which is not the name of a style{hint} The "
            f"names are {', '.join(WORDS)}; the classes {', '.join(STYLES)}."
        )
    return make


def _with_options(entry: dict[str, Any], pattern: str) -> ParallelStyle:
    name = entry.pop("style", None)
    made: Any = _named(name, pattern)
    if name in WORDS:
        made = type(made())
    known = inspect.signature(made).parameters
    for option in entry:
        if option not in known:
            raise ArgumentError(
                f"The plan gives {pattern!r} the option {option!r}; {made.__name__} takes "
                f"{', '.join(known)}."
            )
    try:
        base = {} if name in STYLES else _options(_named(name, pattern)())
        options = {option: _decode(option, value) for option, value in entry.items()}
        return made(**(base | options))
    except ShardwiseError as error:
        error.add_note(f"In the plan's entry for {pattern!r}.")
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"The plan's entry for {pattern!r} does not fit {made.__name__}: {str(error)[:200]}."
        ) from error


def entry_of(style: ParallelStyle | Entry, pattern: str) -> Entry:
    """A style as the entry of a plan file: a word where there is one."""
    style = style_of(style, pattern)
    entry = _entry(style, pattern)
    return next((word for word, make in WORDS.items() if _entry(make(), "") == entry), entry)


def describe_style(style: ParallelStyle) -> str:
    """A style as text, equal in every process."""
    try:
        return str(_entry(style, ""))
    except ArgumentError:  # a user's class
        return type(style).__name__


def _entry(style: ParallelStyle, pattern: str) -> dict[str, Any]:
    name = type(style).__name__
    if STYLES.get(name) is not type(style):
        raise ArgumentError(
            f"{pattern!r} has the style {name}, which is your own: a file cannot hold it."
        )
    options = {option: _encode(value) for option, value in _options(style).items()}
    return {"style": name, **options}


def _options(style: ParallelStyle) -> dict[str, Any]:
    """The options that differ from the defaults."""
    parameters = inspect.signature(type(style)).parameters
    found = {name: getattr(style, name) for name in parameters}
    return {
        name: value
        for name, value in found.items()
        if value != parameters[name].default and not (value == {} and "kwarg" in name)
    }


def _encode(value: Any) -> Any:
    if isinstance(value, Placement):
        return encode_placement(value)
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {name: _encode(item) for name, item in value.items()}
    return _NOTHING if value is None else value


def _decode(option: str, value: Any) -> Any:
    if not option.endswith("layouts") or isinstance(value, Placement):
        return value
    if isinstance(value, Mapping):
        return {name: _decode(option, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_decode(option, item) for item in value)
    if not isinstance(value, str):
        raise ArgumentError(f"{option} takes placements as text, found {value!r}.")
    return None if value == _NOTHING else decode_placement(value)
