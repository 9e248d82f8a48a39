"""What README and docstrings show runs as it stands there, and prints what they say it prints."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching import attentions
from tests.patching import test_patch_recipe as tutorial
from tfm_kernels.patching import registry


def examples():
    """The docstrings with examples, each in a namespace of torch, nn, tfk and the name that it documents."""
    found = {}
    for each in pkgutil.walk_packages(tfk.__path__, "tfm_kernels."):
        if each.name in ("tfm_kernels.__main__", "tfm_kernels._C", "tfm_kernels._cuda"):
            continue
        for test in doctest.DocTestFinder().find(importlib.import_module(each.name), each.name):
            own = test.name.removeprefix(f"{each.name}.").partition(".")[0]
            test.globs = {"torch": torch, "nn": nn, "tfk": tfk, own: test.globs.get(own)}
            if test.examples:
                found[test.name] = test
    return found


EXAMPLES = examples()


SMALLER = {
    "512, 8, 2048": "64, 8, 128", "num_layers=6": "num_layers=2", "randn(8, 128, 512)": "randn(8, 128, 64)",
    "8000": "800",
    "share_embeddings=True": "d_model=64, num_encoder_layers=1, num_decoder_layers=1, share_embeddings=True",
}  # fmt: skip


class MLP(nn.Module):
    """In the style of nanoGPT."""

    def __init__(self, width):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Foretelling(nn.Module):
    """Gives what transformers' models for causal language modelling give."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 9)

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table(input_ids))


@pytest.fixture
def given(tmp_path, monkeypatch, quick_tuning):
    """The layers that a user has written, in a folder of the test's own; what is declared of them is taken back."""
    monkeypatch.chdir(tmp_path)
    before = registry.registered()
    written = (attentions.CausalSelfAttention, MLP, *(getattr(tutorial, name) for name in (
        "MultiHeadAttention", "FeedForward", "LayerNorm", "Residual")))  # fmt: skip
    yield {cls.__name__: cls for cls in written}
    registry._recipes[:] = before


@pytest.mark.parametrize("name", EXAMPLES)
def test_of_a_docstring(name, given):
    EXAMPLES[name].globs = given | EXAMPLES[name].globs
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    result = runner.run(EXAMPLES[name], out=said.append)
    assert result.attempted and not result.failed, "".join(said)


def test_of_readme(given):
    """One block after another in one namespace, with small models, but for the one that needs timm."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    mine = [block for block in blocks if "timm" not in block]
    assert len(mine) == len(blocks) - 1 > 5
    tokens = torch.randint(1, 9, (2, 5))
    batch = {"tokens": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    names = {**given, **batch, "my_transformer": tutorial.Encoder(), "causal_lm": Foretelling()}
    for block in mine:
        for large, small in SMALLER.items():
            block = block.replace(large, small)
        exec(compile(block, "README.md", "exec"), names)
    replaced = names["my_transformer"]
    assert not any(type(module) is tutorial.MultiHeadAttention for module in replaced.modules())
