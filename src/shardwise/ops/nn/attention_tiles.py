"""Attention of one tile of queries and keys on one rank, with its log-sum-exp.

The results of several tiles with the same queries are added in proportion to their sums. Given the
final result and log-sum, backward of a tile gives the tile's terms of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from shardwise._torch.functions import fused_sdp_choice

aten = torch.ops.aten

_FLASH, _EFFICIENT = (
    int(SDPBackend.FLASH_ATTENTION.value),
    int(SDPBackend.EFFICIENT_ATTENTION.value),
)
#: The efficient kernel pads the log-sums of its queries to a multiple of this.
_PADDED_TO = 32


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One of torch's kernels that return log-sums, or "math"; and the scale of the scores."""

    name: str
    scale: float

    def forward(
        self, q: Any, k: Any, v: Any, mask: Any, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and its log-sums; minus infinity where a query may attend to no key."""
        mask, causal = _one_mask(mask, causal)
        q, k, v = map(_dense_rows, (q, k, v))
        if self.name == "cpu":
            run = aten._scaled_dot_product_flash_attention_for_cpu.default
            out, log_sum = run(q, k, v, 0.0, causal, attn_mask=mask, scale=self.scale)
            if mask is not None:  # the kernel says 0 there
                log_sum = log_sum.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
            return out, log_sum
        if self.name == "flash":
            flash = aten._scaled_dot_product_flash_attention.default
            return flash(q, k, v, 0.0, causal, scale=self.scale)[:2]
        if self.name == "efficient":
            efficient = aten._scaled_dot_product_efficient_attention.default
            out, log_sum = efficient(q, k, v, None, True, 0.0, causal, scale=self.scale)[:2]
            return out, log_sum[..., : q.shape[2]]
        scores = self._scores(q, k, mask, causal)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum.unsqueeze(-1)).exp()
        return (weights.nan_to_num(0.0) @ v.to(weights.dtype)).to(v.dtype), log_sum

    def backward(
        self, grad: Any, q: Any, k: Any, v: Any, out: Any, log_sum: Any, mask: Any, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile's terms of the gradients of `q`, `k` and `v`."""
        mask, causal = _one_mask(mask, causal)
        q, k, v = map(_dense_rows, (q, k, v))
        if self.name == "cpu":
            run = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            return run(grad, q, k, v, out, log_sum, 0.0, causal, attn_mask=mask, scale=self.scale)
        if self.name == "flash":
            nothing = torch.empty(0, dtype=torch.int64, device=q.device)
            sizes = (None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing)
            flash = aten._scaled_dot_product_flash_attention_backward.default
            return flash(grad, q, k, v, out, log_sum.contiguous(), *sizes, scale=self.scale)
        if self.name == "efficient":
            missing = -q.shape[2] % _PADDED_TO
            padded = torch.nn.functional.pad(log_sum, (0, missing), value=torch.inf)
            seed = torch.zeros((), dtype=torch.int64, device=q.device)
            given = (grad, q, k, v, None, out, padded, seed, seed, 0.0, [True] * 3 + [False])
            efficient = aten._scaled_dot_product_efficient_attention_backward.default
            return efficient(*given, causal, scale=self.scale)[:3]
        wide = log_sum.dtype
        weights = (self._scores(q, k, mask, causal) - log_sum.unsqueeze(-1)).exp()
        grad, out, v, q, k = (t.to(wide) for t in (grad, out, v, q, k))
        through = (grad * out).sum(-1, keepdim=True)
        scores = weights * (grad @ v.mT - through) * self.scale
        return scores @ k, scores.mT @ q, weights.mT @ grad

    def _scores(self, q: Any, k: Any, mask: Any, causal: bool) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).mT) * self.scale
        if causal:
            scores = scores.masked_fill(_later_keys(scores), -torch.inf)
        return scores if mask is None else scores + mask


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Fused kernels read the last dim as dense, and torch gives them no other operands."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _one_mask(mask: torch.Tensor | None, causal: bool) -> tuple[torch.Tensor | None, bool]:
    """A mask that is causal too, so that it says which queries attend to nothing."""
    if mask is None or not causal:
        return mask, causal
    return mask.masked_fill(_later_keys(mask), -torch.inf), False


def _later_keys(like: torch.Tensor) -> torch.Tensor:
    return torch.ones(like.shape[-2:], dtype=torch.bool, device=like.device).triu(1)


def choose_kernel(
    q: torch.Tensor, v: torch.Tensor, num_heads: int, masked: bool, scale: float | None
) -> AttentionKernel:
    """The kernel that torch would take for tensors like these on one device."""
    chosen = 1 / q.shape[-1] ** 0.5 if scale is None else scale
    like = [
        torch.empty((1, num_heads, 64, x.shape[-1]), dtype=x.dtype, device=x.device)
        for x in (q, q, v)
    ]
    # Not asked for a causal mask: whether there is one differs from tile to tile.
    number = fused_sdp_choice(*like, None, 0.0, False, scale=None, enable_gqa=False)
    names: dict[int, str] = {}
    if not masked and not any(x.shape[-1] % 8 for x in (q, v)):  # torch pads other widths
        names = {_FLASH: "flash", _EFFICIENT: "efficient"}
    if q.device.type == "cpu":
        names = {_FLASH: "cpu"}
    return AttentionKernel(names.get(number, "math"), chosen)


def repeated(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys or values with as many heads as the queries."""
    if x.shape[1] == num_heads:  # or none, on a rank without heads
        return x
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def summed(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The gradient of `repeated`: the sum over the query heads of each key head."""
    if x.shape[1] == num_heads:
        return x
    return x.unflatten(1, (num_heads, -1)).sum(2)


def add_tile(
    out: torch.Tensor, log_sum: torch.Tensor, tile: torch.Tensor, tile_log_sum: torch.Tensor
) -> None:
    """Add a tile's result to what its queries have so far, in place."""
    total = torch.logaddexp(log_sum, tile_log_sum)
    finite = total.clamp_min(torch.finfo(total.dtype).min)  # so that nothing plus nothing is 0
    before, here = ((part - finite).exp_().unsqueeze(-1) for part in (log_sum, tile_log_sum))
    out.mul_(before).add_(tile * here)
    log_sum.copy_(total)
