"""python -m bench.models: whole models against the same models of torch.nn; bench/results/<device>/models/models.json.

Training: one step (forward, loss, backward, AdamW) of each model of tfm_kernels.models with the loss that training
takes, of the same model from torch.nn's layers with their scaled_dot_product_attention and F.cross_entropy of its
logits, and of that one under torch.compile; same weights, same tokens, same targets (no padding; of a masked model the
15 % that are hidden), same dropout rates; freed memory stays with the process, as in `tfm_kernels train`. Decoding:
greedy with the cache, without it, and torch.nn's decoder with keys and values kept by hand, and with its modules called
as they are and their inputs kept. In turns, in an order shuffled anew each round.

python -m bench.models                    everything, about 4 minutes on 2 cores
python -m bench.models --only "decoding"  the cases whose name matches
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tfm_kernels as tfk
from tests.models.peers import Peer
from tfm_kernels import training
from tfm_kernels.bench import timing
from tfm_kernels.training import seeds
from tfm_kernels.training.allocator import keep_freed_memory
from tfm_kernels.training.loss import IGNORED
from tfm_kernels.training.vocabulary import MASK, SPECIALS

from . import whole

PLAN = timing.Plan(seconds=12.0, least=5, most=60)
SMALL = {"d_model": 128, "nhead": 4, "dim_feedforward": 512, "norm_first": True, "max_length": 512}
MIDDLE = {"d_model": 256, "nhead": 4, "dim_feedforward": 1024, "norm_first": True, "max_length": 512}
LAYERS = {"num_encoder_layers": 3, "num_decoder_layers": 3}
# name -> (a model, (rows, source length, target length or 0)); the sizes are those of bench.tasks and of the paper
TRAINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "translation 3+3 layers, 256 wide": (
        lambda: tfk.models.TranslationTransformer(
            tfk.models.TranslationConfig(8000, 8000, share_embeddings=True, **LAYERS, **MIDDLE)
        ),
        (64, 24, 24),
    ),
    "classifier 2 layers, 128 wide": (
        lambda: tfk.models.TransformerClassifier(tfk.models.ClassifierConfig(4000, 2, 2, **SMALL)),
        (64, 48, 0),
    ),
    "masked language 4 layers, 256 wide": (
        lambda: tfk.models.MaskedLanguageModel(tfk.models.MaskedLanguageConfig(8000, 4, **MIDDLE)),
        (32, 64, 0),
    ),
    "causal language 4 layers, 256 wide": (
        lambda: tfk.models.CausalLanguageModel(tfk.models.CausalLanguageConfig(256, 4, **MIDDLE)),
        (16, 256, 0),
    ),
}
# name -> (sizes, new tokens, dtype, whether decoding without a cache, whose time grows with their square, takes part)
DECODED: dict[str, tuple[dict[str, Any], int, torch.dtype, bool]] = {
    "decoding 3+3 layers, 256 wide, 32 rows, 64 tokens": (MIDDLE, 64, torch.float32, True),
    "decoding 3+3 layers, 256 wide, 32 rows, 256 tokens": (MIDDLE, 256, torch.float32, False),
    "decoding in bfloat16, 3+3 layers, 256 wide, 32 rows, 64 tokens": (MIDDLE, 64, torch.bfloat16, False),
    "decoding in bfloat16, 3+3 layers, 256 wide, 32 rows, 256 tokens": (MIDDLE, 256, torch.bfloat16, False),
}


class TorchModel(Peer):
    """The model of torch.nn, with its table of positions made once and dropout behind the embedding."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        rows = torch.zeros(1, 512, dtype=torch.long)
        with torch.no_grad():
            table = super().embed(self.embedding, rows)[0]
            table -= self.embedding.tokens.weight[0] * math.sqrt(self.config.d_model)
        self.register_buffer("table", table, persistent=False)

    def embed(self, part: Any, ids: Tensor) -> Tensor:
        """Token embeddings and positions."""
        if "table" not in self._buffers:
            return super().embed(part, ids)
        x = part.tokens(ids) * math.sqrt(self.config.d_model) + self.table[: ids.shape[1]]
        return F.dropout(x, self.config.dropout, self.training)


def tokens(vocabulary: int, rows: int, length: int) -> Tensor:
    """(rows, length) token numbers; the rows are evenly from half to the whole length long, the rest is padding 0."""
    ids = torch.randint(1, vocabulary, (rows, length))
    lengths = length - torch.arange(rows) * (length // 2) // max(1, rows - 1)
    return ids.masked_fill(torch.arange(length) >= lengths[:, None], 0)


class Logits(nn.Module):
    """What ``training.Objective`` computes, as a program on torch.nn writes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The sum of the loss."""
        scores = self.model(*inputs)
        return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def training_step(objective: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Callable[[], Tensor]:
    """One step, as a function that repeats it and returns the mean of the loss."""
    optimizer = torch.optim.AdamW(objective.parameters(), 1e-4, foreach=True)
    objective.train()

    def step() -> Tensor:
        loss = objective(inputs, targets) / (targets != IGNORED).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained(name: str) -> dict[str, Callable[[], object]]:
    """One training step of each implementation."""
    keep_freed_memory()  # from here on for every implementation; decoding comes before
    build, (rows, length, target_length) = TRAINED[name]
    torch.manual_seed(0)
    ours = build()
    inputs, targets = batch(ours, rows, length, target_length)
    theirs, compiled = TorchModel(ours), TorchModel(ours)
    compiled.compile()
    objectives = {"ours": training.Objective(ours), "torch": Logits(theirs), "torch.compile": Logits(compiled)}
    return {who: training_step(objective, inputs, targets) for who, objective in objectives.items()}


def batch(model: Any, rows: int, length: int, target_length: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """(inputs, targets) as the task of the model has them."""
    if target_length:
        vocabularies = model.config.source_vocab, model.config.target_vocab
        inputs = tokens(vocabularies[0], rows, length), tokens(vocabularies[1], rows, target_length)
        return inputs, inputs[1].masked_fill(inputs[1] == 0, IGNORED)
    vocabulary = model.config.vocab
    ids = tokens(vocabulary, rows, length)
    if isinstance(model, tfk.models.TransformerClassifier):
        return (ids,), torch.randint(1, 2, (rows,))
    if isinstance(model, tfk.models.MaskedLanguageModel):
        how = {"vocab_size": vocabulary, "mask_id": MASK, "first_ordinary": len(SPECIALS)}
        hidden, targets = training.mask_tokens(ids, **how, random=seeds.generator(0, "mask"))
        return (hidden,), targets
    return (ids,), ids.masked_fill(ids == 0, IGNORED)


class KeptByHand:
    """Greedy decoding by a torch.nn encoder-decoder (pre-LN), keys and values concatenated from step to step.

    They are projected by the modules' weights, past the modules: torch.nn's attention takes no projected keys.
    """

    def __init__(self, model: TorchModel) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def __call__(self, source: Tensor, new: int) -> Tensor:
        """(B, 1 + new) tokens, of which the first is 1."""
        model, decoder = self.model, self.model.transformer.decoder
        memory = model.transformer.encoder(
            model.embed(model.source_embedding, source), src_key_padding_mask=source == 0
        )
        self.begin(memory, source == 0)
        ids = torch.ones(source.shape[0], 1, dtype=torch.long)
        for at in range(new):
            x = model.embedding.tokens(ids[:, -1:]) * math.sqrt(model.config.d_model) + model.table[at]
            for number, layer in enumerate(decoder.layers):
                x = x + self.attend(number, layer.self_attn, layer.norm1(x))
                x = x + self.look_back(number, layer.multihead_attn, layer.norm2(x))
                x = x + layer.linear2(layer.activation(layer.linear1(layer.norm3(x))))
            scores = model.output(decoder.norm(x))[:, -1]
            scores[:, 0] = -math.inf
            ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
        return ids

    def begin(self, memory: Tensor, padding: Tensor) -> None:
        """A new source, encoded, and where it is padding."""
        layers = self.model.transformer.decoder.layers
        self.keep = ~padding[:, None, None, :]
        self.kept: list[Any] = [None] * len(layers)
        self.across = [heads(layer.multihead_attn, memory, slice(1, 3)) for layer in layers]

    def attend(self, number: int, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
        """Self-attention of the newest position."""
        q, k, v = heads(attention, x, slice(0, 3))
        if self.kept[number] is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.kept[number], (k, v), strict=True))
        self.kept[number] = k, v
        return joined(attention, F.scaled_dot_product_attention(q, k, v))

    def look_back(self, number: int, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
        """Cross-attention of the newest position."""
        (q,) = heads(attention, x, slice(0, 1))
        return joined(attention, F.scaled_dot_product_attention(q, *self.across[number], self.keep))


class InputsKeptByHand(KeptByHand):
    """The same with torch.nn's attention modules called as they are: what is kept are their inputs."""

    def begin(self, memory: Tensor, padding: Tensor) -> None:
        """A new source, encoded, and where it is padding."""
        self.memory, self.padding = memory, padding
        self.kept = [None] * len(self.model.transformer.decoder.layers)

    def attend(self, number: int, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
        """Self-attention of the newest position."""
        kept = x if self.kept[number] is None else torch.cat([self.kept[number], x], 1)
        self.kept[number] = kept
        return attention(x, kept, kept, need_weights=False)[0]

    def look_back(self, number: int, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
        """Cross-attention of the newest position."""
        return attention(x, self.memory, self.memory, key_padding_mask=self.padding, need_weights=False)[0]


def heads(attention: nn.MultiheadAttention, x: Tensor, which: slice) -> list[Tensor]:
    """Some of q, k, v, each (B, H, T, D)."""
    width, parts = attention.embed_dim, range(3)[which]
    rows = slice(parts[0] * width, (parts[-1] + 1) * width)
    found = F.linear(x, attention.in_proj_weight[rows], attention.in_proj_bias[rows]).chunk(len(parts), -1)
    return [part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in found]


def joined(attention: nn.MultiheadAttention, out: Tensor) -> Tensor:
    """The heads side by side, projected."""
    return attention.out_proj(out.transpose(1, 2).flatten(2))


def decoded(name: str) -> dict[str, Callable[[], object]]:
    """One decoding by each implementation."""
    torch.manual_seed(0)
    sizes, new, dtype, uncached = DECODED[name]
    model = tfk.models.TranslationTransformer(tfk.models.TranslationConfig(8000, 8000, **LAYERS, **sizes)).eval()
    source, theirs = tokens(8000, 32, 24), TorchModel(model)
    ours = lambda use_cache: tfk.generate(model, source, new, bos_id=1, use_cache=use_cache)  # noqa: E731
    by_hand = {"by hand": KeptByHand(theirs), "by hand, modules": InputsKeptByHand(theirs)}
    for who, decode in by_hand.items():
        same = (ours(True) == decode(source, new)).float().mean()  # in float32; there are ties of untrained scores
        assert same > 0.9, f"{who}: the decoders agree on {same:.0%} of the tokens only"
    model.to(dtype)
    theirs.to(dtype)
    without = {"ours, no cache": lambda: ours(False)} if uncached else {}
    runs = {who: lambda decode=decode: decode(source, new) for who, decode in by_hand.items()}
    return {"ours": lambda: ours(True), **without, **runs}


def told(name: str, seconds: whole.Seconds, known: None) -> dict[str, Any]:
    """Prints a case; what the file holds of it."""
    case: dict[str, Any] = {who: vars(timing.spread(taken)) for who, taken in seconds.items()}
    case["times"] = {
        who: 1.0 / timing.paired_ratio(seconds["ours"], taken) for who, taken in seconds.items() if who != "ours"
    }
    faster = ", ".join(f"{times:.2f}x {who}" for who, times in case["times"].items())
    print(f"{name}: {case['ours']['median'] * 1e3:.0f} ms, {faster}", flush=True)
    return case


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every case and writes the file."""
    makers = {**dict.fromkeys(DECODED, decoded), **dict.fromkeys(TRAINED, trained)}
    cases = {name: lambda name=name, make=make: (make(name), None) for name, make in makers.items()}
    return whole.program(__doc__ or "", arguments, "models", cases, PLAN, told)


if __name__ == "__main__":
    sys.exit(main())
