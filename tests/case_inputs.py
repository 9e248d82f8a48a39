"""How the inputs of a combination of levels (case_levels.py) are built."""

import torch

from tests.case_levels import FACTORS
from tfm_kernels import Mask
from tfm_kernels.testing.data import draw, lay_out

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


def norm(op, levels, g, device):
    dtype, width = DTYPES[levels["dtype"]], levels["width"]
    shape = (*levels["rows"], width)
    rows = torch.Size(levels["rows"]).numel()
    data = levels["data"]
    put = lambda t: lay_out(t.to(device), levels["layout"])
    inputs, total = {"x": put(draw(data, shape, dtype, g))}, dtype
    if op.startswith("add"):
        other = dtype if levels["residual"] == "same" or dtype == torch.float64 else torch.float32
        total = torch.promote_types(dtype, other)
        inputs["residual"] = put(draw("randn" if data == "extremes" else data, shape, other, g))  # the sum must fit
        if levels["dropout_p"] > 0:
            # 65504 / (1 - p) overflows fp16
            inputs["dropout_p"] = levels["dropout_p"] if data != "extremes" or dtype != torch.float16 else 1.0
            inputs["seed"] = torch.randint(0, 2**62, (), generator=g).to(device)
        if levels["dropout_rows"]:
            inputs["dropout_rows"] = torch.randperm(3 * rows + 1, generator=g)[:rows].to(device)
    for name in ("weight", "bias") if op.endswith("layer_norm") else ("weight",):
        if levels[name] != "none":
            other = total if levels[name] == "same" or total == torch.float64 else torch.float32
            inputs[name] = put(draw("randn", (width,), other, g))
    if isinstance(levels["eps"], tuple):
        inputs["eps"], inputs["eps_outside"] = levels["eps"]
    elif levels["eps"] is not None:
        inputs["eps"] = levels["eps"]
    if op.endswith("layer_norm") and width > 1:
        inputs["unbiased"] = levels["unbiased"]
    return inputs


def _band(name):
    align = "bottom_right" if name.endswith("br") else "top_left"
    if name == "none":
        return Mask()
    if name == "both":
        return Mask.causal("bottom_right") & Mask.window(40, None)
    if name.startswith("causal"):
        return Mask.causal(align)
    left, right = (None if limit == "none" else int(limit) for limit in name.split("_")[1:3])
    return Mask.window(left, right, align)


_AXES = {
    "qk": "qk", "111k": "111k", "b11k": "b11k", "b1qk": "b1qk", "bhqk": "bhqk", "1h1k": "1h1k", "1hqk": "1hqk",
    "b1q1": "b1q1", "hide_qk": "qk", "tensor_qk": "qk",
}  # fmt: skip


def attention(op, levels, g, device):
    dtype, data, layout = DTYPES[levels["dtype"]], levels["data"], levels["layout"]
    (tq, tk), (b, h, hk), d = levels["lengths_qk"], levels["heads"], levels["d"]
    dv = d if levels["dv"] == "same" else levels["dv"]
    sizes = {"b": b, "h": h, "q": tq, "k": tk, "1": 1}
    put = lambda t: lay_out(t.to(device), layout)
    key, value = draw(data, (b, hk, tk, d), dtype, g), draw(data, (b, hk, tk, dv), dtype, g)
    mask = _band(levels["band"])
    if levels["key_lengths"] != "none":
        lengths = (
            torch.full((b,), tk) if levels["key_lengths"] == "full" else torch.randint(0, tk + 1, (b,), generator=g)
        )
        if b > 1 and levels["key_lengths"] != "full":
            lengths[0] = 0
        lengths = lengths.to(torch.int32 if d % 2 else torch.int64)
        if levels["key_lengths"] == "ragged_nan" and layout != "expanded":
            padding = (torch.arange(tk) >= lengths.unsqueeze(1)).view(b, 1, tk, 1)
            key, value = key.masked_fill(padding, torch.nan), value.masked_fill(padding, torch.nan)
        mask = mask & Mask.lengths(lengths)
    inputs = {"query": put(draw(data, (b, h, tq, d), dtype, g)), "key": put(key), "value": put(value)}
    if levels["keep"] != "none":
        shape = [sizes[axis] for axis in _AXES[levels["keep"]]]
        attend = torch.rand(shape, generator=g) < 0.7
        mask = mask & (Mask.hide(~attend) if levels["keep"].startswith("hide") else Mask.keep(attend))
    lone = levels["keep"] == "tensor_qk" and levels["band"] == levels["key_lengths"] == "none"
    inputs["mask"] = mask.keep_matrix[0, 0].to(device) if lone else mask.to(device)
    if levels["bias"] != "none":
        other = dtype if levels["bias_dtype"] == "same" or dtype == torch.float64 else torch.float32
        bias = draw("randn", [sizes[axis] for axis in _AXES[levels["bias"]]], other, g)
        if d % 3 == 0:
            bias = bias.masked_fill(torch.rand(bias.shape, generator=g) < 0.1, -torch.inf)
        inputs["bias"] = put(bias)
    inputs |= _dropout(levels, data, dtype, g, device)
    if levels["scale"] is not None:
        inputs["scale"] = levels["scale"]
    return {**inputs, **_settings(levels)}


def _settings(levels):
    return {"return_lse": levels["return_lse"], "deterministic": levels.get("deterministic", True)}


def _dropout(levels, data, dtype, g, device):
    """Attention's dropout; 65504 / (1 - p) overflows fp16, and with out every gradient of its row."""
    p = levels["dropout_p"]
    if p == 0.0 or (data == "extremes" and dtype == torch.float16):
        return {}
    return {"dropout_p": p, "seed": torch.randint(0, 2**62, (), generator=g).to(device)}


_SEGMENTS = {
    "one": ((33,), (33,)),
    "ragged": ((5, 64, 17), (9, 30, 65)),
    "with_empty": ((0, 20, 0, 31), (7, 0, 0, 40)),
    "tiles": ((64, 128), (64, 128)),
    "many": (tuple(range(1, 14)), tuple(range(13, 0, -1))),
    "no_keys": ((9, 4), (0, 0)),
    "none": ((), ()),
}


def attention_varlen(op, levels, g, device):
    dtype, data = DTYPES[levels["dtype"]], levels["data"]
    (h, hk), d = levels["heads"], levels["d"]
    dv = d if levels["dv"] == "same" else levels["dv"]
    queries, keys = _SEGMENTS[levels["segments"]]
    keys = queries if levels["self"] else keys
    ends = lambda lengths: torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32).to(
        device
    )
    put = lambda t: lay_out(t.to(device), levels["layout"])
    extra = 7 if levels["longer_maximum"] else 0
    inputs = {
        "query": put(draw(data, (sum(queries), h, d), dtype, g)),
        "key": put(draw(data, (sum(keys), hk, d), dtype, g)),
        "value": put(draw(data, (sum(keys), hk, dv), dtype, g)),
        "cu_seqlens_q": ends(queries),
        "cu_seqlens_k": ends(keys),
        "max_seqlen_q": max(queries, default=0) + extra,
        "max_seqlen_k": max(keys, default=0) + extra,
        "mask": _band(levels["band"]),
        **_dropout(levels, data, dtype, g, device),
    }
    if levels["scale"] is not None:
        inputs["scale"] = levels["scale"]
    return {**inputs, **_settings(levels)}


# how weights are scaled: the product of two numbers of ffn's hidden layer, and logits, have to fit in fp16
SMALL = {"extremes": 2.0**-11, "mean_1000": 2.0**-8, "heavy": 2.0**-2, "outlier": 2.0**-3}


def ffn(op, levels, g, device):
    dtype, e, f = DTYPES[levels["dtype"]], levels["e"], levels["f"]
    eo = e if levels["eo"] == "same" else levels["eo"]
    data, rows = levels["data"], torch.Size(levels["rows"]).numel()
    small = SMALL.get(data, 1.0)
    put = lambda t: lay_out(t.to(device), levels["layout"])
    weight = lambda o, i: put((torch.randn(o, i, generator=g) * small / i**0.5).to(dtype))
    vector = lambda n: put(draw("randn", (n,), dtype, g))
    gate_biased = levels["gate"] == "biased"  # one vector for both, whatever the level of b1
    inputs = {
        "x": put(draw(data, (*levels["rows"], e), dtype, g)),
        "w1": weight(f, e),
        "b1": vector(2 * f if gate_biased else f) if levels["b1"] or gate_biased else None,
        "w2": weight(eo, f),
        "b2": vector(eo) if levels["b2"] else None,
        "activation": levels["activation"],
        "recompute": levels["recompute"],
    }
    if levels["gate"]:
        inputs["gate"] = weight(f, e)
    if levels["dropout_p"] > 0:
        inputs |= {"dropout_p": levels["dropout_p"], "seed": torch.randint(0, 2**62, (), generator=g).to(device)}
    if levels["dropout_rows"]:
        inputs["dropout_rows"] = torch.randperm(3 * rows + 1, generator=g)[:rows].to(device)
    return inputs


def linear_cross_entropy(op, levels, g, device):
    dtype, data, layout, shape = DTYPES[levels["dtype"]], levels["data"], levels["layout"], levels["rows"]
    classes, width = levels["v"], levels["k"]
    put = lambda t: lay_out(t.to(device), layout)
    target = torch.randint(classes, shape, generator=g)
    ignored = torch.rand(shape, generator=g) < {"none": 0.0, "some": 0.3, "all": 1.0}[levels["ignored"]]
    small = SMALL.get(data, 1.0) / width**0.5
    return {
        "x": put(draw(data, (*shape, width), dtype, g)),
        "weight": put((torch.randn(classes, width, generator=g) * small).to(dtype)),
        "target": target.masked_fill(ignored, levels["ignore_index"]).to(device),
        "bias": put(draw("randn", (classes,), dtype, g)) if levels["bias"] else None,
        "ignore_index": levels["ignore_index"],
        "label_smoothing": levels["label_smoothing"],
        "reduction": levels["reduction"],
    }


def rotary(op, levels, g, device):
    """Factors that differ within a pair too, as no angle has them: each is to be read in its own place."""
    dtype, (batch, heads, length), d = DTYPES[levels["dtype"]], levels["places"], levels["d"]
    turned = 2 * int({"all": 0.5, "half": 0.25, "none": 0.0}[levels["turned"]] * d)
    lead = {"one": (), "one_of_one_row": (1,), "each_row": (batch,)}[levels["tables"]]
    angles = 7.0 * torch.randn(*lead, length, turned, generator=g)
    put = lambda t: lay_out(t.to(device), levels["layout"])
    factors = torch.float32 if levels["factors"] == "f32" else dtype
    return {
        "x": put(draw(levels["data"], (batch, heads, length, d), dtype, g)),
        "cos": put(angles.cos().to(factors)),
        "sin": put(angles.sin().to(factors)),
        "interleaved": levels["interleaved"],
    }


def int8_linear(op, levels, g, device):
    dtype, k, n = DTYPES[levels["dtype"]], levels["k"], levels["n"]
    put = lambda t: lay_out(t.to(device), levels["layout"])
    scale = (0.5 + torch.rand(n, generator=g)) * SMALL.get(levels["data"], 1.0) / (74 * k**0.5)
    return {
        "x": put(draw(levels["data"], (*levels["rows"], k), dtype, g)),
        "weight": torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8).to(device),
        "scale": scale.to(device),
        "bias": put(draw("randn", (n,), dtype, g)) if levels["bias"] else None,
        "dynamic": levels["dynamic"],
    }


def int8_ffn(op, levels, g, device):
    dtype, (e, f, eo) = DTYPES[levels["dtype"]], (levels[name] for name in ("e", "f", "eo"))
    small = SMALL.get(levels["data"], 1.0)
    put = lambda t: lay_out(t.to(device), levels["layout"])

    def weight(out, width):
        integers = torch.randint(-128, 128, (out, width), generator=g, dtype=torch.int8)
        return integers.to(device), ((0.5 + torch.rand(out, generator=g)) * small / (74 * width**0.5)).to(device)

    inputs = {"x": put(draw(levels["data"], (*levels["rows"], e), dtype, g)), "activation": levels["activation"]}
    inputs["w1"], inputs["scale1"] = weight(f, e)
    inputs["w2"], inputs["scale2"] = weight(eo, f)
    for name, size in (("b1", f), ("b2", eo)):
        inputs[name] = put(draw("randn", (size,), dtype, g)) if levels[name] else None
    if levels["gate"]:
        inputs["gate"], inputs["gate_scale"] = weight(f, e)
    return {**inputs, "dynamic": True}


BUILD = {
    **dict.fromkeys(FACTORS["norm"]["op"], norm),
    "attention": attention,
    "attention_varlen": attention_varlen,
    "ffn": ffn,
    "linear_cross_entropy": linear_cross_entropy,
    "rotary": rotary,
    "int8_linear": int8_linear,
    "int8_ffn": int8_ffn,
}
