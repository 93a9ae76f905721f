"""Integers that differ between ranks, while a compiler traces a simulated world.

Note [Uneven sizes in a graph]
One graph holds the parts of all ranks, each a tensor with its own sizes, so ops need no size that
all ranks share. But autograd's formulas and the compiler do. Autograd's formulas get an integer per
rank, as in eager code, and the LocalTensor runs each part with its own; the values are ints or
symbols of the graph. The compiler, which records the sizes of everything that enters and leaves,
gets placeholders; see `simulation.roster`.

Torch may multiply one of its symbols with such an integer (the elements of `batch x own columns`).
In that arithmetic the integer is one more symbol, and the result is decoded per rank when an op is
called with it.
"""

from __future__ import annotations

import weakref
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.sym_node import SymNode

from shardwise._torch.functions import detect_fake_mode
from shardwise.core.world import World
from shardwise.simulation import roster
from shardwise.simulation.roster import RankIntNode, value_key

_Key = tuple[World, tuple[int, ...], tuple[Any, ...]]
#: Per ShapeEnv, the symbols that stand for integers per rank, and those integers.
_symbols: weakref.WeakKeyDictionary[Any, dict[_Key, Any]] = weakref.WeakKeyDictionary()
_meanings: weakref.WeakKeyDictionary[Any, dict[Any, RankIntNode]] = weakref.WeakKeyDictionary()


def node_for(part: torch.Tensor) -> type[RankIntNode]:
    """The node type for the sizes of a traced LocalTensor, given one of its parts."""
    mode = detect_fake_mode([part])
    env = None if mode is None else mode.shape_env
    if env is None:
        return RankIntNode
    found = _kinds.get(env)
    if found is None:
        kind = type("TracedRankIntNode", (TracedRankIntNode,), {"_env": weakref.ref(env)})
        found = _kinds[env] = kind
        roster.decode_mixed = decode_mixed
    return found


_kinds: weakref.WeakKeyDictionary[Any, type[RankIntNode]] = weakref.WeakKeyDictionary()


class TracedRankIntNode(RankIntNode, SymNode):  # type: ignore[misc]
    """A RankIntNode that can be combined with torch's own symbols."""

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
        """This integer in torch's arithmetic: a symbol where ranks differ."""
        values = tuple(map(value_key, self.values))
        if all(value == values[0] for value in values):
            return sympy.sympify(values[0])
        env = self.shape_env
        known = _symbols.setdefault(env, {})
        key = (self.world, self.ranks, values)
        if key not in known:
            # No tensor of the graph has this size, so it needs no source.
            with env.ignore_fresh_unbacked_symbols():
                known[key] = env.create_unbacked_symint().node.expr
            _meanings.setdefault(env, {})[known[key]] = self
        return known[key]

    def _values_of(self, other: Any) -> tuple[Any, ...]:
        if isinstance(other, SymNode) and not isinstance(other, RankIntNode):
            mixed = decode_mixed(other)
            other = mixed if mixed is not None else torch.SymInt(other)
        return super()._values_of(other)


def decode_mixed(node: Any) -> RankIntNode | None:
    """The value on each rank of a number that torch computed from a RankInt."""
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
