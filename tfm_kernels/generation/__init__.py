"""Decoding with a model: greedy, sampling and beam search, with keys and values kept from step to step."""

from .generate import generate as generate
