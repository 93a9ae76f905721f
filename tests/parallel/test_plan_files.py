"""Plans as words, tables and files, and a look at them before anything changes."""

import re

import pytest
import torch
from parallel_models import Block, Mixture, TiedLM, assert_trains_alike
from torch import nn

import shardwise
from shardwise import ArgumentError, LayoutError, Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    check_plan,
    load_plan,
    parallelize_module,
    save_plan,
)
from shardwise.parallel.resolve import WORDS, entry_of, style_of


def pairs(*shape, num=2):
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(num)]


STYLES = [
    ColwiseParallel(),
    ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
    RowwiseParallel(input_layouts=Shard(1, sizes=(3, 0, 1))),
    SequenceParallel(sequence_dim=2),
    PrepareModuleInput(
        input_layouts=(Shard(0), None),
        desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"mask": Shard(1)},
        desired_input_kwarg_layouts={"mask": Replicate()},
    ),
    PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()),
    PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
        use_local_output=False,
    ),
]


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_plan_comes_back_from_a_file(tmp_path, suffix):
    plan = {f'layers.*."{number}"\n.é': style for number, style in enumerate(STYLES)}
    plan |= {word: word for word in WORDS}
    file = tmp_path / f"plan.{suffix}"
    save_plan(plan, file)
    loaded = load_plan(file)
    assert list(loaded) == list(plan)
    for pattern, style in loaded.items():
        assert type(style) is type(style_of(plan[pattern], ""))
        assert entry_of(style, "") == entry_of(plan[pattern], "")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_words_are_kept_in_files(tmp_path):
    file = tmp_path / "plan.toml"
    save_plan({"a": RowwiseParallel(input_layouts=Replicate()), "b": "colwise"}, file)
    assert '"a" = "rowwise_rep"\n"b" = "colwise"\n' in file.read_text()


def test_a_word_with_options():
    style = style_of({"style": "colwise_rep", "use_local_output": False}, "x")
    assert isinstance(style, ColwiseParallel)
    assert (style.output_layouts, style.use_local_output) == (Replicate(), False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('format = "other"', "does not say format"),
        ('format = "shardwise plan 1"', "should hold format and modules"),
        ("format = ", "cannot be read as TOML"),
        ('format = "shardwise plan 1"\n[modules]\na = 3', "'a' has 3"),
        ('format = "shardwise plan 1"\n[modules]\na = "columnwise"', "'columnwise' for 'a'"),
        ('format = "shardwise plan 1"\n[modules]\na = {style = "colwise", dim = 1}', "'dim'"),
        (
            'format = "shardwise plan 1"\n[modules]\na = {style = "colwise", input_layouts = "S"}',
            "'S' is not a placement",
        ),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises((LayoutError, ArgumentError), match=message):
        load_plan(file)


def test_what_cannot_be_saved(tmp_path):
    class Own(ParallelStyle):
        def _apply(self, module, device_mesh):
            return module

    with pytest.raises(ArgumentError, match="'x' has the style Own"):
        save_plan({"x": Own()}, tmp_path / "plan.toml")
    with pytest.raises(ArgumentError, match=r"ends in \.toml or \.json"):
        save_plan({"x": "colwise"}, tmp_path / "plan.yaml")
    assert not list(tmp_path.iterdir())


def test_a_file_trains_a_model(mesh, tmp_path):
    file = tmp_path / "plan.json"
    save_plan({"embed": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}, file)

    def loss_of(model, ids, target):
        return torch.nn.functional.cross_entropy(model(ids), target)

    batches = [(torch.randint(11, (6,)), torch.randint(11, (6,))) for _ in range(2)]
    assert_trains_alike(TiedLM(), mesh, load_plan(file), batches, loss_of)


def test_report_counts_what_ranks_will_hold(mesh):
    plan = {"norm?": "sequence_parallel", "mlp.up": "colwise", "mlp.down": "rowwise"}
    with torch.device("meta"):
        report = check_plan(Block(hidden=10), plan, mesh)
    assert not report.mistakes
    assert report.sharded["mlp.up.weight"] == Shard(0)
    assert report.replicated[-1] == "mlp.down.bias"
    assert "attention.q.weight" in report.untouched
    model = parallelize_module(Block(hidden=10), mesh, plan)
    for rank, expected in enumerate(report.bytes_per_rank):
        held = 0
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, shardwise.DTensor) else parameter
            part = local.on_rank(rank) if isinstance(local, shardwise.LocalTensor) else local
            held += part.numel() * 4
        assert held == expected, f"rank {rank}"


def test_report_lists_all_mistakes():
    plan = {"mlp": "colwise", "norm1": "rowwise", "mlp.upp": "colwise", "mlp.down": "rowwise"}
    report = check_plan(Block(), plan, 4)
    assert len(report.mistakes) == 3
    assert "did you mean 'mlp.up'" in report.mistakes[-1]
    assert list(report.sharded) == ["mlp.down.weight"]


def test_report_doubts_plain_parameters_between_parallel_layers():
    """Norms of each head stand between; those of the block do not."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)
            self.q_norm, self.scale = nn.LayerNorm(2), nn.Parameter(torch.ones(4))

    model = nn.ModuleDict({"norm": nn.LayerNorm(8), "attention": Attention()})
    plan = {"attention.q": "colwise", "attention.o": "rowwise"}
    report = check_plan(model, plan, 4)
    assert not report.mistakes
    names = ["attention.scale", "attention.q_norm.weight", "attention.q_norm.bias"]
    assert [doubt.split("'")[1] for doubt in report.doubts] == names
    assert "doubt        'attention.scale' is plain and stands beside 'attention.q'" in str(report)
    plan["attention.q_norm"] = "replicated_with_grad_allreduce"
    assert len(check_plan(model, plan, 4).doubts) == 1
    for whole in ({"attention.q": "colwise_rep"}, {"attention.o": "rowwise_rep"}):
        assert not check_plan(model, plan | whole, 4).doubts


EXPERTS_PLAN = {
    "router": "ep_router",
    "experts": "ep_dispatch_experts",
    "experts.up": "grouped_gemm",
    "experts.down": "grouped_gemm",
}


PACKED_PLAN = {
    "experts": "moe_tp_experts",
    "experts.up": "packed_colwise",
    "experts.down": "rowwise",
}


#: As transformers 5.0 writes it.
OLD_PLAN = {
    "router": "ep_router",
    "experts.up": "local_rowwise",
    "experts.down": "local_colwise",
    "experts": "gather",
}


@pytest.mark.parametrize("plan", [EXPERTS_PLAN, PACKED_PLAN, OLD_PLAN])
def test_experts_by_hugging_faces_words(mesh, plan):
    assert_trains_alike(Mixture(), mesh, plan, pairs(10, 8))
    model = parallelize_module(Mixture(), mesh, plan, strict=True)
    assert model.experts.up.placements == (Shard(0),)
    assert not isinstance(model.router.weight, shardwise.DTensor)


def test_a_router_whose_experts_the_plan_leaves_out(mesh):
    model = parallelize_module(Mixture(), mesh, {"router": "ep_router"})
    assert not isinstance(model.router.weight, shardwise.DTensor)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"router": "gather"}, "'gather' for 'router'.*rowwise"),
        ({"router": "packed_colwise"}, "'packed_colwise' for 'router'.*base_model_ep_plan"),
        ({"experts": "moe_tp_experts", "experts.up": "replicate"}, "'moe_tp_experts' for"),
        ({"router": "all_reduce"}, "'all_reduce' for 'router'"),
    ],
)
def test_words_without_a_counterpart(mesh, change, said):
    """Each is a mistake of its own in a report, and an error when the plan is applied."""
    plan = EXPERTS_PLAN | change
    report = check_plan(Mixture(), plan, 4)
    assert any(re.search(said, mistake) for mistake in report.mistakes)
    with pytest.raises(ArgumentError, match="no counterpart here"):
        parallelize_module(Mixture(), mesh, plan)


def test_shared_columns_of_unknown_width(mesh):
    words = "Module 'router': .* the module around it has no 'qk_rope_head_dim'"
    with pytest.raises(ArgumentError, match=words):
        parallelize_module(Mixture(), mesh, {"router": "mla_kv_a_proj"})


def test_report_needs_no_world():
    report = check_plan(nn.Linear(4, 4), "colwise", 2)
    assert report.bytes_per_rank == (40, 40)
    with pytest.raises(LayoutError):
        check_plan(nn.Linear(4, 4), "colwise", 0)


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_name_may_have_any_characters(tmp_path, kind):
    """TOML takes no halves of a character beyond 16 bits, as JSON does, and no unescaped DEL."""
    plan = {'layers.\U0001f600.\x7f"\\\n': "colwise", "größe": "rowwise"}
    save_plan(plan, tmp_path / f"plan.{kind}")
    assert list(load_plan(tmp_path / f"plan.{kind}")) == list(plan)
