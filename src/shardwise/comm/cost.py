"""What a collective costs: latency plus bytes over bandwidth.

The constants are fixed, not measured: ranks that decided differently would hang.
"""

from __future__ import annotations

LATENCY_S = 20e-6
BYTES_PER_S = 10e9

#: The fraction of the tensor that each of n ranks sends: of the larger of input and output.
_TRAFFIC = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def collective_s(kind: str, num_ranks: int, num_bytes: float) -> float:
    """Seconds for a collective whose larger side holds `num_bytes` on each rank.

    >>> collective_s("all_reduce", 4, 1e9) > collective_s("reduce_scatter", 4, 1e9)
    True
    """
    return LATENCY_S + _TRAFFIC[kind](num_ranks) * num_bytes / BYTES_PER_S


def exchange_s(num_bytes: float) -> float:
    """Seconds for an exchange in which no rank sends or receives more than `num_bytes`."""
    return LATENCY_S + num_bytes / BYTES_PER_S


def local_s(num_bytes: float) -> float:
    """Seconds for a step without communication, a copy on the device, so that fewer steps win."""
    return 1e-6 + num_bytes / (50 * BYTES_PER_S)


def show_bytes(num: float) -> str:
    """
    >>> show_bytes(1234), show_bytes(80e9), show_bytes(999_999)
    ('1.23 kB', '80 GB', '1 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num >= 0.9995 * size:
            return f"{num / size:.3g} {unit}"
    return f"{num:.0f} B"
