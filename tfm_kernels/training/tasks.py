"""From users' files to everything that the loop needs, for each of the four tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .examples import Examples, LabelledExamples, LineExamples, MaskedExamples, StreamExamples, TranslationExamples
from .run_folder import digest
from .text_file import InputError, read_labelled, read_parallel, read_sentences, read_text
from .vocabulary import END, PAD, SPECIALS, START, Vocabulary, make


@dataclass(frozen=True)
class Text:
    """How text becomes tokens.

    Attributes:
        unit: "character" or "byte-pair".
        size: tokens wanted of byte pairs.
        max_length: of an example, in tokens.
    """

    unit: str = "byte-pair"
    size: int = 8000
    max_length: int = 256


@dataclass(frozen=True)
class Job:
    """What is to be trained on what.

    Attributes:
        task: as the command is called.
        sizes: of the model, by the names of its configuration.
        vocabularies: by name.
        examples: to learn from.
        validation: to validate with, None for none.
        data: a digest of each file.
        labels: of a classifier.
        baseline: what guessing reaches on the validation.
        remarks: what the user should know of the data.
        by_line: whether each example is a whole line, with a start and an end.
        hold_out: the part of the text that is kept for validation, None where that is not how it is chosen.
    """

    task: str
    sizes: dict[str, Any]
    vocabularies: dict[str, Vocabulary]
    examples: Examples
    validation: Examples | None
    data: dict[str, str]
    labels: list[str] = field(default_factory=list)
    baseline: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    by_line: bool = False
    hold_out: float | None = None

    def settings(self, training: dict[str, Any]) -> dict[str, Any]:
        """What config.json holds."""
        data = {"data": self.data, "labels": self.labels, "by_line": self.by_line, "hold_out": self.hold_out}
        return {"task": self.task, "model": self.sizes, "training": training, **data}


def translation(
    source: str, target: str, validation: Sequence[str], text: Text, layers: int, sizes: dict[str, Any]
) -> Job:
    """Two files, one sentence a line, line n of one the translation of line n of the other.

    Args:
        source: path.
        target: path.
        validation: two more paths, or none.
        text: how it becomes tokens; shared embeddings mean one vocabulary.
        layers: of encoder and of decoder.
        sizes: of the model.

    Raises:
        InputError: a file is bad or does not fit the other.
    """
    pairs = read_parallel(source, target)
    held = read_parallel(*validation) if validation else []
    columns = [one for one, _ in pairs], [other for _, other in pairs]
    if sizes["share_embeddings"]:
        one = other = make(text.unit, [*columns[0], *columns[1]], text.size)
    else:
        one, other = (make(text.unit, column, text.size) for column in columns)
    examples = TranslationExamples(pairs, one, other, text.max_length)
    remarks = _counts(examples, "pairs")
    if examples.left_out:
        remarks.append(f"{examples.left_out:,} pairs of more than {text.max_length} tokens are left out")
    sizes = {"source_vocab": one.size, "target_vocab": other.size, **sizes}
    return Job(
        "translate",
        {**sizes, "num_encoder_layers": layers, "num_decoder_layers": layers, "pad_id": PAD},
        {"source": one, "target": other},
        examples,
        TranslationExamples(held, one, other, text.max_length) if held else None,
        _digests(source, target, *validation),
        remarks=remarks,
    )


def classification(path: str, validation: str | None, text: Text, layers: int, sizes: dict[str, Any]) -> Job:
    """A file with a text, a tab and a label in each line. Arguments and errors as ``translation``."""
    rows = read_labelled(path)
    labels = sorted({label for _, label in rows})
    if len(labels) < 2:
        raise InputError(f"{path} must have at least two different labels, got only {labels[0]!r}")
    vocabulary = make(text.unit, [row for row, _ in rows], text.size)
    held, baseline = None, {}
    if validation:
        heard = read_labelled(validation)
        held = LabelledExamples(heard, vocabulary, labels, text.max_length, validation)
        majority = Counter(label for _, label in rows).most_common(1)[0][0]
        baseline["majority_accuracy"] = sum(label == majority for _, label in heard) / len(heard)
    examples = LabelledExamples(rows, vocabulary, labels, text.max_length)
    return Job(
        "classify",
        {"vocab": vocabulary.size, "num_classes": len(labels), **sizes, "num_layers": layers, "pad_id": PAD},
        {"text": vocabulary},
        examples,
        held,
        _digests(path, validation),
        labels,
        baseline,
        [*_counts(examples, f"texts with the labels {', '.join(labels)}"), *_cuts(examples, text)],
    )


def masked_lm(path: str, validation: str | None, text: Text, layers: int, sizes: dict[str, Any], seed: int) -> Job:
    """A file of plain text, one sentence a line. ``seed`` is of the masks; the rest as ``translation``."""
    lines = read_sentences(path)
    vocabulary = make(text.unit, lines, text.size)
    examples = MaskedExamples(lines, vocabulary, text.max_length, seed)
    held, baseline = None, {}
    if validation:
        held = MaskedExamples(read_sentences(validation), vocabulary, text.max_length, seed)
        counts = Counter(token for at in range(len(lines)) for token in examples.rows[at] if token >= len(SPECIALS))
        _, hidden = held.batch(range(len(held.rows)), 0)
        hidden = hidden[hidden >= 0]
        if not len(hidden):
            raise InputError(
                f"{validation} is so short that none of its {sum(held.lengths):,} tokens is masked; more lines or "
                f"another --seed are needed"
            )
        baseline["unigram_accuracy"] = float((hidden == counts.most_common(1)[0][0]).double().mean())
    return Job(
        "masked-lm",
        {"vocab": vocabulary.size, **sizes, "num_layers": layers, "pad_id": PAD},
        {"text": vocabulary},
        examples,
        held,
        _digests(path, validation),
        baseline=baseline,
        remarks=[*_counts(examples, "lines"), *_cuts(examples, text)],
    )


def causal_lm(
    path: str,
    validation: str | None,
    hold_out: float,
    by_line: bool,
    text: Text,
    layers: int,
    sizes: dict[str, Any],
    seed: int,
) -> Job:
    """A file of plain text, as one stream or line by line.

    Args:
        path: of the text.
        validation: of another one, or None.
        hold_out: without ``validation``, the last part of the text that is kept for it, 0 to 1.
        by_line: each line is an example of its own, with a start and an end.
        text: how it becomes tokens; its max_length is the context.
        layers: of the model.
        sizes: of the model.
        seed: of where windows begin.

    Raises:
        InputError: a file is bad, or too short for the context.
    """
    whole = read_text(path)
    cut = round(len(whole) * (1.0 - hold_out)) if validation is None else len(whole)
    cut = whole.rfind("\n", 0, cut) + 1 if by_line and cut < len(whole) else cut  # no line is cut in two
    learnt, held = whole[:cut], read_text(validation) if validation else whole[cut:]
    vocabulary = make(text.unit, [whole] if text.unit == "character" else learnt.splitlines(True), text.size)

    def examples(content: str, seed: int | None, part: str, way_out: str) -> Examples:
        if by_line:
            lines = [line.strip() for line in content.split("\n") if line.strip()]
            if not lines:
                raise InputError(f"{path} has no line left for {'training' if seed is not None else 'validation'}")
            return LineExamples(lines, vocabulary, text.max_length)
        try:
            return StreamExamples([START, *vocabulary.encode(content), END], text.max_length, seed, part)
        except InputError as error:
            raise InputError(f"{error}; a smaller --max-length {way_out}") from error

    parted = validation is None and hold_out > 0.0
    learning = examples(learnt, seed, f"the part of {path} to learn from" if parted else path, "is one way out")
    if validation is not None:
        last = validation, "is one way out"
    else:
        last = f"the held-out part of {path}", "or a larger --hold-out is one way out, --hold-out 0 holds nothing out"
    return Job(
        "causal-lm",
        {"vocab": vocabulary.size, **sizes, "num_layers": layers, "pad_id": PAD},
        {"text": vocabulary},
        learning,
        examples(held, None, *last) if held.strip() else None,
        _digests(path, validation),
        remarks=[
            *_counts(learning, "lines" if by_line else f"windows of {text.max_length} tokens"),
            *(_cuts(learning, text) if isinstance(learning, LineExamples) else []),
        ],
        by_line=by_line,
        hold_out=hold_out if validation is None else None,
    )


def _counts(examples: Examples, what: str) -> list[str]:
    return [f"{len(examples.lengths):,} {what}, {sum(examples.lengths):,} tokens"]


def _cuts(examples: LabelledExamples | MaskedExamples | LineExamples, text: Text) -> list[str]:
    return [f"{examples.cut:,} of them cut at --max-length {text.max_length:,}"] if examples.cut else []


def _digests(*paths: str | None) -> dict[str, str]:
    return {f"file {number}": digest(path) for number, path in enumerate(filter(None, paths), 1)}
