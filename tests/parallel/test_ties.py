"""Parameters that several modules share: one parameter before, one parameter after."""

from copy import deepcopy

import pytest
import torch
from parallel_models import MLP, TiedLM, whole
from parity import train
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, LayoutError, Replicate, Shard, UnsupportedError
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    check_plan,
    parallelize_module,
)
from shardwise.parallel.tied import may_read

pytestmark = pytest.mark.slow


def next_token(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batches(vocabulary=11):
    return [(torch.randint(vocabulary, (3, 6)),) for _ in range(3)]


def assert_trains_like(model, reference, data, loss_of=next_token):
    expected, found = train(reference, loss_of, data), train(model, loss_of, data)
    found = [{name: mine[name] for name in one} for mine, one in zip(found, expected, strict=True)]
    torch.testing.assert_close(found, expected)


class Predictions(nn.Module):
    """A head whose decoder's bias it holds as well, as BERT's."""

    def __init__(self, width, vocabulary):
        super().__init__()
        self.decoder = nn.Linear(width, vocabulary)
        self.bias = self.decoder.bias

    def forward(self, x):
        return self.decoder(x)


class Added(Predictions):
    """The same, but the head adds the bias itself."""

    def forward(self, x):
        return self.more(self.decoder(x))

    def more(self, x):
        return x + self.bias


class LM(nn.Module):
    def __init__(self, head=Predictions):
        super().__init__()
        self.embed, self.mlp = nn.Embedding(11, 8), MLP()
        self.head = head(8, 11)
        self.head.decoder.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.mlp(self.embed(ids)))


def is_tied(model):
    head = model.head
    return head.bias is head.decoder.bias and head.decoder.weight is model.embed.weight


CALLS = {
    "the head": lambda m: [(m, {"head.decoder": "colwise_rep"})],
    "the table": lambda m: [(m, {"embed": "embedding_rowwise"})],
    "both": lambda m: [(m, {"embed": "embedding_rowwise", "head.decoder": "colwise_rep"})],
    "one after the other": lambda m: [
        (m, {"embed": "embedding_rowwise"}),
        (m, {"mlp.up": "colwise", "mlp.down": "rowwise"}),
        (m, {"head.decoder": "colwise_rep"}),
    ],
    "the head from its parent": lambda m: [(m.head, {"decoder": "colwise_rep"})],
    "the head alone": lambda m: [(m.head.decoder, "colwise_rep")],
    "each alone": lambda m: [
        (m.embed, "embedding_rowwise"),
        (m.mlp, {"up": "colwise", "down": "rowwise"}),
        (m.head.decoder, ColwiseParallel(output_layouts=Replicate())),
    ],
    "each alone, head first": lambda m: [
        (m.head.decoder, "colwise_rep"),
        (m.embed, "embedding_rowwise"),
    ],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_every_owner_holds_the_same_parameter(mesh, calls):
    model = LM()
    reference = deepcopy(model)
    for module, plan in calls(model):
        parallelize_module(module, mesh, plan)
        assert is_tied(model)
    assert model.head.bias.placements == (Shard(0),)
    assert_trains_like(model, reference, batches())
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    restored = LM()
    restored.load_state_dict(state)
    (ids,) = batches()[0]
    torch.testing.assert_close(next_token(restored, ids), whole(next_token(model, ids)))


def assert_untouched(model):
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("calls", [CALLS["the head"], CALLS["the table"], CALLS["the head alone"]])
def test_an_owner_that_uses_it_itself_is_named_before_anything_is_changed(mesh, calls):
    model = LM(Added)
    ((module, plan),) = calls(model)
    with pytest.raises(UnsupportedError, match="Added uses it as a plain tensor in its own code"):
        parallelize_module(module, mesh, plan)
    assert_untouched(model)
    assert is_tied(model)


def test_a_look_at_the_plan_says_so_too():
    report = check_plan(LM(Added), {"embed": "embedding_rowwise"}, 4)
    assert len(report.mistakes) == 1
    assert "'head.bias'" in report.mistakes[0]
    report = check_plan(LM(), {"embed": "embedding_rowwise"}, 4)
    assert dict(report.sharded) == {"embed.weight": Shard(0), "head.bias": Shard(0)}
    assert not report.mistakes


def test_two_calls_for_a_tied_pair(mesh):
    """The style that the second call names takes the place of the one that the tie brought."""
    model = TiedLM()
    reference = deepcopy(model)
    parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    assert type(model.head(torch.randn(2, 8))) is shardwise.LocalTensor  # whole from the outside
    parallelize_module(model, mesh, {"head": ColwiseParallel(use_local_output=False)})
    assert model.head.weight is model.embed.weight
    assert model(torch.tensor([[1, 2]])).placements == (Shard(2),)
    loss_of = lambda m, ids: m(ids).pow(2).mean()  # noqa: E731
    assert_trains_like(model, reference, batches(), loss_of)
    with pytest.raises(LayoutError, match="parallel already"):
        parallelize_module(model, mesh, {"head": "colwise"})


def test_a_copy_takes_another_style_too(mesh):
    model = parallelize_module(TiedLM(), mesh, {"embed": "embedding_rowwise"})
    copied = deepcopy(model)
    parallelize_module(copied, mesh, {"head": ColwiseParallel(use_local_output=False)})
    ids = torch.tensor([[1, 2]])
    torch.testing.assert_close(whole(copied(ids)), whole(model(ids)))
    assert copied.head.weight is copied.embed.weight is not model.embed.weight


@pytest.mark.parametrize("together", [True, False])
def test_layouts_around_a_module_that_only_the_tie_made_parallel(mesh, together):
    """What a plan says of its input and output is said of the module as it was."""
    model, ids = TiedLM(), torch.tensor([[1, 2, 3, 4]])
    expected = model(ids)
    first = {"embed": "embedding_rowwise"}
    second = {
        "head": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
        ),
    }
    for plan in [first | second] if together else [first, second]:
        parallelize_module(model, mesh, plan)
    found = model(ids)
    assert found.placements == (Shard(1),)
    torch.testing.assert_close(whole(found), expected)


def test_inputs_of_a_module_that_only_the_tie_made_parallel(mesh):
    model, ids = TiedLM(), torch.tensor([[1, 2, 3, 4]])
    expected = model(ids)
    parallelize_module(model, mesh, {"embed": "embedding_rowwise"})
    split = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
    )
    parallelize_module(model, mesh, {"head": split})
    torch.testing.assert_close(whole(model(ids)), expected)


def test_a_second_call_that_places_it_otherwise_changes_nothing(mesh):
    model = parallelize_module(TiedLM(), mesh, {"embed": "embedding_rowwise"})
    with pytest.raises(LayoutError, match="distributed already"):
        parallelize_module(model, mesh, {"mlp.up": "colwise", "head": "rowwise"})
    assert not isinstance(model.mlp.up.weight, DTensor)


def test_what_two_ties_want_of_one_layer(mesh):
    """The head's bias belongs to a norm that the plan keeps whole; its weight would split it."""

    class Odd(TiedLM):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 11)
            self.head.weight = self.embed.weight
            self.norm = nn.LayerNorm(11)
            self.norm.bias = self.head.bias

    model = Odd()
    plan = {"embed": "embedding_rowwise", "norm": "replicate"}
    with pytest.raises(UnsupportedError, match="are one parameter"):
        parallelize_module(model, mesh, plan)
    assert_untouched(model)
    with pytest.raises(LayoutError, match="are one parameter"):
        parallelize_module(model, mesh, plan | {"head": "colwise"})
    assert_untouched(model)


class Rows(ParallelStyle):
    """A style of a program's own, which does not say what it places."""

    def _apply(self, module, device_mesh):
        placed = shardwise.distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)])
        module.weight = nn.Parameter(placed)
        module.register_forward_pre_hook(whole_input)
        module.register_forward_hook(whole_output)
        return module


def whole_input(module, args):
    mesh = module.weight.device_mesh
    return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in args)


def whole_output(module, args, output):
    return output.full_tensor()


@pytest.mark.parametrize("path", ["embed", "head"])
def test_beside_a_style_of_ones_own(mesh, path):
    model = TiedLM()
    reference = deepcopy(model)
    parallelize_module(model, mesh, {path: Rows()})
    assert model.head.weight is model.embed.weight
    assert_trains_like(model, reference, batches())


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(2))
        self.kept, self.asked = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    @property
    def doubled(self):
        return self.scale * 2

    def forward(self, x):
        return [y + self.doubled for y in (x * self.weight, getattr(self, "asked"))]  # noqa: B009


class Inherits(Reads):
    def forward(self, x):
        return super().forward(x) + self.bias


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (Reads, {"weight", "scale", "asked"}),
        (Inherits, {"weight", "scale", "asked", "bias"}),
    ],
)
def test_what_a_module_reads(kind, read):
    module = kind()
    names = [name for name, _ in module.named_parameters()]
    assert {name for name in names if may_read(module, name)} == read


def test_a_container_without_a_forward_counts_as_read():
    assert may_read(nn.ParameterList([torch.ones(2)]), "0")


# -- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
@pytest.mark.parametrize(
    "plan",
    [
        {"bert.embeddings.word_embeddings": "embedding_rowwise"},
        {"cls.predictions.decoder": "colwise_rep"},
        {
            "bert.embeddings.word_embeddings": "embedding_rowwise",
            "bert.encoder.layer.*.attention.self.[qkv]*": "colwise",
            "bert.encoder.layer.*.attention.output.dense": "rowwise",
            "bert.encoder.layer.*.intermediate.dense": "colwise",
            "bert.encoder.layer.*.output.dense": "rowwise",
            "cls.predictions.decoder": "colwise_rep",
        },
    ],
    ids=["table", "head", "all"],
)
def test_bert(tmp_path, kind, plan):
    """Two steps of training; the checkpoint has the same loss on one device."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=22,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    make = getattr(transformers, kind)
    model = make(config)
    reference = deepcopy(model)
    ids = torch.randint(22, (2, 5))
    extra = {} if kind == "BertForMaskedLM" else {"next_sentence_label": torch.tensor([0, 1])}

    def loss_of(model, ids):
        return model(ids, labels=ids, **extra).loss

    data = [(ids,)] * 2
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, plan)
        head = model.cls.predictions
        assert head.bias is head.decoder.bias
        assert head.decoder.weight is model.bert.embeddings.word_embeddings.weight
        assert_trains_like(model, reference, data, loss_of)
        state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
        found = whole(loss_of(model, ids))
    torch.save(state, tmp_path / "bert.pt")
    restored = make(config)
    restored.load_state_dict(torch.load(tmp_path / "bert.pt"))
    torch.testing.assert_close(loss_of(restored, ids), found)
