"""generate() of patched decoders: greedy tokens are the stock model's, with the caches and searches that run here.

Not here: offloaded caches, which need CUDA; quantized ones, which need packages that these tests do without;
contrastive search and group beams, whose code transformers now loads from the network.
"""

import copy

import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import decoder, transformers

WINDOW = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "phi3": {"sliding_window": 4},
    "gpt_neox": {"use_parallel_residual": False},
    "falcon": {"new_decoder_architecture": True},
    "gpt2": {},
}
CASES = {  # options of generate(), and whether the prompts are padded on the left
    "dynamic": ({}, True),
    "no cache": ({"use_cache": False}, True),
    "static": ({"cache_implementation": "static"}, True),
    "sliding window": ({"cache_implementation": "sliding_window"}, True),
    "beams": ({"num_beams": 3}, True),
    "prefill in chunks": ({"prefill_chunk_size": 4}, True),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, False),
    "assisted": ({}, False),
    "a cache that goes on": ({}, True),
}


def build(family, seed=0):
    """Weights so large that a token follows from the others, and not from rounding."""
    model = decoder(family, **FAMILIES[family])
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4).add_(0.02 * seed * torch.randn_like(parameter))
    return model


def prompts(padded):
    generator = torch.Generator().manual_seed(1)
    if not padded:
        return torch.randint(3, 20, (1, 6), generator=generator).repeat(1, 3), torch.ones(1, 18, dtype=torch.long)
    mask = (torch.arange(9) >= torch.tensor([4, 0, 6])[:, None]).long()
    return torch.randint(3, 99, (3, 9), generator=generator) * mask, mask


def generated(model, case, assistant):
    options, padded = CASES[case]
    ids, mask = prompts(padded)
    told = dict(do_sample=False, pad_token_id=0, eos_token_id=None, max_new_tokens=14, **options)
    if case == "assisted":
        told["assistant_model"] = assistant
    if case != "a cache that goes on":
        return model.generate(ids, attention_mask=mask, **told)
    told["past_key_values"] = transformers().DynamicCache(config=model.config)
    first = model.generate(ids, attention_mask=mask, **told)
    more = torch.cat([first, ids[:, -3:]], dim=1)
    mask = torch.cat([mask, torch.ones(3, more.shape[1] - 9, dtype=torch.long)], dim=1)
    return model.generate(more, attention_mask=mask, **told)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_stock_models(family, case):
    model, assistant = build(family), build(family, seed=1)
    wanted = generated(model, case, assistant)
    assert len(set(wanted[0].tolist())) > 3
    patched = copy.deepcopy(model)
    with tfk.patch(patched) as report, tfk.patch(assistant):
        assert torch.equal(generated(patched, case, assistant), wanted)
        assert report.fallbacks == {}
