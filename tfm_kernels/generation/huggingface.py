"""transformers' models as decoders: their own forwards and cache classes, self-attention's cache in reserved memory.

transformers is never imported here: a model of it has imported it already.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..nn.cache import Reserved, moves

_NAME = "generate"


@dataclass(frozen=True)
class Facts:
    """What a model's configurations say about generating with it."""

    encoder_decoder: bool
    vocab: int
    pad_id: int | None
    start_id: int | None
    stops: list[int]
    max_length: int | None


def facts(model: Any) -> Facts:
    """Reads the configurations; refuses a model without a head over tokens."""
    config, told = model.config, getattr(model, "generation_config", None)
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise ValueError(
            f"{_NAME}: model must give scores of next tokens, as GPT2LMHeadModel does, got {type(model).__name__}"
        )

    def known(found: Iterable[Any]) -> list[int]:  # -1 and the like are none
        numbers = (operator.index(each) for each in found if each is not None)
        return [number for number in numbers if 0 <= number < vocab]

    def token(name: str) -> Any:
        found = getattr(told, name, None)
        return getattr(config, name, None) if found is None else found

    vocab = model.get_output_embeddings().weight.shape[0]
    stops = getattr(config if told is None else told, "eos_token_id", None)  # None where it was taken away
    stops = stops.flatten() if isinstance(stops, Tensor) else stops if isinstance(stops, (list, tuple)) else [stops]
    longest = getattr(config, "max_position_embeddings", None)
    return Facts(
        encoder_decoder=bool(config.is_encoder_decoder),
        vocab=vocab,
        pad_id=next(iter(known([token("pad_token_id")])), None),
        start_id=token("decoder_start_token_id"),
        stops=sorted(known(stops)),
        max_length=longest if longest is None or longest > 0 else None,
    )


def decoder(
    model: Any, known: Facts, size: int, source: tuple[Tensor, Tensor | None] | None, use_cache: bool
) -> _Decoder | _ByLength:
    """The decoder of one ``generate`` call; of an encoder-decoder with its source, and which of that is no padding."""
    make = functools.partial(_Decoder, model, known, size, source, use_cache)
    return make() if known.encoder_decoder or _leaves_padding_out(model) else _ByLength(make)


def _leaves_padding_out(model: Any) -> bool:
    """Whether positions can be told, from 0, so that padding before a prompt shifts none; ALiBi has none to tell."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return model.config.model_type in ("bloom", "mpt")
    return not any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())  # as RoBERTa


class _Decoder:
    """See ``decoder.Decoder``. Prompts of different lengths stand on the right, so that all rows end in one column."""

    def __init__(
        self, model: Any, known: Facts, size: int, source: tuple[Tensor, Tensor | None] | None, use_cache: bool
    ) -> None:
        self.model = model
        self.keep: Tensor | None = None
        self.cache: Any = None
        self.name = "decoder_input_ids" if known.encoder_decoder else "input_ids"
        self.encoder_decoder = known.encoder_decoder
        named = inspect.signature(model.forward).parameters  # "past_key_values" until transformers 5.23
        keyword = next((name for name in ("cache", "past_key_values") if name in named), None)
        self.told: dict[str, Any] = {"use_cache": use_cache and keyword is not None}
        if "logits_to_keep" in named and not known.encoder_decoder:  # those of a whole prompt would take gigabytes
            self.told["logits_to_keep"] = 1
        if use_cache and keyword is not None:
            self.cache = self.told[keyword] = _cache(model, size, known.encoder_decoder)
        self.ids: Tensor | None = None
        if known.encoder_decoder:
            assert source is not None
            ids, tokens = source
            keep = torch.ones_like(ids) if tokens is None else tokens.long()
            self.told["encoder_outputs"] = model.get_encoder()(input_ids=ids, attention_mask=keep)
            self.told["attention_mask"] = keep

    def start(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        if lengths is not None:
            shift = (ids.shape[1] - lengths).unsqueeze(1)
            columns = torch.arange(ids.shape[1], device=ids.device) - shift
            self.keep = (columns >= 0).long()
            ids = ids.gather(1, columns.clamp(min=0))
        self.ids = ids
        return self._scores(ids)

    def step(self, tokens: Tensor) -> Tensor:
        assert self.ids is not None
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        if self.keep is not None:
            self.keep = torch.cat([self.keep, torch.ones_like(self.keep[:, :1])], 1)
        return self._scores(self.ids if self.cache is None else tokens[:, None])

    def expand(self, times: int) -> None:
        self._each(lambda t: t.repeat_interleave(times, 0))
        if not all(hasattr(layer, "batch_repeat_interleave") for layers in self._layers() for layer in layers):
            self._forget()
        for layers in self._layers():
            for layer in layers:
                layer.batch_repeat_interleave(times)

    def reorder(self, index: Tensor) -> None:
        assert self.ids is not None
        self.ids = self.ids[index]
        self.keep = None if self.keep is None else self.keep[index]
        for layer in self._layers()[0] if self.cache is not None else ():  # beams share what is of their source
            layer.reorder_cache(index)

    def _forget(self) -> None:
        """Goes on without the cache, from the tokens."""
        self.told = {name: given for name, given in self.told.items() if given is not self.cache}
        self.told["use_cache"], self.cache = False, None

    def _layers(self) -> list[list[Any]]:
        if self.cache is None:
            return []
        if not self.encoder_decoder:
            return [self.cache.layers]
        return [self.cache.self_attention_cache.layers, self.cache.cross_attention_cache.layers]

    def _each(self, change: Any) -> None:
        self.ids = change(self.ids)
        self.keep = None if self.keep is None else change(self.keep)
        if self.encoder_decoder:
            memory = self.told["encoder_outputs"]
            self.told["encoder_outputs"] = type(memory)(last_hidden_state=change(memory.last_hidden_state))
            self.told["attention_mask"] = change(self.told["attention_mask"])

    def _scores(self, ids: Tensor) -> Tensor:
        told = dict(self.told)
        if self.keep is not None:
            told["attention_mask"] = self.keep
            told["position_ids"] = (self.keep.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(**{self.name: ids}, **told).logits[:, -1]


class _ByLength:
    """One decoder for the prompts of each length: for models that count the padding before a prompt as positions."""

    def __init__(self, make: Callable[[], _Decoder]) -> None:
        self.make = make
        self.decoders: list[_Decoder] = []
        self.rows: list[Tensor] = []  # of each decoder

    def start(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        if lengths is None:
            lengths = torch.full_like(ids[:, 0], ids.shape[1])
        found = lengths.unique().tolist()
        self.decoders = [self.make() for _ in found]
        self.rows = [(lengths == length).nonzero().squeeze(1) for length in found]
        each = zip(self.decoders, self.rows, found, strict=True)
        return self._joined([decoder.start(ids[rows, :length], None) for decoder, rows, length in each])

    def step(self, tokens: Tensor) -> Tensor:
        return self._joined([d.step(tokens[rows]) for d, rows in zip(self.decoders, self.rows, strict=True)])

    def expand(self, times: int) -> None:
        for each in self.decoders:
            each.expand(times)
        beams = torch.arange(times, device=self.rows[0].device)
        self.rows = [(rows[:, None] * times + beams).flatten() for rows in self.rows]

    def reorder(self, index: Tensor) -> None:
        place = torch.empty_like(index)  # of a row among those of its decoder, which beams do not leave
        for each, rows in zip(self.decoders, self.rows, strict=True):
            place[rows] = torch.arange(len(rows), device=index.device)
            each.reorder(place[index[rows]])

    def _joined(self, scores: list[Tensor]) -> Tensor:
        joined = scores[0].new_empty(sum(map(len, scores)), scores[0].shape[1])
        for rows, given in zip(self.rows, scores, strict=True):
            joined[rows] = given
        return joined


def _cache(model: Any, size: int, encoder_decoder: bool) -> Any:
    """A cache in reserved memory; transformers' own where layers keep more than keys and values, as recurrent ones."""
    library: Any = sys.modules["transformers"].cache_utils
    if not encoder_decoder:
        own = library.DynamicCache(config=model.config)
        if any(type(layer) not in (library.DynamicLayer, library.DynamicSlidingWindowLayer) for layer in own.layers):
            return own
    reserved = library.Cache(layer_class_to_replicate=functools.partial(_layer_class(library), size))
    return library.EncoderDecoderCache(reserved, library.DynamicCache()) if encoder_decoder else reserved


@functools.cache
def _layer_class(library: Any) -> type:
    class ReservedLayer(library.DynamicLayer):
        """A layer of transformers' dynamic cache that grows in reserved memory instead of being concatenated."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            self.reserved = Reserved(key_states, value_states, self.size)

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.keys, self.values = self.reserved.write(key_states, value_states, self.get_seq_length())
            return self.keys, self.values

        def batch_repeat_interleave(self, repeats: int) -> None:
            self.reserved.expand(repeats)
            self._look(self.get_seq_length())

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self.reserved.copy_rows(*moves(beam_idx), self.get_seq_length())
            self._look(self.get_seq_length())

        def _look(self, length: int) -> None:
            self.keys, self.values = self.reserved.first(length)

    return ReservedLayer
