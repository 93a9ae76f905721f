"""Words of Hugging Face's plans that go together, or that have no counterpart here.

Most words of a `tp_plan` are styles here too; see `style_registry`. A mixture of experts takes
several entries: one for the module that holds the experts, one for each of its parameters, and
perhaps one for the router. `ExpertParallel` does what they say together: each rank has some of the
experts, and the ranks' results are added. Where a plan splits every expert instead, as in a
config's `base_model_tp_plan`, the results are the same, and so is what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Words for a module whose experts are split, for its parameters, and for the router before it.
_EXPERTS = ("ep_dispatch_experts", "moe_tp_experts")
_STACKED = ("grouped_gemm", "packed_colwise", "packed_rowwise")
_OF_PARAMETERS = (*_STACKED, "colwise", "rowwise")
_ROUTER = "ep_router"

_INSTEAD = (
    'Say "experts" for the module that holds them, or use the config\'s base_model_ep_plan: each '
    "rank then has some of the experts."
)

#: Words that are no styles here, and what to do about it.
WITHOUT_COUNTERPART = {
    "packed_colwise": f"It splits the halves of a packed parameter one by one. {_INSTEAD}",
    "packed_rowwise": f"It splits the halves of a packed parameter one by one. {_INSTEAD}",
    "moe_tp_experts": f"It adds the results of experts that are each split themselves. {_INSTEAD}",
    "ep_dispatch_experts": f"Its parameters should be {_STACKED[0]!r}. {_INSTEAD}",
    "grouped_gemm": f"It splits a single parameter by experts. {_INSTEAD}",
    "ep_router": f"It goes with experts that are split. {_INSTEAD}",
    "moe_identity_expert": f"It goes with experts that are each split themselves. {_INSTEAD}",
    "mla_kv_a_proj": "It splits a part of a layer's output. Leave the layer out of the plan: every "
    "rank then computes it whole.",
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
    if "experts" in (word for word in joined.values() if isinstance(word, str)):
        # Every rank routes all tokens, and selects those of its experts itself.
        joined = {path: word for path, word in joined.items() if word != _ROUTER}
    return joined
