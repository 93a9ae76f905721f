"""Kernels behind the seam agree with each other, and with a loop over ids."""

import copy
import os
import pickle
import shutil

import embedding_cases as cases
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from shardwise.embedding import SGD, Adagrad, Adam, Query, RowUpdate, RowWiseAdagrad, Runs
from shardwise.embedding.stacks import states_like
from shardwise.errors import ArgumentError
from shardwise.lookup.backends import compiled, registry, torch_kernels
from shardwise.lookup.backends import torch_kernels as module
from shardwise.lookup.backends.registry import make_backend
from shardwise.lookup.ids import sorted_pairs

OPTIMIZERS = [SGD(0.1), Adagrad(0.1), Adam(0.1), RowWiseAdagrad(0.1)]
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
DECAYING = [type(optimizer)(0.1, weight_decay=0.2) for optimizer in OPTIMIZERS]


def backend_or_skip(name):
    if name == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    if name == "compiled" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    return make_backend(name)


def query(weighted=False, pooled=True, runs=True):
    """Two tables of 6 and 4 rows in a stack; three bags for each, from two ranks."""
    ids = torch.tensor([5, 0, 5, 3, 7, 9, 0, 1, 0, 8, 8, 6], dtype=torch.int32)
    lengths = torch.tensor([3, 1, 1, 1, 0, 3, 2, 1], dtype=torch.int32)
    tables = Runs(np.array([[2, 2], [2, 2]]), np.array([0, 6]), np.array([6, 4]))
    return Query(
        ids,
        lengths if pooled else None,
        torch.linspace(-1, 2, len(ids)) if weighted else None,
        tables if pooled and runs else None,
    )


def bags_of(asked):
    if asked.lengths is None:
        return list(range(len(asked.ids)))
    return torch.repeat_interleave(torch.arange(len(asked.lengths)), asked.lengths).tolist()


def by_hand(weight, asked, grad):
    """Lookups and the gradient of the weight, id by id."""
    out = torch.zeros(asked.num_bags, weight.shape[1])
    of_weight = torch.zeros_like(weight)
    for number, (row, bag) in enumerate(zip(asked.ids.tolist(), bags_of(asked), strict=True)):
        factor = 1.0 if asked.weights is None else float(asked.weights[number])
        out[bag] += factor * weight[row]
        of_weight[row] += factor * grad[bag]
    return out, of_weight


@pytest.mark.parametrize("name", ["torch", "fbgemm"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_lookups_and_gradients(name, weighted, pooled):
    backend, asked = backend_or_skip(name), query(weighted, pooled)
    weight, grad = torch.randn(10, 4), torch.randn(asked.num_bags, 4)
    out, of_weight = by_hand(weight, asked, grad)
    assert_close(backend.look_up(weight, asked), out)
    rows, values = backend.row_gradient(weight, asked, grad)
    assert rows.tolist() == sorted(set(asked.ids.tolist()))
    assert_close(torch.zeros(10, 4).index_copy_(0, rows, values), of_weight)


@pytest.mark.parametrize("name", ["torch", "fbgemm", "compiled"])
@each_optimizer
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("product", "at_a_time"), [(0, 1), (8, 1), (8, 99)])
def test_updates(monkeypatch, name, optimizer, weighted, pooled, product, at_a_time):
    """All ways of updating give what the optimizer makes of the gradient by hand."""
    backend, asked = backend_or_skip(name), query(weighted, pooled)
    monkeypatch.setattr(module, "_ROWS_PER_ID", product)
    monkeypatch.setattr(module, "_CHUNK_NUMBERS", 8)
    monkeypatch.setattr(torch_kernels, "_PART_IDS", at_a_time)
    weight, grad = torch.randn(10, 4), torch.randn(asked.num_bags, 4)
    expected = weight.clone()
    _, of_weight = by_hand(weight, asked, grad)
    names = optimizer.states
    states = [
        {key: torch.zeros(10) if per_row else torch.zeros(10, 4) for key, per_row in names.items()}
        for _ in range(2)
    ]
    rows = torch.tensor(sorted(set(asked.ids.tolist())))
    for step in (1, 2):
        backend.update(weight, asked, grad.clone(), RowUpdate(optimizer, states[0], step))
        RowUpdate(optimizer, states[1], step).apply(expected, rows, of_weight[rows].clone())
    assert_close(weight, expected)
    for key in names:
        assert_close(states[0][key], states[1][key])


@pytest.mark.parametrize("name", ["torch", "fbgemm", "compiled", "auto"])
@pytest.mark.parametrize("optimizer", DECAYING, ids=lambda o: type(o).__name__)
def test_rows_that_were_looked_up_decay(name, optimizer):
    """As without decay, with its share added to the gradient by hand; other rows rest."""
    backend, asked = backend_or_skip(name), query()
    weight, grad = torch.randn(10, 32), torch.randn(asked.num_bags, 32)
    before, expected = weight.clone(), weight.clone()
    _, of_weight = by_hand(weight, asked, grad)
    rows = torch.tensor(sorted(set(asked.ids.tolist())))
    shapes = {key: (10,) if per_row else (10, 32) for key, per_row in optimizer.states.items()}
    mine, theirs = ({key: torch.zeros(shape) for key, shape in shapes.items()} for _ in range(2))
    backend.update(weight, asked, grad, RowUpdate(optimizer, mine, 1))
    plain = type(optimizer)(0.1)
    decayed = of_weight[rows] + 0.2 * before[rows]
    RowUpdate(plain, theirs, 1).apply(expected, rows, decayed)
    assert_close(weight, expected)
    assert_close(mine, theirs)
    others = [row for row in range(10) if row not in rows.tolist()]
    assert torch.equal(weight[others], before[others])


@each_optimizer
def test_a_query_of_nothing(optimizer):
    backend = make_backend("torch")
    nothing = Query(torch.empty(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), None)
    weight = torch.randn(10, 4)
    before = weight.clone()
    collection = cases.make(tables=[cases.Table("t", 10, 4)], optimizer=optimizer)
    state = states_like(collection._engine.stacks, optimizer.states)[0][0]
    backend.update(weight, nothing, torch.randn(3, 4), RowUpdate(optimizer, state, 1))
    assert torch.equal(weight, before)
    assert torch.equal(backend.look_up(weight, nothing), torch.zeros(3, 4))


def test_tables_are_sorted_one_after_another(monkeypatch):
    """With a part for each table; every row once, in order, with the bags that looked it up."""
    monkeypatch.setattr(torch_kernels, "_PART_IDS", 1)
    asked = query()
    [(*_, at_once)] = _sorted(query(runs=False))
    parts = _sorted(asked)
    assert [(first, last) for first, last, _ in parts] == [(0, 6), (6, 10)]
    for name in ("rows", "bags"):
        found = [
            number + (first if name == "rows" else 0)
            for first, _, looked_up in parts
            for number in getattr(looked_up, name).tolist()
        ]
        assert found == getattr(at_once, name).tolist()


def _sorted(asked):
    return [(p.first_row, p.last_row, p.by_row(asked)) for p in torch_kernels.in_parts(asked, 10)]


def test_a_table_with_several_features_is_in_one_part(monkeypatch):
    monkeypatch.setattr(torch_kernels, "_PART_IDS", 1)
    runs = Runs(np.array([[1, 1, 1]]), np.array([0, 0, 5]), np.array([5, 5, 5]))
    lengths = torch.tensor([2, 1, 1], dtype=torch.int32)
    asked = Query(torch.tensor([1, 2, 1, 7], dtype=torch.int32), lengths, None, runs)
    assert [(first, last) for first, last, _ in _sorted(asked)] == [(0, 5), (5, 10)]


def test_a_backend_of_ones_own(mesh):
    class Counting(type(make_backend("torch"))):
        name = "counting"
        lookups = 0

        def look_up(self, weight, asked):
            Counting.lookups += 1
            return super().look_up(weight, asked)

    collection = cases.make(backend=Counting()).shard(mesh, "row_wise")
    collection(cases.batch(0))
    # Three widths of tables on the first three ranks; the last has rows of one width only.
    assert Counting.lookups == 3 * 3 + 1


def test_fbgemm_that_is_not_there(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fbgemm_gpu", None)
    with pytest.raises(ArgumentError, match="pip install fbgemm-gpu-cpu"):
        make_backend("fbgemm")


@pytest.mark.parametrize("width", [1, 3, 16, 32, 33, 64, 100, 128, 300])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("counting", [0, 8])
def test_the_compiled_kernel_of_any_width(monkeypatch, width, weighted, counting):
    backend = backend_or_skip("compiled")
    monkeypatch.setattr(compiled, "_ROWS_PER_ID", counting)
    draw = torch.Generator().manual_seed(width)
    ids = torch.randint(40, (600,), generator=draw)
    lengths = torch.full((100,), 6)
    weights = torch.rand(600, generator=draw, dtype=torch.float64) if weighted else None
    weight, grad = (torch.randn(n, width, generator=draw) for n in (50, 100))
    results = []
    for each in (backend, make_backend("torch")):
        changed, state = weight.clone(), {"sum": torch.rand(50, generator=draw.manual_seed(1))}
        rule = RowUpdate(RowWiseAdagrad(0.1), state, 1)
        each.update(changed, Query(ids, lengths, weights), grad, rule)
        results.append((changed, state["sum"]))
    assert_close(*results)
    assert torch.equal(results[0][0][40:], weight[40:])  # rows that nobody looked up


def test_counting_sorts_as_torch_does():
    backend_or_skip("compiled")
    for num, rows in ((0, 0), (1, 1), (500, 7), (500, 3000)):
        ids = torch.randint(max(1, rows), (num,), generator=torch.Generator().manual_seed(num))
        asked = Query(ids.int(), None, None)
        [part] = torch_kernels.in_parts(asked, rows)
        found = compiled._by_row(part, asked)
        expected = torch.sort(ids, stable=True)
        assert found.ids.tolist() == expected.values.tolist()
        assert found.bags.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("most", [2**8, 2**15, 2**31, 2**40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_sort_with_their_bags(most, dtype):
    """As one number of 32 bits or of 64, or one after the other where that has too few."""
    keys = torch.randint(min(most, 2**31), (500,), generator=torch.Generator().manual_seed(0))
    keys[::3], values = 7, torch.arange(500, dtype=torch.int32) // 5
    found, theirs = sorted_pairs(keys.to(dtype), values, most, most)
    expected = torch.sort(keys, stable=True)
    assert torch.equal(found, expected.values.to(dtype))
    assert torch.equal(theirs, values[expected.indices])


def test_the_compiled_kernel_leaves_what_it_has_not_to_torch():
    backend, asked = backend_or_skip("compiled"), query()
    for make in (
        lambda: (torch.ones(10, 4, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)),
        lambda: (torch.ones(10, 4, dtype=torch.bfloat16), torch.zeros(10)),
        lambda: (torch.ones(4, 10).T, torch.zeros(10)),
    ):
        results = []
        for each in (backend, make_backend("torch")):
            weight, state = make()
            grad = torch.ones(8, 4, dtype=weight.dtype)
            each.update(weight, asked, grad, RowUpdate(RowWiseAdagrad(0.1), {"sum": state}, 1))
            results.append((weight, state))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_a_compiled_update_shows_autograd_that_rows_changed():
    weight = torch.ones(10, 4)
    backend = backend_or_skip("compiled")
    before = weight._version
    rule = RowUpdate(RowWiseAdagrad(0.1), {"sum": torch.zeros(10)}, 1)
    backend.update(weight, query(), torch.ones(8, 4), rule)
    assert weight._version > before


@pytest.fixture
def compile_anew(monkeypatch):
    monkeypatch.setattr(compiled, "_kernels", compiled._kernels.__wrapped__)
    monkeypatch.delenv("CC", raising=False)
    return monkeypatch


def test_compilers_that_are_not_there_or_fail(compile_anew, tmp_path):
    compile_anew.setenv("PATH", str(tmp_path))
    with pytest.raises(ArgumentError, match="found none of cc, gcc and clang"):
        make_backend("compiled")
    compile_anew.setenv("CC", "not-there -O1")
    with pytest.raises(ArgumentError, match=r"not-there -O1 did not compile .*No such file"):
        make_backend("compiled")
    for name, does, timeout_s, said in (
        (
            "failing",
            "echo no such option >&2; exit 1",
            60,
            r"no such option\. Set CC to a C compiler",
        ),
        ("slow", "exec /bin/sleep 9", 0.2, "slow did not compile .* timed out"),
    ):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n{does}\n")
        script.chmod(0o755)
        compile_anew.setenv("CC", str(script))
        compile_anew.setattr(compiled, "_TIMEOUT_S", timeout_s)
        with pytest.raises(ArgumentError, match=said):
            make_backend("compiled")


@pytest.mark.parametrize("has_compiler", [False, True])
def test_large_batches_are_compiled_where_there_is_a_compiler(compile_anew, has_compiler):
    if has_compiler:
        backend_or_skip("compiled")
    else:
        compile_anew.setenv("PATH", os.devnull)
    compile_anew.setattr(registry, "_COMPILE_FROM", 12)
    compile_anew.setattr(torch, "get_num_threads", lambda: 1)
    chosen = make_backend("auto")
    chosen._has_fbgemm = has_compiler  # which is the second choice
    updates = []
    at = compiled.CompiledBackend.update
    compile_anew.setattr(
        compiled.CompiledBackend, "update", lambda *args: (updates.append(args), at(*args))
    )
    results = []
    for each in (chosen, copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen))):
        weight, state = torch.ones(10, 32), {"sum": torch.zeros(10)}
        each.update(weight, query(), torch.ones(8, 32), RowUpdate(RowWiseAdagrad(0.1), state, 1))
        results.append(weight)
    assert len(updates) == 3 * has_compiler
    assert_close(results[1:], results[:1] * 2)
    chosen._has_fbgemm = False
    # Not narrow rows or other optimizers.
    chosen.update(
        torch.ones(10, 8), query(), torch.ones(8, 8), RowUpdate(RowWiseAdagrad(0.1), state, 2)
    )
    chosen.update(weight, query(), torch.ones(8, 32), RowUpdate(SGD(0.1), {}, 2))
    assert len(updates) == 3 * has_compiler
    # A small batch does not start the compiler, but uses what is compiled.
    compile_anew.setattr(registry, "_COMPILE_FROM", 13)
    other = make_backend("auto")
    other._has_fbgemm = False
    for each in (other, chosen):
        each.update(weight, query(), torch.ones(8, 32), RowUpdate(RowWiseAdagrad(0.1), state, 2))
    assert len(updates) == 4 * has_compiler
    # With many threads torch's kernels share the work; the compiled one runs in one.
    compile_anew.setattr(torch, "get_num_threads", lambda: 16)
    chosen.update(weight, query(), torch.ones(8, 32), RowUpdate(RowWiseAdagrad(0.1), state, 2))
    assert len(updates) == 4 * has_compiler


def test_the_backend_that_chooses_agrees_with_torch():
    """Rows wide enough for fbgemm's update, where it is installed."""
    asked, weight, grad = query(), torch.randn(10, 32), torch.randn(8, 32)
    results = []
    for name in ("auto", "torch"):
        changed, state = weight.clone(), {"sum": torch.zeros(10)}
        make_backend(name).update(changed, asked, grad, RowUpdate(RowWiseAdagrad(0.1), state, 1))
        results.append((changed, state["sum"]))
    assert_close(*results)
