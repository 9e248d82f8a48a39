"""Small models to patch, and the comparison of a patched model with its own self."""

import copy

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.patching.source import fingerprint
from tfm_kernels.proof.rule import Judge


def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed (the demo extra)")


def bert(**changes):
    hf = transformers()
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    return hf.BertModel(hf.BertConfig(vocab_size=99, **{**settings, **changes})).eval()


def distilbert(**changes):
    hf = transformers()
    torch.manual_seed(0)
    settings = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99}
    return hf.DistilBertModel(hf.DistilBertConfig(**{**settings, **changes})).eval()


def albert(**changes):
    """Three layers, the first two of which are one and the same."""
    hf = transformers()
    torch.manual_seed(0)
    settings = dict(
        vocab_size=99, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_hidden_groups=2,
        num_attention_heads=4, intermediate_size=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return hf.AlbertModel(hf.AlbertConfig(**{**settings, **changes})).eval()


def deberta(**changes):
    """DeBERTa-v3's kind of scores, without dropout; no weight of a norm is 1 or 0."""
    hf = transformers()
    torch.manual_seed(0)
    settings = dict(
        vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, relative_attention=True, pos_att_type="c2p|p2c", position_buckets=8,
        share_att_key=True, norm_rel_ebd="layer_norm", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = hf.DebertaV2Model(hf.DebertaV2Config(**{**settings, **changes}))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval()


def batch(rows=3, length=7, lengths=(4, 7, 2)):
    """(ids, attention_mask) of a batch padded on the right."""
    torch.manual_seed(1)
    ids = torch.randint(1, 99, (rows, length))
    return ids, (torch.arange(length) < torch.tensor(lengths)[:, None]).long()


def encoder(batch_first=True, norm_first=False, dropout=0.0, layers=2, **more):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout, batch_first=batch_first, norm_first=norm_first, activation="gelu", **more
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(16), enable_nested_tensor=False).eval()


def results(model, run, select=None):
    """The output, where ``select`` looks at it, and all gradients of one run, by name."""
    model.zero_grad()
    y = run(model)
    seen = y if select is None else y[select]
    torch.manual_seed(7)
    (seen * torch.randn(seen.shape, dtype=torch.float64).to(seen)).sum().backward()
    grads = {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": seen.detach().double(), **grads}


def assert_same_results(model, run, select=None, *, backend="reference", double_fallbacks=None, **options):
    """A patched model gives what it gave before: to rounding in float64, and in float32 as exactly as before."""
    double = copy.deepcopy(model).double()
    exact = results(double, run, select)
    with tfk.patch(double, backend=backend, **options) as report:
        compare(results(double, run, select), exact, 1e-9)
        assert {reason for met in report.fallbacks.values() for reason in met} <= {double_fallbacks}, report.fallbacks
    assert_as_exact_as_before(model, run, exact, select, backend=backend, **options)


def assert_as_exact_as_before(model, run, exact, select=None, **options):
    """A patched model is as far from ``exact``, its results() in float64, as it was before."""
    stock = results(model, run, select)
    with tfk.patch(model, **options) as report:
        patched = results(model, run, select)
        assert report.fallbacks == {}
    assert_as_exact(patched, stock, exact)


def assert_as_exact(patched, stock, exact):
    """Of results() of three models: the first are as far from ``exact``, in float64, as the second."""
    assert patched.keys() == exact.keys()
    for name, truth in exact.items():
        error, before = ((r[name] - truth).norm() for r in (patched, stock))
        floor = 1e-6 * max(truth.norm(), 1e-2 * max(t.norm() for t in exact.values()))
        assert error <= 2 * before + floor, f"{name}: error {error:.2e}, before {before:.2e}"


def assert_compiles(model, run):
    """A patched model is one graph, with a backward, and gives what it gave before."""
    stock = run(model)
    with tfk.patch(model):
        given = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(given, stock)
    given.sum().backward()
    torch._dynamo.reset()


def assert_dropout_proven(model, inputs=None, take=lambda out: out.logits):
    """prove() lets both models drop the same elements; what is dropped is more than rounding in what it gives."""
    if inputs is None:
        ids, mask = batch(length=9, lengths=(9, 9, 9))
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    report = tfk.prove(model.train(), inputs, steps=1)
    assert report.passed, report.table()
    assert not any("original code" in note for note in report.notes), report.notes
    with torch.no_grad():
        wide = {name: value.double() if value.is_floating_point() else value
                for name, value in inputs.items() if isinstance(value, torch.Tensor)}  # fmt: skip
        truth = take(copy.deepcopy(model).double().eval()(**{**inputs, **wide}))
        stock = take(copy.deepcopy(model).eval()(**inputs))
        with tfk.patch(model):
            found = [take(each(**inputs)) for each in (model, copy.deepcopy(model).eval())]
    dropped, whole = (Judge(torch.float32, 1.05).compare("output", {"y": truth}, {"y": stock}, {"y": y}, module="")
                      for y in found)  # fmt: skip
    assert all(row.passed for row in whole) and not any(row.passed for row in dropped)


def compare(given, wanted, tolerance):
    assert given.keys() == wanted.keys()
    scale = max(t.abs().max() for t in wanted.values())
    for name, truth in wanted.items():
        worst = (given[name] - truth).abs().max() if truth.numel() else 0.0
        assert worst <= tolerance * scale, f"{name}: off by {worst:.2e}"


_SMALL = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_EXPERTS = dict(
    num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)  # fmt: skip
_GPT = dict(n_embd=32, n_head=4, n_layer=2, n_positions=64)
_OTHERS = {
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": dict(
        num_layers=2, num_heads=4, intermediate_size=64, window_size=4, attention_types=[[["global", "local"], 1]]
    ),
    "bloom": dict(n_head=4, n_layer=2),
    "mpt": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "xglm": dict(d_model=32, ffn_dim=64, num_layers=2, attention_heads=4),
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "n_ctx": 64, "rotary_dim": 4},
    "falcon": {"parallel_attn": True, "ffn_hidden_size": 64, "num_kv_heads": 2},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phimoe": {"original_max_position_embeddings": 32},
    "deepseek_v3": dict(
        num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, kv_lora_rank=8, q_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    ),
}  # fmt: skip


def decoder(family, **changes):
    """A decoder-only model with a head, by its config.model_type; no weight of a norm is 1 or 0."""
    hf = transformers()
    torch.manual_seed(0)
    settings = {**_SMALL, **_EXPERTS, **_OTHERS.get(family, {}), **changes}
    if family == "falcon":
        del settings["head_dim"]  # which it works out itself
    config = hf.AutoConfig.for_model(family, **settings)
    model = hf.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")  # grouped products of experts, where there are any, know no float64
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval()


SUMMED_IN_FLOAT32 = ("gemma", "gemma3_text", "helium")  # the gradients of whose norms are, whatever the dtype
_WITHOUT_REGISTRY = {"gptj": "549182418a79", "codegen": "7a04a8d1753c"}  # fingerprints of transformers 5.23


def keeps_attention(model):
    """Whether a model is one that knows transformers' registry from 5.24 on, as it was before."""
    known = _WITHOUT_REGISTRY.get(model.config.model_type)
    return known is not None and fingerprint(type(model.transformer.h[0].attn).forward) == known
