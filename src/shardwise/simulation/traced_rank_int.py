"""Integers that differ between ranks, while a compiler traces a simulated world.

Note [Uneven sizes in a graph]
One graph holds the parts of all ranks, each a tensor of the graph with sizes of its own, so ops
need no size that all ranks share. Two others ask for one. Autograd's formulas get an integer per
rank, as in eager code, and the LocalTensor runs each part with its own. The values are ints or
symbols of the graph. The compiler, which notes the sizes of everything that enters and leaves,
gets a stand-in that says nothing of the parts; see `simulation.stand_in`.

A symbol of torch's may be multiplied with such an integer (the elements of `batch x own columns`),
and torch would do that in its own arithmetic. There the integer counts as one more symbol, and what
comes out is taken apart again when an op is called with it.
"""

from __future__ import annotations

import weakref
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.sym_node import SymNode

from shardwise._torch.symint import detect_fake_mode
from shardwise.core.world import World
from shardwise.simulation import rank_int
from shardwise.simulation.rank_int import RankIntNode, value_key

_Key = tuple[World, tuple[int, ...], tuple[Any, ...]]
#: Of each set of symbols: the symbols that stand for integers per rank, and what these are.
_symbols: weakref.WeakKeyDictionary[Any, dict[_Key, Any]] = weakref.WeakKeyDictionary()
_meanings: weakref.WeakKeyDictionary[Any, dict[Any, RankIntNode]] = weakref.WeakKeyDictionary()


def node_for(part: torch.Tensor) -> type[RankIntNode]:
    """The kind of nodes for the sizes of a LocalTensor that is traced, given one of its parts."""
    mode = detect_fake_mode([part])
    env = None if mode is None else mode.shape_env
    if env is None:
        return RankIntNode
    found = _kinds.get(env)
    if found is None:
        kind = type("TracedRankIntNode", (TracedRankIntNode,), {"_env": weakref.ref(env)})
        found = _kinds[env] = kind
        rank_int.read_mixed = read_mixed
    return found


_kinds: weakref.WeakKeyDictionary[Any, type[RankIntNode]] = weakref.WeakKeyDictionary()


class TracedRankIntNode(RankIntNode, SymNode):  # type: ignore[misc]
    """A RankIntNode that torch's own symbols can be computed with."""

    _env: weakref.ref[Any]
    constant, fx_node, _optimized_summation = None, None, False

    @property
    def pytype(self) -> type:  # type: ignore[override]
        return bool if self.is_bool() else int

    @property
    def shape_env(self) -> Any:  # type: ignore[override]
        return self._env()

    @property
    def hint(self) -> None:
        return None

    @property
    def expr(self) -> Any:
        """What stands for this integer in torch's arithmetic: a symbol where ranks differ."""
        values = tuple(map(value_key, self.values))
        if all(value == values[0] for value in values):
            return sympy.sympify(values[0])
        env = self.shape_env
        known = _symbols.setdefault(env, {})
        key = (self.world, self.ranks, values)
        if key not in known:
            # No tensor of the graph has it, so nobody has to say where it comes from.
            with env.ignore_fresh_unbacked_symbols():
                known[key] = env.create_unbacked_symint().node.expr
            _meanings.setdefault(env, {})[known[key]] = self
        return known[key]

    def _values_of(self, other: Any) -> tuple[Any, ...]:
        if isinstance(other, SymNode) and not isinstance(other, RankIntNode):
            mixed = read_mixed(other)
            other = mixed if mixed is not None else torch.SymInt(other)
        return super()._values_of(other)


def read_mixed(node: Any) -> RankIntNode | None:
    """What a number of torch's is on each rank, where it was computed from one of ours."""
    env: Any = getattr(node, "shape_env", None)
    meanings = None if env is None else _meanings.get(env)
    if not meanings:
        return None
    inside = [symbol for symbol in node.expr.free_symbols if symbol in meanings]
    if not inside:
        return None
    first = meanings[inside[0]]
    values = []
    for place in range(len(first.ranks)):
        own = {symbol: value_key(meanings[symbol].values[place]) for symbol in inside}
        expr = env.simplify(node.expr.subs(own))
        number = int(expr) if expr.is_number else env.create_symintnode(expr, hint=None)
        values.append(number)
    return type(first)(first.world, first.ranks, tuple(values))
