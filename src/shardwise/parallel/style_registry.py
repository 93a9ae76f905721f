"""Styles as data: words, as in Hugging Face's `tp_plan`, and tables of options.

Most words of a `tp_plan` are styles here too. A mixture of experts takes several entries there: one
for the module that holds the experts, one for each of its parameters, and perhaps one for the
router. `ExpertParallel` does what they say together: each rank has some of the experts, and the
ranks' results are added. Where a plan splits every expert instead, as in a config's
`base_model_tp_plan`, the results are the same, and so is what is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.core.encode import decode_placement, encode_placement
from shardwise.core.placements import Placement, Replicate
from shardwise.errors import ArgumentError, ShardwiseError
from shardwise.parallel.experts import ExpertParallel
from shardwise.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from shardwise.parallel.style import ParallelStyle
from shardwise.parallel.styles import (
    ColwiseParallel,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    SharedKeyParallel,
)
from shardwise.plans import Entry, did_you_mean

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
