"""From a plan to the modules that it changes: all checks, no changes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.core.placements import Placement, Shard
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.parallel.style import ParallelStyle
from shardwise.parallel.style_registry import style_of, with_experts_joined
from shardwise.parallel.styles import ColwiseParallel, SharedHeads, SharedKeyParallel
from shardwise.plans import matching_modules, no_match


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
    styles = {}
    for pattern, entry in with_experts_joined(plan).items():
        if not isinstance(pattern, str):
            raise ArgumentError(f"A path in a plan is a string, found {pattern!r}.")
        styles[pattern] = style_of(entry, pattern)
    return styles


def readable(plan: Any) -> tuple[Any, list[ShardwiseError]]:
    """The valid entries of a plan as styles, and the errors of the others."""
    if not isinstance(plan, Mapping):
        return plan, []
    kept: dict[str, ParallelStyle] = {}
    wrong: list[ShardwiseError] = []
    for pattern, entry in with_experts_joined(plan).items():
        try:
            kept |= styles_of({pattern: entry})
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
    """A module that has several paths is changed once by one entry."""
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
    heads. Raises where they cannot be.
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
            fits = [n for n in range(1, most + 1) if _heads_fit(set(counts.values()), n)]
            if num_ranks not in fits:
                raise LayoutError(
                    f"Module {parent!r}: {num_ranks} ranks cannot split {target.path!r} between "
                    f"its {count} heads; its layers have {', '.join(map(str, counts.values()))} "
                    f"heads. A tensor axis of {', '.join(map(str, fits))} works, or the style "
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
    return found + _decided_twice(targets) + _tied_apart(targets)


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


def _tied_apart(targets: list[Target]) -> list[ShardwiseError]:
    placed: dict[int, tuple[str, Placement]] = {}
    found: list[ShardwiseError] = []
    for target in filter(fits, targets):
        parameters = dict(target.module.named_parameters(remove_duplicate=False))
        for name, placement in target.style.parameter_placements(target.module).items():
            if name not in parameters:
                continue
            full = f"{target.path}.{name}" if target.path else name
            first, where = placed.setdefault(id(parameters[name]), (full, placement))
            if where != placement:
                found.append(
                    LayoutError(
                        f"{first!r} and {full!r} are one parameter, and the plan places it as "
                        f"{where} and as {placement}. Choose styles that place it alike, such as a "
                        "rowwise embedding and a colwise head."
                    )
                )
    return found
