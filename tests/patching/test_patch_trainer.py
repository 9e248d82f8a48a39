"""transformers.Trainer with a patched model: losses, gradients' norms and checkpoints are the stock model's.

The Trainer asks for accelerate, and nothing smaller behaves as it does: without it these tests skip.
"""

import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import bert, decoder, encoder, transformers

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers.Trainer needs")
CLASSIFIER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": lambda: decoder("llama"),
    "gpt_neox": lambda: decoder("gpt_neox", use_parallel_residual=False),
    "phi3": lambda: decoder("phi3"),
    "bert": lambda: transformers().BertForSequenceClassification(bert(**CLASSIFIER).config),
}
CHECKPOINTED = {"gradient_checkpointing": True}
OPTIONS = {
    "plain": {},
    "reentrant": {**CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not reentrant": {**CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def example(kind, i):
    length = 4 + i % 6
    mask = (torch.arange(10) < length).long()
    ids = torch.randint(1, 99, (10,), generator=torch.Generator().manual_seed(i)) * mask
    labels = torch.tensor(i % 2) if kind == "bert" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(kind, folder, patched, **options):
    """(losses, norms of gradients) of three steps, and the model that was saved after them, as it is loaded."""
    hf = transformers()
    torch.manual_seed(0)
    model = MODELS[kind]()
    report = tfk.patch(model) if patched else None
    told = hf.TrainingArguments(
        str(folder), max_steps=3, save_steps=3, logging_steps=1, per_device_train_batch_size=4, optim="sgd",
        learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True, seed=1, **options,
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=told, train_dataset=[example(kind, i) for i in range(24)])
    trainer.train()
    steps = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert patched is False or (report.replaced and report.fallbacks == {})
    saved = type(model).from_pretrained(folder / "checkpoint-3")
    assert saved.config._attn_implementation == "sdpa"
    assert "tfm_kernels" not in (folder / "checkpoint-3" / "config.json").read_text()
    for (name, given), wanted in zip(saved.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(given, wanted), name
    return torch.tensor([[row["loss"], row["grad_norm"]] for row in steps])


QUICK = {"llama": OPTIONS, "gpt_neox": ["reentrant"], "phi3": ["bf16"], "bert": ["not reentrant"]}  # of every run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind, options",
    [pytest.param(k, o, marks=() if o in QUICK[k] else pytest.mark.slow) for k in MODELS for o in OPTIONS],
)
def test_three_steps(tmp_path, kind, options):
    wanted = trained(kind, tmp_path / "stock", False, **OPTIONS[options])
    given = trained(kind, tmp_path / "patched", True, **OPTIONS[options])
    assert wanted.shape == (3, 2)
    dtype = torch.bfloat16 if options == "bf16" else torch.float32  # whose rounding may differ
    torch.testing.assert_close(given.to(dtype), wanted.to(dtype))


@pytest.fixture
def accelerator():
    """Of mixed precision, which is a setting of the process."""
    reset = accelerate.state.AcceleratorState._reset_state
    reset(reset_partial_state=True)
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    reset(reset_partial_state=True)


@pytest.mark.parametrize("first", ["patch", "prepare"])
def test_unpatched_while_accelerate_wraps_it(first, accelerator):
    """Its wrapper for autocast keeps the forward that it found on the instance, and leaves one there when it goes."""
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    model, stock = encoder().train(), encoder().train()
    classes, alone = [type(module) for module in model.modules()], stock(x)
    wanted = accelerator.prepare_model(stock)(x)
    for step in (first, *({"patch", "prepare"} - {first})):
        tfk.patch(model) if step == "patch" else accelerator.prepare_model(model)
    assert not torch.equal(model(x), alone)
    assert tfk.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(x), wanted)
    assert torch.equal(accelerator.unwrap_model(model, keep_fp32_wrapper=False)(x), alone)
