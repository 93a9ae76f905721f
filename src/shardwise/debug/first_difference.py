"""The first call in which the journals of the ranks differ; see Note [Journals].

Ranks exchange accounts through the store in which they met: it works also where a collective has
failed, and where ranks are in different ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shardwise.core.doing import heard, tell
from shardwise.errors import RankMismatchError
from shardwise.simulation.roster import spans


@dataclass(frozen=True)
class Account:
    """What a rank has run since the last comparison that it has read."""

    #: How many calls came before, on which all ranks agreed; the last of them.
    start: int
    before: str | None
    #: The kinds of calls as code and text, and the calls as indices of these.
    kinds: list[tuple[int, str]]
    calls: list[int]
    #: Why nothing will follow; None where the rank is in the midst of something.
    end: str | None
    #: The comparison that was not read yet: its number, its place, the state of the generators.
    sent: tuple[int, str, int] | None

    def code(self, number: int) -> int | str | None:
        """Something that differs between different calls; None where it is not known."""
        place = number - self.start
        if place < len(self.calls):
            return self.kinds[self.calls[place]][0]
        return "end" if place == len(self.calls) and self.end is not None else None

    def text(self, number: int) -> str | None:
        place = number - self.start
        if place == len(self.calls):
            return f"nothing more before {self.end}"
        return self.kinds[self.calls[place]][1] if place >= 0 else self.before


def exchange_accounts(
    mine: Account, topic: str, num_ranks: int, wait_s: float
) -> dict[int, Account]:
    """The accounts of the ranks that give one in time; this rank's was the first it gave."""
    tell(json.dumps(asdict(mine)), topic)
    said = heard(num_ranks, wait_s, topic)
    return {rank: Account(**json.loads(said[rank])) for rank in sorted(said)}


def first_difference(accounts: dict[int, Account]) -> RankMismatchError | None:
    """What the ranks should hear, unless their accounts agree as far as they go."""
    if len(accounts) < 2:
        return None
    start = max(account.start for account in accounts.values())
    end = max(account.start + len(account.calls) for account in accounts.values())
    for number in range(start, end + 1):
        codes = {rank: account.code(number) for rank, account in accounts.items()}
        known = [rank for rank, code in codes.items() if code is not None]
        if len({codes[rank] for rank in known}) > 1:
            texts = _around_difference([str(accounts[rank].text(number)) for rank in known])
            return RankMismatchError(
                f"The ranks do not run the same program. Call {number:,} is the first that "
                f"differs: {_by_rank(dict(zip(known, texts, strict=True)))}."
                f"{_ran_before(accounts[known[0]], number)}"
            )
    return _other_generators(accounts)


def _other_generators(accounts: dict[int, Account]) -> RankMismatchError | None:
    sent = {rank: a.sent for rank, a in accounts.items() if a.sent is not None}
    last = min((number for number, _, _ in sent.values()), default=0)
    states = {rank: state for rank, (number, _, state) in sent.items() if number == last}
    if len(set(states.values())) < 2:
        return None
    rank = next(iter(states))
    said = _by_rank({rank: f"state {state & 0xFFFF:04x}" for rank, state in states.items()})
    account, (_, at, _) = accounts[rank], sent[rank]
    return RankMismatchError(
        f"The random generators are in different states at {at}: {said}."
        f"{_ran_before(account, account.start + len(account.calls))} Seed all ranks alike, and "
        "draw what only one rank needs from a torch.Generator of its own."
    )


def _ran_before(account: Account, number: int) -> str:
    before = account.text(number - 1)
    return f" All of them ran, before that: {_cut(before)}." if before is not None else ""


#: A step names all parameters of an optimizer.
_MAX_CHARS = 600


def _cut(text: str, begin: int = 0) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    return f"{'…' * (begin > 0)}{text[begin : begin + _MAX_CHARS]}…"


def _around_difference(texts: Sequence[str]) -> list[str]:
    """Texts that are long, from shortly before the first character in which some differ."""
    pairs = enumerate(zip(*texts, strict=False))
    first = next((place for place, chars in pairs if len(set(chars)) > 1), 0)
    return [_cut(text, max(0, first - 100)) for text in texts]


def _by_rank(texts: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(having) > 1 else ''} {spans(having)}: {text}"
        for text, having in ranks.items()
    )
