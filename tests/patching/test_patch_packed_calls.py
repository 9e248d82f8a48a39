"""What else a call of a model that packs as a whole may say, and what its parts may be."""

import copy

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import compare, results
from tests.patching.test_patch_encoders import IDS, MASK, build, run_on

WHOLE = ("ModernBert", "NomicBert", "JinaEmbeddingsV3", "Gte", "EuroBert")


def same(model, run, packed=True):
    """What a copy gives patched, gradients too, is what the model gives; packed or not; with what it fell back for."""
    stock, patched = results(model, run, MASK.bool()), copy.deepcopy(model)
    with tfk.patch(patched) as report:
        compare(results(patched, run, MASK.bool()), stock, 1e-4)
        assert packed is not bool(run(patched)[MASK == 0].any()), report.fallbacks
        return report.fallbacks


@pytest.mark.parametrize(
    "told",
    [dict(num_items_in_batch=torch.tensor(2)), dict(use_cache=False), dict(token_type_ids=torch.zeros_like(IDS))],
)
@pytest.mark.parametrize("family", WHOLE)
def test_keywords_that_change_nothing_leave_it_packed(family, told):
    """Trainer's and many tokenizers', which some families name in their forward and others pass on unread."""
    assert same(build(family, type_vocab_size=2), run_on(**told)) == {}


@pytest.mark.parametrize("family", ["ModernBert", "EuroBert"])
def test_kinds_of_tokens_that_no_forward_reads_keep_attention_ours(family):
    model, run = build(family), lambda m: m(IDS, token_type_ids=IDS[:, :3]).last_hidden_state
    stock = run(model)
    with tfk.patch(model) as report:
        torch.testing.assert_close(run(model), stock)
        assert report.fallbacks == {}


@pytest.mark.parametrize("family", [*WHOLE, "DebertaV2"])
def test_an_argument_told_twice_is_refused_as_ever(family):
    model = build(family)
    with tfk.patch(model), pytest.raises(TypeError, match="multiple values"):
        model(IDS, MASK, input_ids=IDS)


@pytest.mark.parametrize("family", WHOLE)
def test_activations_that_take_tokens_together_run_padded(family):
    model = build(family)
    place = "act" if family == "ModernBert" else "act_fn"
    reason = f"layer 1 cannot run packed: mlp.{place} is Softmax"
    with tfk.patch(model) as report:
        setattr(model.layers[1].mlp, place, nn.Softmax(dim=1))
        given = run_on()(model)
        assert reason in report.fallbacks[""]
    torch.testing.assert_close(given, run_on()(model))


class Placed(nn.Module):
    """In the place of a table of kinds: each token's place in its row is added."""

    def __init__(self, table):
        super().__init__()
        self.table, self.places = table, nn.Embedding(64, 32)

    def forward(self, kinds):
        return self.table(kinds) + self.places(torch.arange(kinds.shape[1]))


@pytest.mark.parametrize("family", ["NomicBert", "JinaEmbeddingsV3", "Gte"])
def test_kinds_of_tokens_of_ones_own_run_padded(family):
    model = build(family, type_vocab_size=2)
    model.embeddings.token_type_embeddings = Placed(model.embeddings.token_type_embeddings)
    reason = "embeddings.token_type_embeddings is Placed"
    assert reason in same(model, run_on(), packed=False)[""]


@pytest.mark.parametrize("pooler", [nn.BatchNorm1d(32), nn.Dropout(0.5)])
def test_a_pooler_of_ones_own_is_run_once(pooler):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = pooler, 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x[:, 0])

    model = build("JinaEmbeddingsV3").train()
    model.pooler = Own()
    torch.manual_seed(5)
    stock, after = model(IDS, attention_mask=MASK).pooler_output, torch.rand(1)
    with tfk.patch(model) as report:
        torch.manual_seed(5)
        torch.testing.assert_close(model(IDS, attention_mask=MASK).pooler_output, stock)
        assert torch.equal(torch.rand(1), after) and model.pooler.calls == 2
        assert report.fallbacks == {"": {"pooler is Own": 1}}


@pytest.mark.parametrize("setting", [dict(scale_grad_by_freq=True), dict(max_norm=0.1)])
@pytest.mark.parametrize("family", WHOLE)
def test_embeddings_that_count_tokens_run_padded(family, setting):
    """A token that padding shares has its gradient divided by all that ask for it."""
    model = build(family)
    table = model.get_input_embeddings()
    for name, value in setting.items():
        setattr(table, name, value)
    ids = torch.where(MASK.bool(), IDS, IDS[0, 0])
    same(model, lambda m: m(ids, attention_mask=MASK).last_hidden_state, packed=False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["ModernBert", "EuroBert"])
def test_checkpointed_training_runs_packed(family, reentrant):
    """transformers' hook on the embeddings, by which they require gradients, changes no number."""
    model = build(family).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert same(model, run_on()) == {}


def test_vmap_over_parameters_that_want_gradients():
    """Where the bias of an attention is among what is mapped over, and vmap hides that it requires gradients."""
    models = [build("MPNet"), build("MPNet", initializer_range=0.5)]
    parameters, buffers = torch.func.stack_module_state(models)
    table = "encoder.relative_attention_bias.weight"

    def run(model):
        def each(values, rest):
            told = {"input_ids": IDS, "attention_mask": MASK}
            return torch.func.functional_call(model, (values, rest), (), told).last_hidden_state

        y = torch.func.vmap(each)(parameters, buffers)[:, MASK.bool()]
        return {"output": y.detach(), "gradient": torch.autograd.grad(y.square().sum(), parameters[table])[0]}

    stock = run(models[0])
    patched = copy.deepcopy(models[0])
    with tfk.patch(patched):
        compare(run(patched), stock, 1e-5)
