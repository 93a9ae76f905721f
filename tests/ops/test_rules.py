"""Every choice of every rule, against one device."""

import contextlib
import inspect

import pytest
import torch
from samples import (
    BY_CHANCE,
    NEVER_TAKEN,
    NOT_IN_TORCH,
    OF_FLOAT8,
    ON_GPU,
    UNCHECKED_KERNELS,
    WITHOUT_VALUES,
    samples,
)

from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.dispatch.catalog import CATALOG, find_rule, functional_twin, plain_op
from shardwise.dispatch.rule import Choice, Rule, merge, table
from shardwise.ops import random
from shardwise.ops.math.pointwise import pointwise_rule
from shardwise.ops.math.whole import GATHERED
from shardwise.testing import Sample, check_doors, check_rule, missing_choices
from shardwise.testing.rule_check import DOOR_MESHES

pytestmark = pytest.mark.slow

aten = torch.ops.aten
SAMPLES = samples()


def name(sample: Sample) -> str:
    op = plain_op(sample.op)
    shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in sample.args]
    return f"{op.__name__ if inspect.isfunction(op) else op}{shapes}".replace(" ", "")


# Torch's own words about scatter(reduce=) and index_reduce.
@pytest.mark.filterwarnings("ignore:.*reduce")
@pytest.mark.parametrize("sample", SAMPLES, ids=name)
def test_every_choice_gives_the_result_of_one_device(sample):
    report = check_rule(sample)
    assert report.num_played
    assert not report.mistakes, "\n".join(map(str, report.mistakes))


@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=lambda n: name(SAMPLES[n]))
def test_results_are_right_through_doors(number):
    """Each op on a mesh of one, two or three axes, by turns."""
    assert not check_doors(SAMPLES[number], meshes=[DOOR_MESHES[number % len(DOOR_MESHES)]])


@pytest.mark.filterwarnings("ignore:.*reduce", "ignore:.*deterministic implementation")
@pytest.mark.parametrize("sample", SAMPLES, ids=name)
def test_no_useful_choice_is_missing(sample):
    if plain_op(sample.op) in GATHERED:
        pytest.skip("the op runs whole on purpose")
    if sample.op in random.RULES:
        pytest.skip("parts that draw one after another are no world in which each rank draws")
    if plain_op(sample.op) in UNCHECKED_KERNELS:
        pytest.skip("the kernel crashes on operands that do not fit, or has too many of them")
    if sample.op is aten.view.default and 0 in sample.args[0].shape:
        pytest.skip("anything is right for a tensor without elements")
    if sample.op in BY_CHANCE:
        pytest.skip("what is right for the entries of one sample need not be right for others")
    if sample.op is aten._linalg_svd.default and sample.args[1:] == (False, False):
        pytest.skip("anything is right for results that were not asked for")
    with undefined_is_nan():
        assert not missing_choices(sample, sums=sample.op not in NEVER_TAKEN)


@contextlib.contextmanager
def undefined_is_nan():
    """New memory holds NaN: what an op leaves unwritten is not right by chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_rule_has_a_sample():
    sampled = {plain_op(s.op) for s in SAMPLES}
    without = CATALOG.keys() - sampled - WITHOUT_VALUES - ON_GPU - OF_FLOAT8 - NOT_IN_TORCH
    assert not without


def test_a_wrong_choice_is_found():
    """A rule that lets a Partial through a function that is not linear."""
    wrong = Rule(lambda call: [Choice((Partial(),), (Partial(),))], "wrong")
    report = check_rule(Sample(aten.exp.default, (torch.randn(4),)), wrong)
    assert report.mistakes


def test_a_wrong_gradient_is_found(monkeypatch):
    """Doors are what only programs go through: the choices of the rule are right."""
    sample = Sample(aten.neg.default, (torch.randn(4),))
    assert not check_doors(sample, num=4)
    read = DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda x, **o: read(x.detach() + 0 * x, **o))
    assert check_rule(sample).ok
    assert check_doors(sample, num=4)


def test_a_missing_choice_is_found():
    poor = Rule(lambda call: [Choice((Replicate(),), (Replicate(),))], "poor")
    found = missing_choices(Sample(aten.exp.default, (torch.randn(4),)), poor)
    assert "[S(0)] -> [S(0)]" in found


def _argument(argument, number):
    kind = str(argument.type)
    if kind == "Tensor":
        return torch.rand(4, 3, generator=torch.Generator().manual_seed(number)) * 0.8 + 0.1
    if kind in ("number", "float", "Optional[float]", "Optional[number]"):
        return 0.5
    return None


def _pointwise_ops():
    for packet_name in dir(aten):
        packet = getattr(aten, packet_name)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            if torch.Tag.pointwise in op.tags and not op._schema.is_mutable and pointwise_rule(op):
                yield op


def test_ops_that_torch_calls_pointwise_are_pointwise():
    """Torch's tag is not trusted either: all ops that plain float tensors can call are played."""
    wrong, played = [], 0
    for op in _pointwise_ops():
        required = [a for a in op._schema.arguments if not a.has_default_value()]
        args = tuple(_argument(a, i) for i, a in enumerate(required) if not a.kwarg_only)
        try:
            result = op(*args)
        except Exception:
            continue  # needs integers, or options that this test does not make up
        if not isinstance(result, torch.Tensor):
            continue
        played += 1
        wrong += check_rule(Sample(op, args), meshes=[(3,)]).mistakes
    assert played > 150
    assert not wrong


def test_in_place_ops_share_the_rule_of_their_twin():
    assert functional_twin(aten.add_.Tensor) is aten.add.Tensor
    assert functional_twin(aten.add.Tensor) is None
    assert functional_twin(aten.pow_.Scalar) is aten.pow.Tensor_Scalar
    assert find_rule(aten.add_.Tensor) is find_rule(aten.add.Tensor)


def test_an_op_in_two_tables_raises():
    one = table(((aten.relu.default,), Rule(lambda call: [], "")))
    with pytest.raises(ValueError, match="two families"):
        merge(one, one)
    with pytest.raises(ValueError, match="two rules"):
        table(*[((aten.relu.default,), Rule(lambda call: [], ""))] * 2)


def test_explicit_sizes_survive_a_view_that_merges_dims():
    from shardwise import distribute_tensor, init_device_mesh, simulate

    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        batch = distribute_tensor(torch.randn(5, 4, 3), mesh, [Shard(0)])
        merged = batch.view(20, 3)
        assert merged.placements == (Shard(0, sizes=(8, 8, 4, 0)),)
        assert merged.view(5, 4, 3).placements == (Shard(0),)
