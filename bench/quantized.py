"""python -m bench.quantized: what quantize() gains and costs; bench/results/<device>/models/quantized.json.

Encoding: 32 rows of all-MiniLM-L6-v2, padded and without padding, by Hugging Face's model with SDPA in float32 and
bfloat16, by PyTorch's own quantize_dynamic of it, and by the patched model in float32, bfloat16 and 8 bits; each with
the least cosine of its embeddings to those of float32. Decoding: greedy, one row and 32, with the cache, by a
translation model in float32, bfloat16 and 8 bits. In turns, in an order shuffled anew each round.

python -m bench.quantized                    everything, about 3 minutes on 2 cores; needs the extra [demo]
python -m bench.quantized --only "decoding"  the cases whose name matches
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tfm_kernels as tfk
from tfm_kernels.bench import timing
from tfm_kernels.demo import minilm

from . import whole
from .models import LAYERS, MIDDLE, tokens

PLAN = timing.Plan(seconds=25.0, least=5, most=40)
ROWS = 32


def encoders() -> dict[str, nn.Module]:
    """Who encodes."""
    model, _ = minilm.load(minilm.model_folder())
    bfloat16 = lambda given: copy.deepcopy(given).bfloat16()  # noqa: E731
    found = {"Hugging Face": model, "Hugging Face, bfloat16": bfloat16(model)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it will move
        dynamic = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    found["Hugging Face, quantize_dynamic"] = dynamic
    found |= {"patched": copy.deepcopy(model), "patched, bfloat16": bfloat16(model)}
    for name, given in (("int8_dynamic, patched", model), ("int8_dynamic, patched, bfloat16", bfloat16(model))):
        found[name] = copy.deepcopy(given)
        tfk.quantize(found[name], "int8_dynamic")
    for name, given in found.items():
        if "patched" in name:
            tfk.patch(given)
    return found


def encoded(padded: bool) -> tuple[whole.Runs, dict[str, float]]:
    """One run of each encoder, and the least cosine of its embeddings."""
    _, tokenizer = minilm.load(minilm.model_folder())
    lines = minilm.sentences()
    chosen = lines[:: len(lines) // ROWS][:ROWS]
    batch = minilm.padded_batch(tokenizer, chosen) if padded else minilm.full_batch(tokenizer, lines, ROWS)
    models = encoders()
    truth = minilm.embed(models["Hugging Face"], batch)
    cosines = {who: float((minilm.embed(model, batch) * truth).sum(-1).min()) for who, model in models.items()}

    def encode(model: nn.Module) -> Callable[[], object]:
        return lambda: minilm.embed(model, batch)

    return {who: encode(model) for who, model in models.items()}, cosines


def decoded(rows: int) -> tuple[whole.Runs, dict[str, float]]:
    """One decoding by each model, and the share of tokens that are float32's."""
    torch.manual_seed(0)
    config = tfk.models.TranslationConfig(8000, 8000, **LAYERS, **MIDDLE)
    model, source = tfk.models.TranslationTransformer(config).eval(), tokens(8000, rows, 24)
    models: dict[str, Any] = {"float32": model, "bfloat16": copy.deepcopy(model).bfloat16()}
    for scheme in ("int8_weight_only", "int8_dynamic"):
        models[scheme] = copy.deepcopy(model)
        tfk.quantize(models[scheme], scheme)

    def decode(given: Any) -> Callable[[], Tensor]:
        return lambda: tfk.generate(given, source, 64, bos_id=1)

    runs = {who: decode(given) for who, given in models.items()}
    truth = runs["float32"]()
    return dict(runs), {who: float((run() == truth).float().mean()) for who, run in runs.items()}


CASES: dict[str, Callable[[], tuple[whole.Runs, dict[str, float]]]] = {
    "encoding, padded": lambda: encoded(True),
    "encoding, unpadded": lambda: encoded(False),
    "decoding 3+3 layers, 256 wide, 1 row, 64 tokens": lambda: decoded(1),
    "decoding 3+3 layers, 256 wide, 32 rows, 64 tokens": lambda: decoded(32),
}


def told(name: str, seconds: whole.Seconds, agreement: dict[str, float]) -> dict[str, Any]:
    """Prints a case beside its first implementation; what the file holds of it."""
    case = whole.beside(seconds, next(iter(seconds)))
    print(name)
    for who, found in case.items():
        found["agreement"] = agreement[who]
        took = f"{found['median'] * 1e3:8.1f} ms {found['times']:6.2f}x"
        print(f"  {who:34}{took}  {agreement[who]:.4f}", flush=True)
    return case


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every case and writes the file."""
    return whole.program(__doc__ or "", arguments, "quantized", CASES, PLAN, told)


if __name__ == "__main__":
    sys.exit(main())
