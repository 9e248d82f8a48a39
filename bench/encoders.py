"""python -m bench.encoders: encoders, patched, eager and compiled; bench/results/<device>/models/encoders.json.

transformers' BERT of all-MiniLM-L6-v2's sizes, MPNet of all-mpnet-base-v2's, ModernBERT's base, DeBERTa-v3's small, ViT
of DeiT-small's, a Qwen 3 of bench.decoders as a model of embeddings, and torch.nn's encoder of the paper's, random
weights: inference and a training step without its optimizer, stock and patched, and both under torch.compile. What
prove() says of a smaller one comes first, compiled too: where it fails nothing is timed. In turns, in an order shuffled
anew each round.

python -m bench.encoders                  everything, a minute a case on 2 cores; needs the extra [demo]
python -m bench.encoders --only "BERT"    the cases whose name matches
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tfm_kernels as tfk
from tfm_kernels.bench import timing
from tfm_kernels.bench.model import BOTH, COMPILED, PATCHED, STOCK, Inference, Step
from tfm_kernels.proof.compiled import Compiled
from tfm_kernels.proof.runs import Call

from . import decoders, whole

PLAN = timing.Plan(seconds=12.0, least=4, most=40)
Made = tuple[nn.Module, dict[str, Tensor]]


def bert(rows: int, share: float, layers: int = 6) -> Made:
    """BERT on rows of up to 128 tokens, of which the shortest has ``share`` of that, and the others lie between."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=1536
    )
    return transformers.BertModel(config, add_pooling_layer=False), _text(rows, share, 128)


def mpnet(rows: int, layers: int = 12) -> Made:
    """MPNet on rows of 64 to 128 tokens."""
    import transformers

    return transformers.MPNetModel(transformers.MPNetConfig(num_hidden_layers=layers)), _text(rows, 0.5, 128)


def modernbert(rows: int, layers: int = 22) -> Made:
    """ModernBERT on rows of 256 to 1024 tokens, of which two layers of three see 129."""
    import transformers

    model = transformers.ModernBertModel(transformers.ModernBertConfig(num_hidden_layers=layers))
    return model, _text(rows, 0.25, 1024)


def deberta(rows: int, layers: int = 6) -> Made:
    """DeBERTa-v3 on rows of 64 to 128 tokens."""
    import transformers

    config = transformers.DebertaV2Config(
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=3072,
        type_vocab_size=0,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=256,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
    )
    return transformers.DebertaV2Model(config), _text(rows, 0.5, 128)


def qwen3(rows: int, layers: int = decoders.LAYERS["Qwen3"]) -> Made:
    """A decoder without its head, as models of embeddings have it, on rows of 64 to 256 tokens."""
    import transformers

    config = transformers.Qwen3Config(num_hidden_layers=layers, use_cache=False, **decoders.SIZES)
    return transformers.Qwen3Model(config), _text(rows, 0.25, 256)


def _text(rows: int, share: float, length: int) -> dict[str, Tensor]:
    """Rows of which the shortest has ``share`` of ``length`` tokens, the longest all, and the others lie between."""
    lengths = torch.linspace(share, 1.0, rows).mul(length).round().unsqueeze(1)
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": torch.randint(1000, 30000, (rows, length)) * mask, "attention_mask": mask}


def vit(rows: int, layers: int = 12) -> Made:
    """ViT on pictures of 224 x 224: 197 tokens."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=layers, num_attention_heads=6, intermediate_size=1536
    )
    return transformers.ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(rows, 3, 224, 224)}


def encoder(rows: int, layers: int = 6) -> Made:
    """torch.nn's encoder of 512 features, dropout 0.1, on rows of 128 tokens."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.1, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), {"src": torch.randn(rows, 128, 512)}


# name -> (what makes the model and its inputs, the rows that are timed, whether it is trained as well)
MODELS: dict[str, tuple[Callable[..., Made], int, bool]] = {
    "BERT, rows of 64 to 128": (functools.partial(bert, share=0.5), 32, True),
    "BERT, rows of 128": (functools.partial(bert, share=1.0), 32, False),
    "MPNet, rows of 64 to 128": (mpnet, 8, False),
    "ModernBERT, rows of 256 to 1024": (modernbert, 4, False),
    "DeBERTa-v3, rows of 64 to 128": (deberta, 8, False),
    "Qwen3, rows of 64 to 256": (qwen3, 8, True),
    "ViT, rows of 197": (vit, 8, False),
    "torch.nn, rows of 128": (encoder, 16, True),
}


def proven(make: Callable[..., Made], dtype: torch.dtype) -> None:
    """Refuses to time a kind of model whose patched form is wrong, eager or compiled."""
    torch.manual_seed(0)
    model, inputs = make(rows=2, layers=1)
    report = tfk.prove(model.eval(), inputs, dtype=dtype, compile=True)
    assert report.passed, report.table()


def case(make: Callable[..., Made], rows: int, train: bool, dtype: torch.dtype) -> tuple[whole.Runs, None]:
    """One call of each."""
    proven(make, dtype)
    torch.manual_seed(0)
    model, inputs = make(rows=rows)
    stock = model.to(dtype).train(train)
    patched = copy.deepcopy(stock)
    tfk.patch(patched)
    call = Call.of(inputs).to(dtype)
    models = {STOCK: stock, PATCHED: patched, COMPILED: stock, BOTH: patched}
    runs: dict[str, Any] = {}
    for who, each in models.items():
        called = Compiled(each) if who in (COMPILED, BOTH) else None
        runs[who] = Step(each, call, None, called) if train else torch.no_grad()(Inference(each, call, called))
    return runs, None


CASES = {
    f"{name}, {'training' if train else 'inference'}, {str(dtype)[6:]}": functools.partial(
        case, make, rows, train, dtype
    )
    for name, (make, rows, trained) in MODELS.items()
    for train in (False, True)[: 1 + trained]
    for dtype in (torch.float32, torch.bfloat16)
}


def told(name: str, seconds: whole.Seconds, known: None) -> dict[str, Any]:
    """Prints a case, and gives what the file holds of it."""
    found = whole.beside(seconds, STOCK)
    others = "   ".join(f"{who} {one['times']:.2f}x" for who, one in found.items() if who != STOCK)
    print(f"{name:48}{found[STOCK]['median'] * 1e3:9.1f} ms   {others}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return whole.program(__doc__ or "", arguments, "encoders", CASES, PLAN, told)


if __name__ == "__main__":
    sys.exit(main())
