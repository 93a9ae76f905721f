"""Kernels that only a GPU has: every choice of their rules, against one device."""

import pytest
import torch
from devices import needs_cuda

from shardwise.testing import Sample, check_rule

aten = torch.ops.aten
pytestmark = needs_cuda


def t(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda", dtype=dtype)


def halves(*shape):
    """For kernels that take nothing wider. Their results are not summed, so that they are exact."""
    return t(*shape, dtype=torch.float16)


def _flash(causal):
    forward = aten._scaled_dot_product_flash_attention.default
    q, k, v = halves(4, 4, 64, 64), halves(4, 4, 64, 64), halves(4, 4, 64, 64)
    out, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(q, k, v, 0.0, causal)
    saved = (out, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    return [
        Sample(forward, (q, k, v, 0.0, causal), unread=(6, 7)),
        Sample(backward, (halves(4, 4, 64, 64), q, k, v, *saved)),
    ]


def _efficient(bias):
    forward = aten._scaled_dot_product_efficient_attention.default
    q, k, v = t(4, 4, 32, 64), t(4, 4, 32, 64), t(4, 4, 32, 64)
    out, logsumexp, seed, offset = forward(q, k, v, bias, True)
    mask = [True, True, True, bias is not None]
    args = (t(4, 4, 32, 64), q, k, v, bias, out, logsumexp, seed, offset, 0.0, mask)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    return [Sample(forward, (q, k, v, bias, True), unread=(2, 3)), Sample(backward, args)]


def _cudnn():
    forward = aten._scaled_dot_product_cudnn_attention.default
    q, k, v = halves(4, 4, 64, 64), halves(4, 4, 64, 64), halves(4, 4, 64, 64)
    out, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(q, k, v, None, True)
    saved = (out, logsumexp, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, False)
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    return [
        Sample(forward, (q, k, v, None, True), unread=(6, 7)),
        Sample(backward, (halves(4, 4, 64, 64), q, k, v, *saved)),
    ]


def _rms():
    x, weight = t(4, 6, 32), t(32)
    _, deviation = aten._fused_rms_norm.default(x, [32], weight, 1e-5)
    backward = aten._fused_rms_norm_backward.default
    return [
        Sample(aten._fused_rms_norm.default, (x, [32], weight, 1e-5)),
        Sample(backward, (t(4, 6, 32), x, [32], deviation, weight, [True, True])),
    ]


FAMILIES = {
    "flash": lambda: _flash(False),
    "flash causal": lambda: _flash(True),
    "efficient": lambda: _efficient(None),
    "efficient with a bias": lambda: _efficient(t(4, 4, 32, 32)),
    "efficient with a shared bias": lambda: _efficient(t(1, 4, 32, 32).expand(4, 4, 32, 32)),
    "cudnn": _cudnn,
    "rms": _rms,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_choice_gives_the_result_of_one_device(family):
    for sample in FAMILIES[family]():
        report = check_rule(sample)
        assert report.num_played
        assert not report.mistakes, "\n".join(map(str, report.mistakes))
