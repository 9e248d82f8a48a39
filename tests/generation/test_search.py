"""Beam search against all continuations there are; sampling; stop tokens; seeds; bad input."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.models.peers import inputs, small
from tests.patching.models import transformers
from tfm_kernels.generation.beam import beam_search
from tfm_kernels.generation.sampling import shaped

V, STEPS = 5, 4


class Chain:
    """A decoder whose next scores depend on all tokens so far, by a table; it can be asked for every sequence."""

    def __init__(self, batch, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.tables = torch.randn(batch, STEPS + 1, V, V, generator=generator, dtype=torch.float64) * 2.0
        self.rows, self.batch = [()] * batch, batch

    def scores(self, sentence, tokens):
        table = self.tables[sentence]
        found = table[0, 0].clone()
        for t, token in enumerate(tokens):
            found = found * 0.7 + table[t + 1, token]
        return found

    def _all(self):
        times = len(self.rows) // self.batch
        return torch.stack([self.scores(i // times, row) for i, row in enumerate(self.rows)])

    def start(self, ids=None, lengths=None):
        return self._all()

    def step(self, tokens):
        self.rows = [(*row, int(token)) for row, token in zip(self.rows, tokens, strict=True)]
        return self._all()

    def expand(self, times):
        self.rows = [row for row in self.rows for _ in range(times)]

    def reorder(self, index):
        self.rows = [self.rows[i] for i in index]

    def value(self, sentence, tokens, penalty):
        total = sum(self.scores(sentence, tokens[:t]).log_softmax(-1)[token].item() for t, token in enumerate(tokens))
        return total / len(tokens) ** penalty

    def best(self, sentence, stops, penalty):
        """The best of all continuations, looked at one by one."""
        complete = []
        for length in range(1, STEPS + 1):
            for tokens in itertools.product(range(V), repeat=length):
                inner = any(token in stops for token in tokens[:-1])
                if not inner and (length == STEPS or tokens[-1] in stops):
                    complete.append(tokens)
        return max(complete, key=lambda tokens: self.value(sentence, tokens, penalty))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("stops", [[], [3], [1, 3]])
def test_wide_beams_find_the_best_of_all_continuations(stops, penalty):
    chain = Chain(3)
    tokens, counts = beam_search(chain, chain.start(), STEPS, V**STEPS, penalty, stops)
    for sentence in range(3):
        found = tuple(tokens[sentence, : counts[sentence]].tolist())
        assert found == chain.best(sentence, stops, penalty)


def by_hand(chain, sentence, beams, stops, penalty):
    """Beam search over Python lists; of the chain only its scores are asked for."""
    running, best = [((), 0.0)], (-float("inf"), ())
    for length in range(1, STEPS + 1):
        ranked = []
        for tokens, total in running:
            scores = chain.scores(sentence, tokens).log_softmax(-1)
            ranked += [((*tokens, token), total + scores[token].item()) for token in range(V)]
        ranked.sort(key=lambda pair: -pair[1])
        for tokens, total in ranked[:beams]:
            if tokens[-1] in stops or length == STEPS:
                best = max(best, (total / length**penalty, tokens))
        running = [pair for pair in ranked if pair[0][-1] not in stops][:beams]
    return best[1]


@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize(
    ("penalty", "batch", "seeds"),
    [
        (0.0, 3, range(4)),
        (1.0, 3, range(4)),
        (-0.5, 3, range(4)),
        (2.0, 1, [4, 6, 8, 14]),  # one sentence: no other one keeps the search going
        (-2.0, 3, [45, 50]),
    ],
)
@pytest.mark.parametrize("stops", [[], [3], [1, 3], [1, 2, 3]])
def test_beam_search_by_hand(stops, penalty, batch, seeds, beams):
    """The early end changes no result: by hand every search goes on to the last step."""
    for seed in seeds:
        chain = Chain(batch, seed)
        tokens, counts = beam_search(chain, chain.start(), STEPS, beams, penalty, stops)
        for sentence in range(batch):
            found = tuple(tokens[sentence, : counts[sentence]].tolist())
            assert found == by_hand(chain, sentence, beams, stops, penalty)


@pytest.mark.parametrize("seed", [1, 5, 6])
def test_beams_of_a_model_that_counts_padding_by_hand(seed):
    """Its prompts are decoded length by length, and each beam goes on from its own tokens."""
    hf = transformers()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.RobertaConfig(
        **sizes, vocab_size=V, max_position_embeddings=20, initializer_range=0.5, is_decoder=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = hf.RobertaForCausalLM(config).double().eval()
    prompts = [(1, 2, 3), (4, 1), (2, 2, 4), (3, 4)]

    @torch.no_grad()
    def scores(sentence, tokens):
        found = model(torch.tensor([[*prompts[sentence], *tokens]]), use_cache=False).logits[0, -1]
        return found.index_fill(0, torch.tensor([0]), -torch.inf)  # never padding

    ids = nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    found = tfk.generate(model, ids, STEPS, num_beams=3).tolist()
    for sentence, (row, prompt) in enumerate(zip(found, prompts, strict=True)):
        best = by_hand(SimpleNamespace(scores=scores), sentence, 3, [], 1.0)
        assert row == [*prompt, *best] + [0] * (3 - len(prompt))


def test_beams_are_better_than_greed():
    model, ids = small("causal", dtype=torch.float64), inputs("causal")[0][2:]

    def total(row):
        scores = model(row[None])[0].clone()
        scores[:, 0] = -torch.inf
        steps = range(ids.shape[1], len(row))
        return sum(scores[t - 1].log_softmax(-1)[row[t]].item() for t in steps)

    with torch.no_grad():
        greedy, wide = (tfk.generate(model, ids, 6, num_beams=k)[0] for k in (1, 20))
        assert total(wide) >= total(greedy) - 1e-9


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_temperature_top_k_and_top_p():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    scores = p.log()
    for settings, expected in [
        ((1.0, None, None), [0.4, 0.3, 0.2, 0.1]),
        ((0.5, None, None), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ((1.0, 2, None), [4 / 7, 3 / 7, 0.0, 0.0]),
        ((1.0, 9, None), [0.4, 0.3, 0.2, 0.1]),
        ((1.0, None, 0.1), [1.0, 0.0, 0.0, 0.0]),
        ((1.0, None, 0.69), [4 / 7, 3 / 7, 0.0, 0.0]),
        ((1.0, None, 0.71), [4 / 9, 3 / 9, 2 / 9, 0.0]),
        ((1.0, None, 1.0), [0.4, 0.3, 0.2, 0.1]),
        ((1.0, 3, 0.75), [4 / 7, 3 / 7, 0.0, 0.0]),  # of the three, 4/9 + 3/9 reaches 0.75
        ((0.5, 3, 0.5), [1.0, 0.0, 0.0, 0.0]),
    ]:
        torch.testing.assert_close(shaped(scores, *settings), torch.tensor([expected], dtype=torch.float64))
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(shaped(scores[:, order], 1.0, 2)[0], torch.tensor([0.0, 4 / 7, 0.0, 3 / 7]).double())
    equal = torch.zeros(1, 64)  # so many that a sort which is not stable moves them
    assert shaped(equal, 1.0, 2).tolist() == [[0.5] * 2 + [0.0] * 62]
    assert shaped(equal, 1.0, None, 0.25).tolist() == [[1 / 16] * 16 + [0.0] * 48]  # 16 reach a quarter exactly
    assert shaped(torch.tensor([[9.0, 1.0]]), 1e-38).tolist() == [[1.0, 0.0]]


def test_tokens_are_drawn_from_that_distribution():
    """20,000 draws of one next token; chi-square of the counts below its 99.9 % point."""
    model = small("causal")
    ids = torch.full((20000, 2), 4)
    settings = {"temperature": 1.5, "top_k": 8, "top_p": 0.9}
    torch.manual_seed(0)
    drawn = tfk.generate(model, ids, 1, do_sample=True, **settings)[:, 2]
    with torch.no_grad():
        scores = model(ids[:1])[:, -1]
    scores[:, 0] = -torch.inf
    expected = shaped(scores, **settings)[0] * len(drawn)
    counts = torch.bincount(drawn, minlength=len(expected)).float()
    possible = expected > 0
    assert 2 < possible.sum() < 9 and not counts[~possible].any()
    chi = ((counts - expected)[possible].square() / expected[possible]).sum()
    assert chi < {3: 13.8, 4: 16.3, 5: 18.5, 6: 20.5, 7: 22.5, 8: 24.3}[int(possible.sum())]


def test_a_seed_repeats():
    model, ids = small("translation"), inputs("translation")[0]

    def draw(seed, **more):
        torch.manual_seed(seed)
        return tfk.generate(model, ids, 8, bos_id=1, do_sample=True, **more)

    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))
    assert torch.equal(draw(3), draw(3, use_cache=False))
    greedy = tfk.generate(model, ids, 8, bos_id=1)
    assert torch.equal(draw(3, top_k=1), greedy) and torch.equal(draw(3, temperature=1e-4), greedy)


# --- where rows end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_tokens(beams):
    model, ids = small("causal"), inputs("causal")[0]
    free = tfk.generate(model, ids, 10, num_beams=1)
    stop = int(free[0, 9])  # the first row's fourth new token
    found = tfk.generate(model, ids, 10, eos_id=stop, num_beams=beams)
    several = tfk.generate(model, ids, 10, eos_id=[stop, 22], num_beams=beams)
    for row, given in zip(found, ids, strict=True):
        new = row[int((given != 0).sum()) :]
        at = (new == stop).nonzero()
        if len(at):
            assert len(at) == 1 and not new[int(at[0]) + 1 :].any()
    if beams == 1:
        first = free[0, 6:].tolist().index(stop)
        assert torch.equal(found[0, : 7 + first], free[0, : 7 + first]) and not found[0, 7 + first :].any()
    assert several.shape[0] == 3


def test_rows_end_together_and_the_result_is_as_long_as_the_longest():
    model = small("causal")
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.zero_()
        model.output.bias[7] = 9.0
    ids = inputs("causal")[0]
    for beams in (1, 2):
        found = tfk.generate(model, ids, 10, eos_id=7, num_beams=beams)
        assert found.tolist() == [[*row[row != 0].tolist(), 7] + [0] * int((row == 0).sum()) for row in ids]
    assert (tfk.generate(model, ids[:1, :6], 10)[:, 6:] == 7).all()


def test_padding_can_be_the_stop_token():
    model = small("causal")
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias[0] = 50.0
    ids = torch.tensor([[3, 4]])
    assert tfk.generate(model, ids, 5, eos_id=0).tolist() == [[3, 4, 0]]
    assert 0 not in tfk.generate(model, ids, 5)


def test_the_mode_comes_back():
    model, ids = small("causal", dropout=0.5), inputs("causal")[0]
    expected = tfk.generate(model, ids, 4)
    model.train()
    model.encoder.layers[0].eval()
    assert torch.equal(tfk.generate(model, ids, 4), expected)
    assert model.training and model.encoder.layers[1].training and not model.encoder.layers[0].training
    with pytest.raises(ValueError):
        tfk.generate(model, ids, 400)
    assert model.training


def test_dtype_of_ids():
    ids = inputs("causal")[0]
    for dtype in (torch.int32, torch.int64):
        assert tfk.generate(small("causal"), ids.to(dtype), 2).dtype == dtype


BAD = [
    ({"ids": [[1]]}, TypeError, "ids must be a tensor, got list"),
    ({"ids": torch.ones(2, 3)}, ValueError, "ids must be an int32 or int64 tensor of shape"),
    ({"ids": torch.ones(2, 0, dtype=torch.long)}, ValueError, r"neither of them 0, got int64 of shape \(2, 0\)"),
    ({"ids": torch.tensor([[1, 30]])}, ValueError, r"token numbers in \[0, 23\), got values from 1 to 30"),
    ({"ids": torch.tensor([[1, 2], [0, 0]])}, ValueError, "token in every row, got nothing but padding in row 1"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
    ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an int, got float"),
    ({"max_new_tokens": 35}, ValueError, "must fit into max_length 40, got 41 positions"),
    ({"bos_id": 1}, ValueError, "bos_id must be None for CausalLanguageModel"),
    ({"eos_id": 23}, ValueError, "eos_id must be below the vocabulary size 23, got 23"),
    ({"eos_id": -1}, ValueError, "eos_id must be at least 0, got -1"),
    ({"eos_id": "x"}, TypeError, "eos_id must be an int, a sequence of ints or None, got str"),
    ({"num_beams": 0}, ValueError, "num_beams must be at least 1, got 0"),
    ({"num_beams": 2, "do_sample": True}, ValueError, "do_sample needs num_beams=1, got 2"),
    ({"do_sample": 1}, TypeError, "do_sample must be True or False, got 1"),
    ({"temperature": 2.0}, ValueError, "temperature needs do_sample=True"),
    ({"temperature": 0.0, "do_sample": True}, ValueError, "temperature must be a finite number > 0, got 0.0"),
    ({"top_k": 0, "do_sample": True}, ValueError, "top_k must be at least 1, got 0"),
    ({"top_k": 5}, ValueError, "top_k needs do_sample=True"),
    ({"top_p": 1.5, "do_sample": True}, ValueError, r"top_p must lie in \(0, 1\], got 1.5"),
    ({"top_p": 0.5}, ValueError, "top_p needs do_sample=True"),
    ({"length_penalty": 2.0}, ValueError, "length_penalty needs num_beams > 1"),
    ({"length_penalty": float("inf"), "num_beams": 2}, ValueError, "length_penalty must be a finite number, got inf"),
    ({"model": 3}, TypeError, "model must be a module, got int"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_input(changes, error, message):
    given = {"model": small("causal"), "ids": inputs("causal")[0], "max_new_tokens": 3, **changes}
    with pytest.raises(error, match=f"^generate: .*{message}"):
        tfk.generate(**given)


def test_translations_need_a_start_token():
    model, ids = small("translation"), inputs("translation")[0]
    with pytest.raises(ValueError, match="bos_id must be given for TranslationTransformer"):
        tfk.generate(model, ids, 3)
    with pytest.raises(ValueError, match="bos_id must be below the target vocabulary's size 19, got 19"):
        tfk.generate(model, ids, 3, bos_id=19)
    assert isinstance(model, nn.Module) and (tfk.generate(model, ids, 3, bos_id=2)[:, 0] == 2).all()
