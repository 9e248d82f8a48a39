"""Text to token numbers and back: characters, or byte pairs through the tokenizers library.

Five special tokens have the same numbers in both. They are never read out of a user's text: a sentence that holds
the word <mask> is spelled like any other word.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .._durable import write_json
from .text_file import InputError

SPECIALS = ("<pad>", "<start>", "<end>", "<unk>", "<mask>")
PAD, START, END, UNKNOWN, MASK = range(5)


class Vocabulary(ABC):
    """Numbers the tokens of a text; 0 to 4 are SPECIALS."""

    kind: str

    @property
    @abstractmethod
    def size(self) -> int:
        """How many tokens there are, special ones included."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The token numbers of a text, none of them special but UNKNOWN."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of token numbers; special ones are left out."""

    @abstractmethod
    def token(self, number: int) -> str:
        """One token as a label: what it is, or how it is called."""

    @abstractmethod
    def _content(self) -> Any:
        """What ``load`` needs, for JSON."""

    def same(self, other: Vocabulary) -> bool:
        """Whether both number every text alike."""
        return self.kind == other.kind and self._content() == other._content()

    def save(self, path: Path) -> None:
        """Writes the vocabulary as JSON, whole or not at all."""
        write_json(path, {"kind": self.kind, "specials": SPECIALS, "content": self._content()})


class CharacterVocabulary(Vocabulary):
    """One token a character, numbered in the order of their code points.

    Args:
        characters: what to number; duplicates count once. Anything else is UNKNOWN.

    Example:
        >>> CharacterVocabulary("banana").encode("nab!")
        [7, 5, 6, 3]
    """

    kind = "character"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        self._numbers = {character: at for at, character in enumerate(self.characters, len(SPECIALS))}

    @property
    def size(self) -> int:
        """How many tokens there are, special ones included."""
        return len(SPECIALS) + len(self.characters)

    def encode(self, text: str) -> list[int]:
        """One number a character."""
        return [self._numbers.get(character, UNKNOWN) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """The characters of the ordinary tokens."""
        return "".join(self.token(number) for number in ids if number >= len(SPECIALS))

    def token(self, number: int) -> str:
        """One token as a label."""
        return SPECIALS[number] if number < len(SPECIALS) else self.characters[number - len(SPECIALS)]

    def _content(self) -> list[str]:
        return self.characters


class BytePairVocabulary(Vocabulary):
    """Byte-pair encoding over bytes, so that no text is unknown and ``decode(encode(text))`` is the text.

    Made by ``BytePairVocabulary.train(lines, size)``.

    Args:
        tokenizer: the JSON of a ``tokenizers.Tokenizer``.

    Source: Sennrich, Haddow, Birch 2016, arXiv:1508.07909.
    """

    kind = "byte-pair"

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = _tokenizers().Tokenizer.from_str(tokenizer)
        self._tokenizer.encode_special_tokens = True  # "<mask>" in a text is text

    @classmethod
    def train(cls, lines: Iterable[str], size: int) -> BytePairVocabulary:
        """Learns the most frequent pairs of a text, the same ones each time.

        Args:
            lines: the text.
            size: tokens wanted, at least 261 (specials and bytes); a short text may give fewer.
        """
        library = _tokenizers()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        if size < len(SPECIALS) + len(alphabet):
            raise InputError(f"the vocabulary size must be at least {len(SPECIALS) + len(alphabet)}, got {size}")
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIALS), initial_alphabet=sorted(alphabet), show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer.to_str())

    @property
    def size(self) -> int:
        """How many tokens there are, special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The numbers of the text's byte pairs."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ordinary tokens."""
        return self._tokenizer.decode([number for number in ids if number >= len(SPECIALS)])

    def token(self, number: int) -> str:
        """One token as a label, its bytes as text where they are a character."""
        return SPECIALS[number] if number < len(SPECIALS) else self._tokenizer.decode([number])

    def _content(self) -> Any:
        return json.loads(self._tokenizer.to_str())


def make(unit: str, lines: Sequence[str], size: int) -> Vocabulary:
    """A vocabulary of a text: unit "character", or "byte-pair" with at most ``size`` tokens."""
    if unit == "character":
        return CharacterVocabulary(character for line in lines for character in line)
    return BytePairVocabulary.train(lines, size)


def load(path: Path) -> Vocabulary:
    """The vocabulary that ``save`` wrote.

    Raises:
        InputError: the file is not one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if tuple(data["specials"]) != SPECIALS:
            raise ValueError(f"its special tokens are {data['specials']}")
        if data["kind"] == CharacterVocabulary.kind:
            if not all(isinstance(character, str) and len(character) == 1 for character in data["content"]):
                raise ValueError("its content must be characters")
            return CharacterVocabulary(data["content"])
        content = json.dumps(data["content"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a vocabulary of this library ({error})") from error
    try:
        return BytePairVocabulary(content)
    except InputError:  # tokenizers is missing
        raise
    except Exception as error:  # the library raises no class of its own
        raise InputError(f"{path} is not a vocabulary of this library ({error})") from error


def _tokenizers() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401  (submodules load lazily)
    except ImportError as error:
        raise InputError("byte pairs need the package tokenizers; `pip install tokenizers` brings it") from error
    return tokenizers
