"""Random numbers: those of one device, from the same generator."""

from __future__ import annotations

from shardwise.testing.fuzz.hand import FLOATS, Draft, Hand, Row

_IN_PLACE = (
    "normal_()",
    "uniform_()",
    "bernoulli_(0.3)",
    "exponential_()",
    "random_(5)",
    "geometric_(0.4)",
    "normal_(0.5, 0.25)",
    "log_normal_(0, 0.25)",
)
_WIDE = FLOATS[:2]


def _drawn(h: Hand) -> Draft:
    x = h.writable(lambda t: t.dtype in _WIDE)
    return h.write(x, f"{x}.{h.pick(_IN_PLACE)}")


DRAWS: tuple[Row, ...] = (
    lambda h: f"F.dropout({h.floats()}, 0.5)",
    lambda h: f"F.dropout({h.floats()}, {h.pick((0.25, 0.75))})",
    lambda h: f"F.alpha_dropout({h.floats()}, 0.5, training=True)",
    lambda h: f"F.dropout1d({h.floats(2, 3)}, 0.5)",
    lambda h: f"torch.rand_like({h.floats()})",
    lambda h: f"torch.randn_like({h.tensor(_WIDE)})",
    lambda h: f"torch.randint_like({h.any()}, 5)",
    lambda h: f"torch.bernoulli({h.tensor(_WIDE)}.sigmoid())",
    lambda h: f"torch.normal({h.tensor(_WIDE)}, 0.5)",
    lambda h: f"torch.normal(0.0, {h.tensor(_WIDE)}.abs() + 0.1)",
    lambda h: f"F.gumbel_softmax({(x := h.tensor(_WIDE, (1, 3)))}, dim={h.dim(x)})",
    lambda h: f"torch.poisson({h.tensor(_WIDE)}.abs())",
    lambda h: f"F.rrelu({h.tensor(_WIDE)}, training=True)",
    lambda h: f"torch.multinomial(F.softmax({h.tensor(_WIDE, (1, 2), True)}, -1), 1)",
    _drawn,
    _drawn,
    _drawn,
)
