"""The same models written on torch.nn alone, with the same parameter names, and small models of every kind."""

import math

import torch
from torch import nn

import tfm_kernels as tfk

SMALL = {"d_model": 16, "nhead": 4, "dim_feedforward": 24, "dropout": 0.0, "max_length": 40}
V, VT = 23, 19
KINDS = ("translation", "classifier", "masked", "causal")


def small(kind, *, layers=2, dtype=None, backend="cpu", **changes):
    """A model of few weights; those of norms and biases are random too, so that none is left out unseen."""
    settings = {**SMALL, **changes}
    torch.manual_seed(0)
    build = {"dtype": dtype, "backend": backend}
    if kind == "translation":
        target = V if settings.get("share_embeddings") else VT
        stacks = {"num_encoder_layers": layers, "num_decoder_layers": layers}
        config = tfk.models.TranslationConfig(V, target, **stacks, **settings)
        model = tfk.models.TranslationTransformer(config, **build)
    elif kind == "classifier":
        model = tfk.models.TransformerClassifier(tfk.models.ClassifierConfig(V, 3, layers, **settings), **build)
    elif kind == "masked":
        model = tfk.models.MaskedLanguageModel(tfk.models.MaskedLanguageConfig(V, layers, **settings), **build)
    else:
        model = tfk.models.CausalLanguageModel(tfk.models.CausalLanguageConfig(V, layers, **settings), **build)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, float("norm" in name and "weight" in name), 0.3)
    return model.eval()


def inputs(kind, lengths=(6, 4, 7), target_lengths=(5, 6, 3)):
    """The token numbers for one call, padded on the right with 0."""
    torch.manual_seed(1)
    both = [(lengths, V)] + ([(target_lengths, VT)] if kind == "translation" else [])
    found = []
    for wanted, vocab in both:
        ids = torch.randint(1, vocab, (len(wanted), max(wanted)))
        found.append(ids.masked_fill(torch.arange(max(wanted)) >= torch.tensor(wanted)[:, None], 0))
    return found


def tokens(kind, ids):
    """Where the outputs for ``ids`` count: (B, T) bool, or everything for a classifier."""
    return slice(None) if kind == "classifier" else ids[-1] != 0


class Peer(nn.Module):
    """One of our models from torch.nn's layers; the state_dict is ours."""

    def __init__(self, model):
        super().__init__()
        config, kind = model.config, type(model).__name__
        self.config, self.kind = config, kind
        like = {"batch_first": True, "norm_first": config.norm_first, "dtype": model.output.weight.dtype}
        sizes = config.d_model, config.nhead
        more = (config.dim_feedforward, config.dropout, config.activation)
        if kind == "TranslationTransformer":
            self.source_embedding = embedding(model.source_embedding)
            layers = config.num_encoder_layers, config.num_decoder_layers
            self.transformer = nn.Transformer(*sizes, *layers, *more, bias=config.bias, **like)
            if not config.has_final_norm:
                self.transformer.encoder.norm = self.transformer.decoder.norm = None
        else:
            layer = nn.TransformerEncoderLayer(*sizes, *more, bias=config.bias, **like)
            norm = nn.LayerNorm(config.d_model, bias=config.bias, dtype=like["dtype"])
            final = norm if config.has_final_norm else None
            self.encoder = nn.TransformerEncoder(layer, config.num_layers, final, enable_nested_tensor=False)
        self.embedding = embedding(model.embedding)
        self.output = nn.Linear(config.d_model, model.output.out_features, dtype=like["dtype"])
        if config.share_embeddings:
            self.output.weight = self.embedding.tokens.weight
            if kind == "TranslationTransformer":
                self.source_embedding.tokens.weight = self.embedding.tokens.weight
        self.load_state_dict(model.state_dict(), strict=True)

    def embed(self, part, ids):
        x = part.tokens(ids) * math.sqrt(self.config.d_model)
        if hasattr(part, "positions"):
            return x + part.positions.weight[: ids.shape[1]]
        width = self.config.d_model
        table = [
            [(math.cos if e % 2 else math.sin)(t / 10000 ** ((e - e % 2) / width)) for e in range(width)]
            for t in range(ids.shape[1])
        ]
        return x + torch.tensor(table, dtype=torch.float64).to(x.dtype)

    def forward(self, *ids):
        pads = [given == 0 for given in ids]
        future = torch.ones(ids[-1].shape[1], ids[-1].shape[1], dtype=torch.bool).triu(1)
        x = self.embed(self.embedding, ids[-1])
        if self.kind == "TranslationTransformer":
            x = self.transformer(
                self.embed(self.source_embedding, ids[0]),
                x,
                tgt_mask=future,
                src_key_padding_mask=pads[0],
                tgt_key_padding_mask=pads[1],
                memory_key_padding_mask=pads[0],
            )
        else:
            causal = self.kind == "CausalLanguageModel"
            x = self.encoder(x, mask=future if causal else None, src_key_padding_mask=pads[0])
        if self.kind == "TransformerClassifier":
            if self.config.pooling == "first":
                x = x[:, 0]
            else:
                x = torch.stack([row[~pad].mean(0) for row, pad in zip(x, pads[0], strict=True)])
        return self.output(x)


def embedding(ours):
    part = nn.Module()
    part.tokens = nn.Embedding(*ours.tokens.weight.shape, padding_idx=0, dtype=ours.tokens.weight.dtype)
    if hasattr(ours.positions, "weight"):
        part.positions = nn.Module()
        part.positions.weight = nn.Parameter(ours.positions.weight.detach().clone())
    return part
