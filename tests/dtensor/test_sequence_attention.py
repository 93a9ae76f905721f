"""Attention of DTensors that are sharded along the sequence."""

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.errors import RedistributionError, UnsupportedError
from shardwise.ops.nn import context_attention
from shardwise.ops.nn.context_attention import AxisGroup
from shardwise.ops.nn.context_tiles import AttentionKernel

SEQUENCE = [Shard(2)]


def operands(heads=4, key_heads=4, queries=18, keys=18, width=8, value_width=8, **options):
    torch.manual_seed(0)
    sizes = [(heads, queries, width), (key_heads, keys, width), (key_heads, keys, value_width)]
    batch = options.pop("batch", 2)
    made = [torch.randn(batch, *size, **({"dtype": torch.float64} | options)) for size in sizes]
    return made, torch.randn(*made[0].shape[:3], value_width).to(made[0].dtype)


def one_device(given, grad, **options):
    leaves = [x.clone().requires_grad_() for x in given]
    gqa = leaves[0].shape[1] != leaves[1].shape[1]
    out = F.scaled_dot_product_attention(*leaves, enable_gqa=gqa, **options)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def sharded(given, grad, mesh, placements, attn_mask=None, **options):
    leaves = [shardwise.distribute_tensor(x, mesh, placements).requires_grad_() for x in given]
    gqa = leaves[0].shape[1] != leaves[1].shape[1]
    if attn_mask is not None:
        attn_mask = shardwise.distribute_tensor(attn_mask, mesh, [Replicate()] * mesh.ndim)
    out = F.scaled_dot_product_attention(*leaves, attn_mask, enable_gqa=gqa, **options)
    out.backward(shardwise.distribute_tensor(grad, mesh, placements))
    return [out, *(x.grad for x in leaves)]


def check(given, grad, shape=(4,), placements=SEQUENCE, **options):
    expected = one_device(given, grad, **options)
    with shardwise.simulate(torch.Size(shape).numel()):
        mesh = shardwise.init_device_mesh("cpu", shape)
        found = sharded(given, grad, mesh, placements, **options)
        for x, wanted in zip(found, expected, strict=True):
            assert x.placements == tuple(placements)
            torch.testing.assert_close(x.full_tensor().agreed(), wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},  # by heads
        {"heads": 3, "key_heads": 3},  # by rounds, and 18 positions do not divide
        {"heads": 8, "key_heads": 2},  # key heads are shared by ranks
        {"heads": 6, "key_heads": 1},
        {"heads": 3, "key_heads": 3, "queries": 7, "keys": 20},
        {"heads": 3, "key_heads": 3, "queries": 20, "keys": 3},
        {"heads": 3, "key_heads": 3, "value_width": 6},  # no fused kernel
    ],
    ids=str,
)
def test_as_on_one_device(sizes, causal):
    check(*operands(**sizes), is_causal=causal)


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("kind", ["bool", "bool and causal", "float", "row", "head"])
def test_masks(kind, heads):
    mask = torch.rand(2, 1, 18, 18) > 0.4
    mask[0, 0, 3] = False  # attends to nothing
    if not kind.startswith("bool"):
        shape = {"float": (18, 18), "row": (1, 18), "head": (2, heads, 18, 18)}[kind]
        mask = torch.randn(shape, dtype=torch.float64)
    check(*operands(heads, heads), attn_mask=mask, is_causal="causal" in kind)


def test_half_precision():
    """No further from the exact result than on one device, but for the rounding of one sum."""
    given, grad = operands(3, 3, dtype=torch.bfloat16)
    exact = one_device([x.double() for x in given], grad.double(), is_causal=True)
    alone = one_device(given, grad, is_causal=True)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        found = sharded(given, grad, mesh, SEQUENCE, is_causal=True)
        for x, one, wanted in zip(found, alone, exact, strict=True):
            assert x.dtype == torch.bfloat16
            error = (x.full_tensor().agreed() - wanted).abs().max()
            assert error < 2 * (one - wanted).abs().max()


@pytest.mark.parametrize("wrong", [{"shape": (18, 17)}, {"dtype": torch.int64}], ids=str)
def test_wrong_masks_raise_as_on_one_device(wrong):
    given, _ = operands()
    mask = torch.ones(wrong.get("shape", (18, 18)), dtype=wrong.get("dtype", torch.bool))
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*given, mask)
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        laid = [shardwise.distribute_tensor(x, mesh, SEQUENCE) for x in given]
        laid.append(shardwise.distribute_tensor(mask, mesh, [Replicate()]))
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*laid)


def test_scale():
    check(*operands(3, 3), is_causal=True, scale=0.3)


@pytest.mark.parametrize("key_heads", [6, 2])
def test_with_batch_and_heads_on_other_axes(key_heads):
    placements = [Shard(0), Shard(2), Shard(1)]
    check(*operands(6, key_heads), (2, 2, 2), placements, is_causal=True)


@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("positions", [18, 4])  # queries are balanced, or stay
@pytest.mark.parametrize("placements", [[Shard(2), Replicate()], [Replicate(), Shard(2)]], ids=repr)
def test_replicated_over_another_axis(placements, positions, heads):
    check(*operands(heads, heads, positions, positions), (2, 2), placements, is_causal=True)


def test_two_axes_of_positions():
    given, grad = operands(6, 2)
    (expected, *_) = one_device(given, grad, is_causal=True)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2))
        out = sharded(given, grad, mesh, [Shard(2), Shard(2)], is_causal=True)[0]
        torch.testing.assert_close(out.full_tensor().agreed(), expected)


def test_both_ways_send_what_they_say():
    """A batch of one is not brought to one rank; all-to-alls over heads, or rounds of keys."""
    num, positions = 4, 512
    for heads, key_heads, kinds in ((4, 4, 2), (32, 2, 3)):
        given, _ = operands(heads, key_heads, positions, positions, 64, 64, batch=1)
        with shardwise.simulate(num):
            mesh = shardwise.init_device_mesh("cpu", (num,))
            laid = [shardwise.distribute_tensor(x, mesh, SEQUENCE) for x in given]
            with CommDebugMode() as comm:
                F.scaled_dot_product_attention(*laid, enable_gqa=True)
            assert [event.kind for event in comm.events] == ["all_to_all_single"] * kinds


@pytest.mark.parametrize("by_heads", [False, True])
def test_bytes_and_work_of_a_long_sequence(by_heads, monkeypatch):
    """16k positions on 4 ranks: no more bytes than a ring of all keys, and balanced work."""
    num, positions, heads, width = 4, 16384, 4, 8
    sent, work, here = [0] * num, [0] * num, [0]
    monkeypatch.setattr(context_attention, "_heads_fit", lambda *_: by_heads)
    start, mapped = context_attention.collectives.start_all_to_all_uneven, AxisGroup.map

    def counted(flat, num_sent, *args):
        kept = flat.on_rank(0).numel() // num if by_heads else 0  # what a rank sends to itself
        for rank in range(num):
            sent[rank] += flat.on_rank(rank).numel() - kept
        return start(flat, num_sent, *args)

    def noted(self, fn, *tensors, **options):
        def on_rank(me, *parts):
            here[0] = me
            return fn(me, *parts)

        return mapped(self, on_rank, *tensors, **options)

    def attend(self, q, k, v, mask, causal):
        pairs = q.shape[1] * q.shape[2] * k.shape[2]
        work[here[0]] += pairs // 2 if causal else pairs
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def attend_backward(self, grad, q, k, v, *rest):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    monkeypatch.setattr(context_attention.collectives, "start_all_to_all_uneven", counted)
    monkeypatch.setattr(AxisGroup, "map", noted)
    monkeypatch.setattr(AttentionKernel, "forward", attend)
    monkeypatch.setattr(AttentionKernel, "backward", attend_backward)
    ring = 2 * heads * positions * width * (num - 1)  # elements that all ranks send
    with shardwise.simulate(num):
        mesh = shardwise.init_device_mesh("cpu", (num,))
        made = [
            shardwise.zeros(
                1, heads, positions, width, device_mesh=mesh, placements=SEQUENCE
            ).requires_grad_()
            for _ in range(3)
        ]
        out = F.scaled_dot_product_attention(*made, is_causal=True)
        assert sum(sent) <= ring
        forward = sum(sent)
        out.backward(out.detach())
        assert sum(sent) - forward <= 2 * ring
    assert max(work) * num / sum(work) < 1.05


def test_strict():
    given, _ = operands()
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        laid = [shardwise.distribute_tensor(x, mesh, SEQUENCE) for x in given]
        with (
            shardwise.explicit_redistribution(),
            pytest.raises(RedistributionError, match="context_parallel"),
        ):
            F.scaled_dot_product_attention(*laid)


def test_math_has_second_derivatives():
    """Where only that kernel is allowed, as on one device."""
    given, _ = operands(2, 2, 6, 6)
    with shardwise.simulate(2), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        laid = [shardwise.distribute_tensor(x, mesh, SEQUENCE).requires_grad_() for x in given]
        out = F.scaled_dot_product_attention(*laid).square().sum()
        (grad,) = torch.autograd.grad(out, laid[0], create_graph=True)
        grad.square().sum().backward()
        assert laid[1].grad is not None


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("operand", range(3))
def test_a_second_derivative_is_refused(heads, operand):
    """By rounds and by heads; also that of a sum, whose gradient depends on the operands alone."""
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        given = [torch.randn(2, heads, 6, 4) for _ in range(3)]
        laid = [shardwise.distribute_tensor(x, mesh, SEQUENCE) for x in given]
        laid[operand].requires_grad_()
        out = F.scaled_dot_product_attention(*laid)
        (grad,) = torch.autograd.grad(out.sum(), laid[operand], create_graph=True)
        with pytest.raises(UnsupportedError, match="not differentiated again"):
            grad.square().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("heads", [3, 4])
def test_compiled(heads):
    """In one graph, by rounds and by heads."""
    torch.compiler.reset()  # a second shape would be symbolic, and planned without exchange

    def attend(*operands):
        return F.scaled_dot_product_attention(*operands, is_causal=True).sin()

    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        laid = [
            shardwise.distribute_tensor(x, mesh, SEQUENCE).requires_grad_()
            for x in operands(heads, heads)[0]
        ]
        results = []
        for fn in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
            out = fn(*laid)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), laid)])
        for eager, compiled in zip(*results, strict=True):
            assert compiled.placements == tuple(SEQUENCE)
            torch.testing.assert_close(
                compiled.full_tensor().agreed(), eager.full_tensor().agreed()
            )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
# Torch says so where the first matrix product of a process is one of backward.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_gpu(dtype, heads):
    """The efficient kernel and the flash kernel: no further from the exact result than alone."""
    made, grad = operands(heads, heads, 300, 300, 64, 64, dtype=dtype)
    given, grad = [x.cuda() for x in made], grad.cuda()
    exact = one_device([x.double() for x in given], grad.double(), is_causal=True)
    alone = one_device(given, grad, is_causal=True)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cuda", (4,))
        found = sharded(given, grad, mesh, SEQUENCE, is_causal=True)
        for x, one, wanted in zip(found, alone, exact, strict=True):
            error = (x.full_tensor().agreed() - wanted).abs().max()
            assert error < 2 * (one - wanted).abs().max()


@pytest.mark.parametrize("heads", [4, 3], ids=["by heads", "by rounds"])
def test_widths_that_are_expanded_or_strided(heads):
    """Torch takes no fused kernel for such operands: it would read the next numbers in memory."""
    (q, k, v), _ = operands(heads, heads, width=1, value_width=16)

    def attend(q, k, v):
        wide, rows = q.expand(-1, -1, -1, 8), k.expand(-1, -1, -1, 8)
        return F.scaled_dot_product_attention(wide, rows, v[..., ::2])

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attend(*leaves)
    expected.sum().backward()
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        given = [shardwise.distribute_tensor(x, mesh, SEQUENCE).requires_grad_() for x in (q, k, v)]
        found = attend(*given)
        found.sum().backward()
        torch.testing.assert_close(found.full_tensor().agreed(), expected)
        for x, leaf in zip(given, leaves, strict=True):
            torch.testing.assert_close(x.grad.full_tensor().agreed(), leaf.grad)


@pytest.mark.parametrize("keys", [SEQUENCE, [Replicate()]], ids=["sharded", "whole"])
@pytest.mark.parametrize("written", ["query", "key", "value", "result"])
def test_backward_is_refused_once_what_it_needs_was_written_to(written, keys):
    """As on one device."""
    given, _ = operands()
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        places = [SEQUENCE, keys, keys]
        leaves = [
            shardwise.distribute_tensor(x, mesh, at).requires_grad_()
            for x, at in zip(given, places, strict=True)
        ]
        out = F.scaled_dot_product_attention(*leaves)
        with torch.no_grad():
            [*leaves, out][["query", "key", "value", "result"].index(written)].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_operands_of_one_dtype():
    (q, k, v), _ = operands(dtype=torch.float32)
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        given = [shardwise.distribute_tensor(x, mesh, SEQUENCE) for x in (q, k, v.double())]
        with pytest.raises(RuntimeError, match="same dtype"):
            F.scaled_dot_product_attention(*given)


@pytest.mark.parametrize("causal", [False, True])
def test_ranks_without_heads(causal):
    """One head, on the first of two ranks; the other one has none, and half of the positions."""
    given, grad = operands(heads=1, key_heads=1, queries=6, keys=6)
    check(given, grad, (2, 2), [Shard(2), Shard(1)], is_causal=causal)


def test_values_lie_where_their_keys_do():
    """A value whose shards have other sizes than those of its key is moved to them."""
    q, k, v = (torch.randn(1, 2, n, 4) for n in (2, 5, 5))
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        for of_keys, of_values in ((None, (1, 4)), ((4, 1), (1, 4)), ((0, 5), None)):
            sizes = ((1, 1), of_keys, of_values)
            operands = [
                shardwise.distribute_tensor(x, mesh, [shardwise.Shard(2, sizes=n)])
                for x, n in zip((q, k, v), sizes, strict=True)
            ]
            found = F.scaled_dot_product_attention(*operands).full_tensor().agreed()
            torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v))
