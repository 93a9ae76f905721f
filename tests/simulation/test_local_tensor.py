"""One tensor per rank, behind the face of one tensor."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from shardwise import (
    ArgumentError,
    LayoutError,
    LeafError,
    LocalTensor,
    RankMismatchError,
    simulate,
)

pytestmark = pytest.mark.usefixtures("mesh")


def ranked(*values):
    """A LocalTensor whose rank `i` holds `values[i]`."""
    return LocalTensor.per_rank(lambda rank: torch.tensor(values[rank]))


def per_rank(x):
    return [x.on_rank(rank).tolist() for rank in x.ranks]


def test_each_rank_holds_its_own():
    x = LocalTensor.per_rank(lambda rank: torch.full((2,), rank))
    assert x.ranks == (0, 1, 2, 3)
    assert per_rank(x) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert type(x.on_rank(2)) is torch.Tensor


def test_some_ranks():
    x = LocalTensor.per_rank(lambda rank: torch.tensor(rank * 10), ranks=[1, 3])
    assert x.ranks == (1, 3)
    assert x.on_rank(3).item() == 30
    with pytest.raises(LayoutError, match=r"Rank 0 holds nothing.*on ranks 1, 3"):
        x.on_rank(0)


@pytest.mark.parametrize("ranks", [[], [4], [-1], [1, 1]], ids=str)
def test_ranks_that_the_world_does_not_have(ranks):
    with pytest.raises(ArgumentError, match="ranks 0 to 3 at most once"):
        LocalTensor.per_rank(lambda rank: torch.ones(2), ranks)


def test_each_rank_gives_a_tensor():
    with pytest.raises(ArgumentError, match=r"fn\(0\) is not a tensor, found 0"):
        LocalTensor.per_rank(lambda rank: rank)


def test_a_number_has_no_length():
    with pytest.raises(TypeError, match="0-d"):
        len(ranked(1.0, 2.0, 3.0, 4.0))


@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=str)
def test_a_list_of_tensors_is_stacked_not_read_as_numbers(shape):
    x = LocalTensor.per_rank(lambda rank: torch.full(shape, rank))
    for read in (torch.tensor, torch.as_tensor):
        with pytest.raises(TypeError, match=r"Use torch\.stack\(\[\.\.\.\]\)"):
            read([x, x])
    assert torch.stack([x, x]).shape == (2, *shape)


def test_tensors_of_other_ranks_do_not_mix():
    some = LocalTensor.per_rank(lambda rank: torch.tensor(rank), ranks=[0, 1])
    with pytest.raises(RuntimeError, match="ranks"):
        some + ranked(0, 1, 2, 3)


def test_agreed():
    assert LocalTensor.per_rank(lambda rank: torch.arange(3)).agreed().tolist() == [0, 1, 2]
    with pytest.raises(RankMismatchError, match="rank 0"):
        ranked(1, 1, 1, 2).agreed()
    with pytest.raises(RankMismatchError):
        ranked([1], [1], [1], [1, 1]).agreed()


def test_what_all_ranks_share_is_compared_and_formatted_as_a_plain_tensor():
    weight = torch.nn.Parameter(torch.arange(3.0))
    shared = LocalTensor.per_rank(lambda rank: torch.arange(3.0))
    torch.testing.assert_close(shared, weight)
    torch.testing.assert_close(weight, shared, allow_subclasses=True)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(shared + 1, weight)
    loss = shared.sum() / 4
    assert f"{loss:.3f} {loss}" == "0.750 0.75"
    assert f"{shared}" == str(shared)
    differing = ranked(1, 1, 1, 2)
    assert f"{differing}" == str(differing)
    with pytest.raises(RankMismatchError):
        f"{differing:.3f}"


def test_ops_run_on_every_rank():
    x = LocalTensor.per_rank(lambda rank: torch.arange(3.0) + rank)
    y = (x * 2 - 1).relu().sum()
    expected = [((torch.arange(3.0) + rank) * 2 - 1).relu().sum().item() for rank in range(4)]
    assert per_rank(y) == expected
    assert isinstance(y, LocalTensor)


def test_plain_tensors_count_as_the_same_on_every_rank():
    x = ranked([1.0], [2.0], [3.0], [4.0])
    plain = torch.tensor([10.0, 20.0])
    assert per_rank(x + plain) == [[11, 21], [12, 22], [13, 23], [14, 24]]
    assert per_rank(plain - x) == [[9, 19], [8, 18], [7, 17], [6, 16]]
    assert per_rank(torch.cat([plain, x])) == [[10, 20, n] for n in (1, 2, 3, 4)]


def test_several_results_and_lists():
    x = LocalTensor.per_rank(lambda rank: torch.arange(4) + rank)
    first, second = x.split(2)
    assert per_rank(first) == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert per_rank(second) == [[2, 3], [3, 4], [4, 5], [5, 6]]
    assert per_rank(x.topk(1).values) == [[3], [4], [5], [6]]


# -- reading one value -----------------------------------------------------------------------


def test_sizes_that_agree_can_be_read():
    x = LocalTensor.per_rank(lambda rank: torch.full((2, 3), rank))
    assert x.shape == (2, 3)
    assert x.size(1) == 3
    assert len(x) == 2
    assert x.numel() == 6


@pytest.mark.parametrize(
    "read",
    [lambda x: x.shape, lambda x: x.size(0), lambda x: len(x), lambda x: x.numel()],
    ids=["shape", "size", "len", "numel"],
)
def test_a_size_that_differs_is_an_error_that_names_the_ranks(read):
    long = torch.ones(2)
    x = LocalTensor.per_rank(lambda rank: torch.ones(1) if rank == 3 else long)
    with pytest.raises(RankMismatchError) as error:
        read(x)
    assert "rank 0-2 has" in str(error.value)
    assert "rank 3 has" in str(error.value)


def test_an_uneven_tensor_still_computes():
    x = LocalTensor.per_rank(lambda rank: torch.ones(rank))
    assert per_rank((x + 1).sum()) == [0, 2, 4, 6]


@pytest.mark.parametrize("cut", [slice(1), slice(1, None), slice(-1, None), slice(0, 9)], ids=repr)
def test_an_uneven_tensor_is_cut_on_every_rank(cut):
    x = LocalTensor.per_rank(lambda rank: torch.arange(rank + 1.0))
    assert per_rank(x[cut]) == [torch.arange(rank + 1.0)[cut].tolist() for rank in range(4)]


@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.smooth_l1_loss],
    ids=lambda loss: loss.__name__,
)
def test_losses_of_uneven_batches(loss):
    """They compare the sizes of their arguments; a rank may have no examples."""
    weight = torch.randn(3, 1, requires_grad=True)
    batches = [(torch.randn(rank, 3), torch.rand(rank, 1)) for rank in range(4)]
    alone = [loss(x @ weight, y, reduction="sum") for x, y in batches]
    expected = torch.autograd.grad(sum(alone), weight)[0]
    x, y = (LocalTensor.per_rank(lambda rank, i=i: batches[rank][i]) for i in range(2))
    held = LocalTensor.per_rank(lambda rank: weight.detach().clone()).requires_grad_()
    found = loss(x @ held, y, reduction="sum")
    found.sum().backward()
    for rank in range(4):
        torch.testing.assert_close(found.on_rank(rank), alone[rank])
    torch.testing.assert_close(sum(held.grad.on_rank(rank) for rank in range(4)), expected)


def test_uneven_batches_are_computed_again():
    """Activation checkpoints compare sizes with those of the first time."""
    layer = torch.nn.Linear(3, 2)
    x = LocalTensor.per_rank(lambda rank: torch.ones(rank, 3)).requires_grad_()
    checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False).sum().backward()
    again = LocalTensor.per_rank(lambda rank: torch.ones(rank, 3)).requires_grad_()
    layer(again).tanh().sum().backward()
    assert per_rank(x.grad) == per_rank(again.grad)


def test_tensors_of_other_numbers_of_dims():
    words = r"different numbers of dims \(rank 0: 1, rank 1: 2\)"
    with simulate(2), pytest.raises(RankMismatchError, match=words):
        LocalTensor.per_rank(lambda rank: torch.zeros((2,) * (rank + 1)))


def test_a_norm_that_refuses_a_batch_of_one_does_not_decide_for_all_ranks():
    x = LocalTensor.per_rank(lambda rank: torch.ones(rank + 1, 2))
    with pytest.raises(RankMismatchError, match="rank 0 has"):
        F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.GroupNorm(2, 4),
        pytest.param(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 1),
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13", reason="older linear layers ask for the batch's size"
            ),
        ),
    ],
    ids=["BatchNorm1d", "GroupNorm", "TransformerEncoder"],
)
def test_layers_of_uneven_batches(layer):
    values = [torch.randn(size, 4, 6) for size in (3, 2, 5, 4)]
    expected = []
    for value in values:
        own = copy.deepcopy(layer)
        y = own(value.requires_grad_())
        expected.append([y.detach(), *gradients(own, y, value)])
    x = LocalTensor.per_rank(lambda rank: values[rank].detach()).requires_grad_()
    y = layer(x)
    found = [y.detach(), *gradients(layer, y, x)]
    for rank in range(4):
        for ours, alone in zip(found, expected[rank], strict=True):
            torch.testing.assert_close(ours.on_rank(rank), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("read", [float, bool, lambda x: x.item(), lambda x: x.tolist()])
def test_a_value_is_read_where_all_agree(read):
    assert read(ranked(3.0, 3.0, 3.0, 3.0)) == read(torch.tensor(3.0))
    with pytest.raises(RankMismatchError, match="rank 3 has"):
        read(ranked(3.0, 3.0, 3.0, 0.0))


def test_nan_agrees_with_nan():
    nan = ranked(*[float("nan")] * 4)
    assert nan.item() != nan.item()


def test_repr_shows_every_rank():
    text = repr(ranked(5, 6, 7, 8))
    for rank, number in enumerate((5, 6, 7, 8)):
        assert f"rank {rank}: tensor({number})" in text


# -- writing ---------------------------------------------------------------------------------


def test_each_rank_is_written():
    x = ranked([1.0], [2.0], [3.0], [4.0])
    assert x.add_(ranked([10.0], [20.0], [30.0], [40.0])) is x
    assert per_rank(x) == [[11], [22], [33], [44]]
    x[0] = 7.0
    assert per_rank(x) == [[7]] * 4


def test_a_shared_value_is_written_once():
    plain = torch.zeros(2)
    shared = LocalTensor.per_rank(lambda rank: plain)
    shared.add_(1)
    assert plain.tolist() == [1, 1]
    shared.add_(LocalTensor.per_rank(lambda rank: torch.ones(2)))
    assert plain.tolist() == [2, 2]
    assert per_rank(shared) == [[2, 2]] * 4


def test_ranks_may_share_in_groups():
    halves = [torch.zeros(1), torch.zeros(1)]
    shared = LocalTensor.per_rank(lambda rank: halves[rank // 2])
    shared.add_(ranked([1.0], [1.0], [5.0], [5.0]))
    assert [h.item() for h in halves] == [1, 5]


def test_different_writes_to_a_shared_value_are_refused():
    plain = torch.zeros(1)
    shared = LocalTensor.per_rank(lambda rank: plain)
    with pytest.raises(RankMismatchError, match=r"add_.*rank"):
        shared.add_(ranked([1.0], [1.0], [2.0], [1.0]))


def test_different_writes_to_a_plain_tensor_are_refused():
    plain = torch.zeros(1)
    with pytest.raises(RankMismatchError, match="rank"):
        plain.add_(ranked([1.0], [2.0], [3.0], [4.0]))


def test_equal_writes_to_a_plain_tensor_happen_once():
    plain = torch.zeros(1)
    plain.add_(ranked([2.0], [2.0], [2.0], [2.0]))
    assert plain.item() == 2


# -- autograd and copies ---------------------------------------------------------------------


RESIZES = {
    "addbmm_": lambda x, a, b: x.addbmm_(a, b),
    "out": lambda x, a, b: torch.addbmm(x.new_ones(()), a, b, out=x.resize_(0)),
    "resize_": lambda x, a, b: x.resize_(1, 1).resize_(3, 5).fill_(2).mul_(a[0, 0, 0]),
}


@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize("resize", RESIZES.values(), ids=RESIZES)
def test_what_torch_resizes_has_its_new_sizes(resize, shape):
    """Steps that torch takes below Python (`flatten`, gradients) read the new sizes too."""
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)

    def run(x):
        resize(x, a, b)
        weight = torch.ones_like(x).requires_grad_()
        (x * weight).sum().backward()
        return x, x.t(), x.flatten(), x.expand(2, 3, 5), weight.grad

    values = [torch.full(shape, float(rank)) for rank in range(4)]
    found = run(LocalTensor.per_rank(lambda rank: values[rank].clone()))
    for rank, value in enumerate(values):
        for ours, alone in zip(found, run(value.clone()), strict=True):
            torch.testing.assert_close(ours.on_rank(rank), alone)


def test_what_torch_resizes_to_other_sizes_on_each_rank():
    x = ranked([1.0], [1.0], [1.0], [1.0])
    x.addbmm_(LocalTensor.per_rank(lambda rank: torch.ones(2, 1 + rank, 4)), torch.ones(2, 4, 5))
    assert [x.on_rank(rank).shape for rank in x.ranks] == [(1 + rank, 5) for rank in range(4)]
    assert per_rank(x.sum(1)) == [[45.0] * (1 + rank) for rank in range(4)]
    assert per_rank(x.reshape(-1).sum(0)) == [45.0 * (1 + rank) for rank in range(4)]
    with pytest.raises(RankMismatchError, match="shape"):
        len(x)


def test_gradients_of_what_torch_resizes():
    def gradient(x):
        x.requires_grad_()
        (x * 1).addbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)).sum().backward()
        return x.grad

    found = gradient(ranked(*[[[2.0]]] * 4))
    assert per_rank(found) == [gradient(torch.ones(1, 1)).tolist()] * 4 == [[[15.0]]] * 4


def test_gradients_are_per_rank():
    x = ranked([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]).requires_grad_()
    (x * x).sum().backward()
    assert isinstance(x.grad, LocalTensor)
    assert per_rank(x.grad) == [[2, 4], [6, 8], [10, 12], [14, 16]]


@pytest.mark.parametrize("sizes", [(3, 2, 1, 0), (0, 1, 2, 3), (2, 2, 2, 1)], ids=str)
def test_gradients_of_uneven_parts(sizes):
    x = LocalTensor.per_rank(lambda rank: torch.full((sizes[rank],), 2.0)).requires_grad_()
    (x**3).sum().backward()
    assert per_rank(x.grad) == [[12.0] * size for size in sizes]


@pytest.mark.parametrize(
    "turn",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(1),
        lambda x: x.unsqueeze_(0).squeeze_(),
        lambda x: x.as_strided_((3,), (1,)),
    ],
    ids=["t_", "unsqueeze_", "squeeze_", "as_strided_"],
)
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (4, 3, 2, 5)], ids=str)
def test_gradients_through_a_view_in_place(turn, sizes):
    """Autograd reads the new sizes in C++, where `matmul` and `quantile` turn tensors, too."""
    values = [torch.randn(3, size) for size in sizes]
    factors = [value.clone().requires_grad_() for value in values]
    for value, factor in zip(values, factors, strict=True):
        turn(value * factor).square().sum().backward()
    factor = LocalTensor.per_rank(lambda rank: values[rank].clone()).requires_grad_()
    turn(LocalTensor.per_rank(values.__getitem__) * factor).square().sum().backward()
    for rank, alone in enumerate(factors):
        torch.testing.assert_close(factor.grad.on_rank(rank), alone.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("batch_first", [False, True], ids=["steps", "batch"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_starts_from_zeros_of_each_rank(kind, batch_first, dtype):
    layer = kind(6, 4, num_layers=2, bidirectional=True, batch_first=batch_first, dtype=dtype)
    check_on_every_rank(layer, lambda x: layer(x)[0], (5, 3, 6), dtype)


@pytest.mark.parametrize("lengths", [[5, 3, 2], [2, 5, 3]], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_of_packed_sequences(kind, lengths):
    layer = kind(6, 4, bidirectional=True)

    def run(x):
        packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        outputs, ends = layer(packed)
        padded, found = rnn.pad_packed_sequence(outputs, padding_value=0.5, total_length=6)
        assert found.tolist() == lengths
        return padded + (ends if torch.is_tensor(ends) else ends[1]).sum()

    check_on_every_rank(layer, run, (5, 3, 6), torch.float32)


def check_on_every_rank(layer, run, shape, dtype):
    """Each rank's result and gradients are those of its own tensor alone."""
    values = [torch.randn(shape, dtype=dtype) for _ in range(4)]
    expected = []
    for value in values:
        y = run(value.requires_grad_())
        expected.append([y.detach(), *gradients(layer, y, value)])
    x = LocalTensor.per_rank(lambda rank: values[rank].detach()).requires_grad_()
    y = run(x)
    found = [y.detach(), *gradients(layer, y, x)]
    for rank in range(4):
        for ours, alone in zip(found, expected[rank], strict=True):
            torch.testing.assert_close(ours.on_rank(rank), alone)


def gradients(layer, y, x):
    return torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no linear_cross_entropy"
)
@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (3, 4, 5, 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("batch_chunk_size", [3, 2], ids=["one", "two"])
def test_linear_cross_entropy_in_chunks(reduction, sizes, batch_chunk_size):
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=batch_chunk_size)
    weight = torch.randn(6, 3)
    values = [torch.randn(size, 3) for size in sizes]
    labels = [torch.randint(6, (size,)) for size in sizes]
    scales = [torch.tensor(1.0 + rank) for rank in range(4)]

    def gradients_of(x, target, scale):
        inputs = [x.detach().requires_grad_(), weight.clone().requires_grad_()]
        loss = F.linear_cross_entropy(*inputs, target, reduction=reduction, options=options)
        return loss.detach(), *torch.autograd.grad((loss * scale).sum(), inputs)

    found = gradients_of(*(LocalTensor.per_rank(x.__getitem__) for x in (values, labels, scales)))
    for rank, inputs in enumerate(zip(values, labels, scales, strict=True)):
        for ours, alone in zip(found, gradients_of(*inputs), strict=True):
            torch.testing.assert_close(ours.on_rank(rank), alone)


def test_a_tensor_is_split_where_all_ranks_say():
    x = LocalTensor.per_rank(lambda rank: torch.arange(5) + rank)
    parts = torch.tensor_split(x, ranked(*[[1, 3]] * 4))
    assert per_rank(parts[1]) == [[1, 2], [2, 3], [3, 4], [4, 5]]
    with pytest.raises(RankMismatchError, match="the ranks differ"):
        torch.tensor_split(x, ranked([1], [2], [1], [1]))


def test_a_module_runs_on_every_rank():
    layer = torch.nn.Linear(2, 1)
    x = LocalTensor.per_rank(lambda rank: torch.full((1, 2), float(rank)))
    y = layer(x)
    for rank in range(4):
        assert torch.equal(y.on_rank(rank), layer(torch.full((1, 2), float(rank))))


def test_it_is_saved_and_loaded_without_running_code(tmp_path):
    """As the plain tensor is that `to_local()` gives in a process."""
    x = torch.nn.Parameter(ranked([1.0], [1.0, 2.0], [3.0], [4.0]))
    x.label = "a"
    torch.save({"x": x}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")["x"]
    assert isinstance(loaded, torch.nn.Parameter)
    assert (loaded.label, per_rank(loaded)) == ("a", [[1], [1, 2], [3], [4]])
    assert per_rank((loaded * 2).detach()) == [[2], [2, 4], [6], [8]]


def test_what_reads_memory_without_an_op():
    """Torch would end the process, as the wrapper has none."""
    x, same = ranked([1.0], [2.0], [3.0], [4.0]), ranked([1.0], [1.0], [1.0], [1.0])
    assert x.apply_(lambda value: value + 1) is x
    assert x.share_memory_() is x
    assert per_rank(x) == [[2], [3], [4], [5]]
    assert all(x.on_rank(rank).is_shared() for rank in range(4))
    assert torch.equal(torch.from_dlpack(same), torch.ones(1))
    with pytest.raises(RankMismatchError, match="one tensor"):
        torch.from_dlpack(x)


def test_a_number_of_results_that_differs_names_the_ranks():
    x = LocalTensor.per_rank(lambda rank: torch.ones(1 + rank % 2))
    with pytest.raises(RankMismatchError, match=r"number of results.*rank 0 has 1; rank 1 has 2"):
        x.split(1)


def test_a_deep_copy_is_apart():
    x = ranked([1.0], [2.0], [3.0], [4.0]).requires_grad_()
    twin = copy.deepcopy(x)
    assert twin.requires_grad
    with torch.no_grad():
        twin.zero_()
    assert per_rank(x) == [[1], [2], [3], [4]]
    assert per_rank(twin) == [[0]] * 4


def test_a_deep_copy_is_what_torch_copies():
    """A parameter stays one, and attributes come along; so does a gradient, but not a parameter's.

    A result is refused.
    """
    x = ranked([1.0], [2.0], [3.0], [4.0]).requires_grad_()
    (x * 2).sum().backward()
    twin = copy.deepcopy(x)
    assert per_rank(twin.grad) == [[2]] * 4
    assert twin.grad is not x.grad
    x = torch.nn.Parameter(x.detach())
    (x * 2).sum().backward()
    x.label = ["a"]
    twin = copy.deepcopy(x)
    assert isinstance(twin, torch.nn.Parameter)
    assert twin.grad is None
    assert twin.label == ["a"]
    assert twin.label is not x.label
    with pytest.raises(LeafError, match="detach"):
        copy.deepcopy(x * 2)


@pytest.mark.parametrize("sizes", [(3, 0), (1, 4)], ids=str)
def test_strides_that_nothing_uses_may_differ(sizes):
    """Those of a dim of one entry, and of a tensor without any."""
    with simulate(2):
        x = LocalTensor.per_rank(
            lambda rank: torch.ones(5, 8)[: sizes[0], : sizes[1]].as_strided(sizes, (8 + rank, 1))
        )
        assert x.requires_grad_().sum().backward() is None
        assert x.grad.shape == sizes
        assert x.stride(1) == 1
        compiled = torch.compile(lambda x: x * 2, backend="aot_eager")
        assert compiled(x.detach()).shape == sizes
