"""Objective on models of transformers: the loss of their own, every gradient, and which are called as a whole."""

import copy

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.nn.test_honesty import LoRA
from tests.patching import test_patch_encoders as encoders
from tests.patching.models import compare, transformers
from tests.patching.test_patch_decoder_model import BEHIND, IDS, MASKS, packings
from tests.patching.test_patch_decoder_model import decoder as small
from tests.training.test_objective import fused as fused
from tfm_kernels import training
from tfm_kernels.training.loss import IGNORED, counted

CAUSAL = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "phi", "phi3", "gemma", "gemma3_text", "granite", "glm", "olmo",
    "helium", "stablelm", "nemotron", "starcoder2", "deepseek_v3", "gpt2", "gpt_neox", "opt",
)  # fmt: skip
MASKED = {
    "Bert": {}, "Roberta": {}, "XLMRoberta": {}, "MPNet": {}, "ModernBert": {}, "EuroBert": {"num_key_value_heads": 2},
    "Albert": {"embedding_size": 16}, "Electra": {"embedding_size": 16},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
}  # fmt: skip
STILL = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
INPUTS = {"input_ids": IDS, "attention_mask": BEHIND}


def causal(family="llama", **changes):
    transformers()
    return small(family, **{"logits_scaling": 3.0, **changes} if family == "granite" else changes)


def masked(family):
    hf = transformers()
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**{**encoders.SMALL, **MASKED[family]})
    for name in STILL:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = getattr(hf, f"{family}ForMaskedLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval()


def labelled(model, mask=BEHIND):
    """(labels, the targets that they are): a decoder's lie one token behind, and others' are a third of the tokens."""
    labels = IDS.masked_fill(mask == 0, IGNORED)
    if "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__:
        return labels, nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    labels = labels.masked_fill(IDS % 3 > 0, IGNORED)
    return labels, labels


def trained(model, loss):
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def own(model, labels, **inputs):
    return trained(model, model(**{**INPUTS, **inputs}, labels=labels).loss)


def ours(model, targets, **inputs):
    loss = training.Objective(model, backend="cpu")({**INPUTS, **inputs}, targets)
    return trained(model, loss / counted(targets))


def assert_own_loss(model, mask=BEHIND):
    labels, targets = labelled(model, mask)
    compare(ours(model, targets, attention_mask=mask), own(model, labels, attention_mask=mask), 1e-5)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("family", [*CAUSAL, *MASKED])
def test_loss_and_gradients_are_the_models_own(fused, family, patched):
    model = masked(family) if family in MASKED else causal(family)
    labels, targets = labelled(model)
    stock = own(model, labels)
    if patched:
        tfk.patch(model)
    compare(ours(model, targets), stock, 2e-5)
    assert fused == [("cpu", int(counted(targets)))]


def test_padding_in_front_and_no_cache(fused, monkeypatch):
    """What is patched runs packed."""
    model, told = causal(), []
    assert model.config.use_cache
    forward = type(model.model).forward
    with monkeypatch.context() as patching:
        watch = lambda *args, **given: told.append(given["use_cache"]) or forward(*args, **given)
        patching.setattr(type(model.model), "forward", watch)
        assert_own_loss(model, MASKS["in front"])
    assert told[0] is False
    tfk.patch(model)
    with packings() as seen:
        ours(model, labelled(model)[1])
    assert len(seen) == 1 and len(fused) == 2


def test_inputs_in_their_order(fused):
    model = causal()
    targets, objective = labelled(model)[1], training.Objective(model)
    assert torch.equal(objective((IDS, BEHIND), targets), objective(INPUTS, targets))
    logits, chosen = objective.scores((IDS, BEHIND), targets)
    assert torch.equal(chosen, targets[targets != IGNORED])
    compare({"": logits}, {"": model(**INPUTS).logits[targets != IGNORED]}, 1e-5)


@pytest.mark.parametrize("family", ["llama", "Bert"])
def test_targets_at_padding(fused, family):
    """Where packed models give zeros: they run padded then."""
    model = masked(family) if family in MASKED else causal(family)
    stock, targets = copy.deepcopy(model), IDS
    wanted = trained(stock, training.cross_entropy(stock(**INPUTS).logits, targets) / targets.numel())
    with tfk.patch(model) as report, packings() as seen:
        compare(ours(model, targets), wanted, 2e-5)
        assert not seen and len(fused) == 1
        assert "targets count padding, which -100 would leave out" in sum(map(list, report.fallbacks.values()), [])


def softcapped(model):
    return small("gemma3_text", final_logit_softcapping=5.0)


def bent(model):
    class Bent(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return type(out)(logits=2 * out.logits, loss=None)

    model.__class__ = Bent
    return model


def adapted(model):
    model.lm_head = LoRA(model.lm_head).float()
    return model


def watched(model):
    model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    return model


@pytest.mark.parametrize("change", [softcapped, bent, adapted, watched])
def test_who_is_called_as_a_whole(fused, change):
    model = change(causal())
    targets = labelled(model)[1]
    wanted = trained(model, training.cross_entropy(model(**INPUTS).logits, targets) / counted(targets))
    compare(ours(model, targets), wanted, 1e-6)
    assert not fused


class Mixed(nn.Module):
    """An activation that takes tokens together."""

    def forward(self, x):
        return x.cumsum(-2)


@pytest.mark.parametrize("change", ["activation", "hook", "class"])
def test_a_head_of_ones_own_is_called(fused, change):
    model = masked("Bert")
    transform = model.cls.predictions.transform
    if change == "activation":
        transform.transform_act_fn = Mixed()
    elif change == "hook":
        transform.register_forward_hook(lambda module, args, out: 2 * out)
    else:
        transform.__class__ = type("Own", (type(transform),), {"forward": lambda self, x: self.dense(x)})
    assert_own_loss(model)
    assert not fused


def test_labels_are_refused():
    model = causal()
    with pytest.raises(ValueError, match="labels is not taken: the targets are given by themselves"):
        training.Objective(model)({**INPUTS, "labels": IDS}, IDS)
    with pytest.raises(ValueError, match="targets"):
        training.Objective(model)(INPUTS, IDS[:, 1:])


def test_adapters(fused):
    """Of peft's models the one that holds the adapters, patched or not."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(causal(), config).eval()
    labels, targets = labelled(model.get_base_model())
    wanted = own(model, labels)
    for _ in range(2):
        loss = training.Objective(model.get_base_model(), backend="cpu")(INPUTS, targets)
        compare(trained(model, loss / counted(targets)), wanted, 1e-5)
        tfk.patch(model)
    assert len(fused) == 2
    whole = training.Objective(model)(INPUTS, targets)
    torch.testing.assert_close(whole, loss)
    assert len(fused) == 2
