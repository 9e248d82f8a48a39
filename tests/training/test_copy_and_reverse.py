"""Two tasks that a Transformer must learn perfectly: to copy a sentence and to reverse it."""

import random

import pytest
import torch

from tfm_kernels import models, training
from tfm_kernels.training.loss import IGNORED

pytest.importorskip("safetensors")
LETTERS = "abcdefghij"


def pairs(task, count, longest, seed):
    choose = random.Random(seed)
    words = ["".join(choose.choices(LETTERS, k=choose.randint(3, longest))) for _ in range(count)]
    return [(word, word if task == "copy" else word[::-1]) for word in words]


def exact_match(model, examples):
    """The share of sentences that greedy decoding gets right to the last token.

    It does exactly where each next token has the largest score after the right ones: its first mistake would be one
    here.
    """
    (source, target), wanted = examples.batch(range(len(examples.lengths)), 0)
    with torch.inference_mode():
        right = (model.eval()(source, target).argmax(-1) == wanted) | (wanted == IGNORED)
    return right.all(1).double().mean().item()


def learnt(folder, task, longest, steps, width):
    vocabulary = training.CharacterVocabulary(LETTERS)
    sets = [
        training.TranslationExamples(pairs(task, count, longest, seed), vocabulary, vocabulary, 64)
        for count, seed in ((4000, 0), (200, 1))
    ]
    torch.manual_seed(0)
    size = vocabulary.size
    config = models.TranslationConfig(
        size, size, width, 4, 2, 2, dim_feedforward=2 * width, dropout=0.0, norm_first=True, max_length=64
    )
    model = models.TranslationTransformer(config)
    how = training.TrainingConfig(
        steps=steps, tokens=4096, max_examples=64, schedule="cosine", learning_rate=3e-3, warmup=50, save_every=steps
    )
    training.train(model, sets[0], how, folder, d_model=width, progress=False)
    return exact_match(model, sets[1])


def test_a_short_sentence_is_copied(tmp_path):
    assert learnt(tmp_path, "copy", 5, 300, 32) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "reverse"])
def test_sentences_are_copied_and_reversed(tmp_path, task):
    assert learnt(tmp_path, task, 10, 1200, 64) == 1.0
