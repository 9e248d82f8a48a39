"""Two tiny language models with dropout and tied weights, their data, and a program that trains one and may die.

One is a module of the user's that gives logits; the other is tfm_kernels' masked one, which is trained without them.

python -m tests.training.toy FOLDER [--kind masked] [--die POINT] [--strategy ddp] [--accumulation 2]
    [--precision bf16] [--dropout 0]
"""

import argparse
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels import _durable as durable
from tfm_kernels import training
from tfm_kernels.training import loop

WIDTH = 16
CONFIG = training.TrainingConfig(
    steps=12, tokens=96, warmup=4, weight_decay=0.1, smoothing=0.1, save_every=4, learning_rate=0.05, schedule="cosine"
)
TEXT = ["to be or not to be", "that is the question", "whether", "tis nobler in the mind to suffer", "the slings", "a"]


class Toy(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.embedding = nn.Embedding(size, WIDTH)
        self.layers = nn.ModuleList(
            tfk.nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, size)
        self.out.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=causal, is_causal=True)
        return self.out(x)


def examples():
    vocabulary = training.CharacterVocabulary("".join(TEXT))
    return training.LineExamples(TEXT * 3, vocabulary, 40), vocabulary.size


def masked():
    vocabulary = training.CharacterVocabulary("".join(TEXT))
    return training.MaskedExamples(TEXT * 3, vocabulary, 40, seed=1), vocabulary.size


def masked_model(size, dropout):
    sizes = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 32, "dropout": dropout, "share_embeddings": True}
    return tfk.models.MaskedLanguageModel(tfk.models.MaskedLanguageConfig(size, 2, max_length=40, **sizes))


KINDS = {"causal": (examples, Toy), "masked": (masked, masked_model)}


def run(folder, config=CONFIG, dropout=0.1, processes=None, kind="causal"):
    read, build = KINDS[kind]
    data, size = read()
    torch.manual_seed(3)
    model = build(size, dropout)
    training.train(
        model, data, config, Path(folder), d_model=WIDTH, validation=data, processes=processes, progress=False
    )
    return model


def losses(folder):
    """Everything measured but the time it took."""
    rows = loop.curve.read(Path(folder) / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function, call):
    """The function, but its call of this number (from 1) kills the process instead."""
    calls = iter(range(1, 10**6))
    return lambda *arguments, **options: (die if next(calls) == call else function)(*arguments, **options)


def arm(point):
    """Makes the process kill itself: in a step, in a write, before a rename, between a checkpoint and the clean-up."""
    where, _, call = point.partition(":")
    call = int(call)
    if where == "batch":
        for data in training.LineExamples, training.MaskedExamples:
            data.batch = dying(data.batch, call)
    elif where == "write":  # half of a checkpoint's files are there
        durable.sync = dying(durable.sync, call)
    elif where == "rename":
        os.rename = dying(os.rename, call)
    elif where == "remove":
        shutil.rmtree = dying(shutil.rmtree, call)
    elif where == "validation":
        loop.evaluate = dying(loop.evaluate, call)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kind", choices=KINDS, default="causal")
    parser.add_argument("--die")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--accumulation", type=int, default=1)
    options = parser.parse_args()
    if options.die:
        arm(options.die)
    torch.set_num_threads(1)
    config = replace(CONFIG, strategy=options.strategy, precision=options.precision, accumulation=options.accumulation)
    with training.processes("cpu") as here:
        run(options.folder, config, options.dropout, here, options.kind)


if __name__ == "__main__":
    main()
