"""Views of DTensors that enter a compiled region."""

import pytest
import torch
from by_hand import value
from compiling import compiled

from shardwise import Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)

VIEWS = {
    "tail": lambda x: x[:, 1:],
    "head": lambda x: x[:, :-1],
    "rows": lambda x: x[2:],
    "strided": lambda x: x[:, ::2],
    "narrow": lambda x: x.narrow(1, 1, 3),
    "diagonal": lambda x: x.diagonal(),
    "flat": lambda x: x.flatten(),
    "expanded": lambda x: x[:, :1].expand(-1, 5),
}


# torch looks at every input, also at those that have no `grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "placement", "dynamic"),
    list(zip(VIEWS, [S0, S1, R, S0] * 2, [True, None, None, True] * 2, strict=True)),
)
def test_one_graph_serves_views_of_any_size(pair, name, placement, dynamic):
    def fn(x):
        return (x * 2).sin()

    fast, counter = compiled(fn, dynamic=dynamic)
    plain, plain_counter = compiled(fn, dynamic=dynamic)
    for rows in (19, 22, 24, 25):  # sizes that are equal at first would count as one
        x = torch.randn(rows, 7)
        laid = distribute_tensor(x, pair, [placement]).requires_grad_()
        x.requires_grad_()
        out, expected = fast(VIEWS[name](laid)), plain(VIEWS[name](x))
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(value(out.detach()), expected.detach())
        torch.testing.assert_close(value(laid.grad), x.grad)
    # Whether a merged dim divides by the mesh is one graph more than plain tensors need.
    assert counter.frame_count <= plain_counter.frame_count + (name == "flat")


def test_two_views_of_one_tensor(pair):
    """As a language model has them: what is known, and what comes next."""

    def loss(known, wanted):
        return (known * 3 - wanted).square().sum()

    fast, counter = compiled(loss)
    for rows, columns in ((6, 7), (8, 9), (9, 12)):
        x = torch.randn(rows, columns)
        laid = distribute_tensor(x, pair, [S0])
        found = fast(laid[:, :-1], laid[:, 1:])
        torch.testing.assert_close(value(found), loss(x[:, :-1], x[:, 1:]))
    assert counter.frame_count == 2


def test_a_view_is_written_to(pair):
    def write(view):
        view.mul_(2)
        return view + 1

    fast, _ = compiled(write)
    for rows in (6, 8):
        x = torch.randn(rows, 7)
        laid = distribute_tensor(x, pair, [S0])
        fast(laid[:, 1:])
        x[:, 1:] *= 2
        torch.testing.assert_close(value(laid), x)


def test_a_tensor_is_not_written_beside_its_view(pair):
    """torch takes no such inputs for subclasses, and says so."""

    def write(x, view):
        x.add_(1)
        return view * 2

    laid = distribute_tensor(torch.randn(6, 7), pair, [S0])
    with pytest.raises(Exception, match="aliased inputs that are mutated"):
        compiled(write)[0](laid, laid[:, 1:])
