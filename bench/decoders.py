"""python -m bench.decoders: transformers' decoder-only models, patched; bench/results/<device>/models/decoders.json.

A Llama of SmolLM2-135M's sizes and a Qwen 3 of half its depth, with random weights: a prompt's forward, greedy
generation with the cache, one row and several, tokens under torch.compile with a static cache, and a step of training
without its optimizer, padded or not. Hugging Face's model with SDPA, the same patched, in training its loss without
logits by ``training.Objective``, too, and for generation by weights of 8 bits, each in float32 and bfloat16. What
prove() says of the smaller model comes first: where it fails nothing is timed. In turns, in an order shuffled anew each
round.

python -m bench.decoders                       everything, a minute a case on 2 cores, five with torch.compile; needs
                                               the extra [demo]
python -m bench.decoders --only "generation"   the cases whose name matches
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tfm_kernels as tfk
from tfm_kernels.bench import timing
from tfm_kernels.training import Objective

from . import whole

PLAN = timing.Plan(seconds=20.0, least=4, most=40)
SIZES: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "vocab_size": 49152, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = {"Llama": 30, "Qwen3": 15}
LEFT_OUT = -100  # a label that no loss counts
STOCK = "Hugging Face"


def build(family: str, **changes: Any) -> Any:
    """A model of one family, random weights, in evaluation mode."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{"num_hidden_layers": LAYERS[family], **SIZES, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(rows))


@functools.cache
def proven(family: str) -> None:
    """Refuses to time a family whose patched model is wrong."""
    small = build(family, num_hidden_layers=2, vocab_size=1000)
    for dtype in (torch.float32, torch.bfloat16):
        report = tfk.prove(small, {"input_ids": tokens(2, 48) % 1000}, dtype=dtype)
        assert report.passed, report.table()


def candidates(family: str, *, schemes: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    """Who is timed: stock and patched in both types, and patched with weights of 8 bits."""
    proven(family)
    model = build(family, **changes)
    wide = {STOCK: model, "patched": copy.deepcopy(model)}
    found = wide | {f"{who}, bfloat16": copy.deepcopy(given).bfloat16() for who, given in wide.items()}
    for scheme in schemes:
        found[f"{scheme}, patched"] = copy.deepcopy(model)
        tfk.quantize(found[f"{scheme}, patched"], scheme)
    for who, given in found.items():
        if "patched" in who:
            tfk.patch(given)
    return found


def prompt(family: str, rows: int, length: int) -> tuple[whole.Runs, None]:
    """The scores of the token after the prompt."""
    ids = tokens(rows, length)

    def forward(model: Any) -> Callable[[], object]:
        return torch.no_grad()(lambda: model(ids, use_cache=False, logits_to_keep=1))

    return {who: forward(model) for who, model in candidates(family).items()}, None


def generation(family: str, rows: int, length: int, new: int) -> tuple[whole.Runs, dict[str, float]]:
    """New tokens after a prompt, and how many of them are those of the stock model in float32, as a share."""
    ids = tokens(rows, length)
    given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def generate(model: Any) -> Callable[[], Tensor]:
        return lambda: model.generate(ids, **given)[:, length:]

    runs = {who: generate(model) for who, model in candidates(family, schemes=("int8_weight_only",)).items()}
    truth = runs[STOCK]()
    return runs, {who: float((run() == truth).float().mean()) for who, run in runs.items()}


def compiled(family: str, layers: int, new: int) -> tuple[whole.Runs, None]:
    """Tokens of one row, each by a compiled forward with a cache whose size is fixed."""
    from transformers import StaticCache

    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64  # a graph or two for each model: they are of one class
    ids = tokens(1, new)

    def steps(model: Any) -> Callable[[], None]:
        cache = StaticCache(config=model.config, max_cache_len=new)
        keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        forward = torch.compile(model)

        @torch.no_grad()
        def run() -> None:
            cache.reset()
            for i in range(new):
                forward(ids[:, i : i + 1], use_cache=True, **{keyword: cache})

        return run

    found = candidates(family, schemes=("int8_weight_only",), num_hidden_layers=layers)
    return {who: steps(model) for who, model in found.items()}, None


def training(family: str, rows: int, length: int, share: float = 1.0) -> tuple[whole.Runs, None]:
    """Forward with the loss, and backward; the shortest row has ``share`` of the tokens; also without logits."""
    lengths = torch.linspace(share, 1.0, rows).mul(length).round().unsqueeze(1)
    mask = (torch.arange(length) < lengths).long()
    ids = tokens(rows, length) * mask
    labels = ids.masked_fill(mask == 0, LEFT_OUT)
    call: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=LEFT_OUT)
    count = int((targets != LEFT_OUT).sum())

    def step(model: Any, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            found = loss()
            found.backward()
            model.zero_grad()
            return found

        model.train()
        return run

    def own(model: Any) -> Callable[[], Tensor]:
        return step(model, lambda: model(**call, labels=labels).loss)

    def without_logits(model: Any) -> Callable[[], Tensor]:
        objective = Objective(model)
        return step(model, lambda: objective(call, targets) / count)

    found = candidates(family)
    runs = {who: own(model) for who, model in found.items()}
    return runs | {f"{who}, Objective": without_logits(found[who]) for who in found if "patched" in who}, None


CASES: dict[str, Callable[[], tuple[whole.Runs, Any]]] = {
    "Llama, prompt of 1 x 256 tokens": lambda: prompt("Llama", 1, 256),
    "Llama, generation, 1 row, 32 + 32 tokens": lambda: generation("Llama", 1, 32, 32),
    "Llama, generation, 8 rows, 32 + 32 tokens": lambda: generation("Llama", 8, 32, 32),
    "Llama of 10 layers, torch.compile, static cache, 1 row, 32 tokens": lambda: compiled("Llama", 10, 32),
    "Llama, training, 1 x 256 tokens": lambda: training("Llama", 1, 256),
    "Qwen3, training, 8 x 64 to 256 tokens": lambda: training("Qwen3", 8, 256, 0.25),
    "Qwen3, prompt of 1 x 256 tokens": lambda: prompt("Qwen3", 1, 256),
    "Qwen3, generation, 1 row, 32 + 32 tokens": lambda: generation("Qwen3", 1, 32, 32),
}


def told(name: str, seconds: whole.Seconds, agreement: dict[str, float] | None) -> dict[str, Any]:
    """Prints a case beside Hugging Face's in float32; what the file holds of it."""
    case = whole.beside(seconds, STOCK)
    print(name)
    for who, found in case.items():
        if agreement is not None:
            found["agreement"] = agreement[who]
        same = "" if agreement is None else f"  {agreement[who]:.3f} of the tokens"
        print(f"  {who:28}{found['median'] * 1e3:9.1f} ms {found['times']:6.2f}x{same}", flush=True)
    return case


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every case and writes the file."""
    return whole.program(__doc__ or "", arguments, "decoders", CASES, PLAN, told)


if __name__ == "__main__":
    sys.exit(main())
