"""What can vary in a call of each op, and how the inputs of a combination are built."""

import torch

from tfm_kernels import Mask
from tfm_kernels.testing.data import CLASSES, LAYOUTS, draw, lay_out

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
# f64 is for gradcheck and rare; listing the others twice keeps it so
_DTYPES = ("f32", "bf16", "f16", "f32", "bf16", "f16", "f64")
_DROPOUT = (0.0, 0.1, 0.0, 0.5, 1.0)

FACTORS = {
    "norm": {
        "op": ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"),
        "dtype": _DTYPES,
        "data": tuple(CLASSES),
        "layout": tuple(LAYOUTS),
        "rows": ((1,), (0,), (3,), (2, 5), (17,), (64,), (130,), ()),
        "width": (1, 2, 7, 31, 63, 64, 65, 127, 128, 129, 257, 512, 1031),
        "weight": ("none", "same", "f32"),
        "bias": ("none", "same", "f32"),
        "eps": (None, 1e-6, 1e-2),
        "unbiased": (False, True),
        "dropout_p": _DROPOUT,
        "dropout_rows": (False, True),
        "residual": ("same", "same", "f32"),
    },
    "attention": {
        "dtype": _DTYPES,
        "data": tuple(CLASSES),
        "layout": tuple(LAYOUTS),
        "lengths_qk": (
            (1, 1), (1, 7), (1, 65), (5, 3), (31, 33), (63, 65), (64, 64), (65, 63), (97, 129), (128, 127),
            (17, 0), (0, 17), (2, 257), (130, 66),
        ),
        "heads": ((1, 1, 1), (2, 4, 4), (2, 4, 2), (3, 6, 1), (1, 2, 1), (0, 2, 2)),
        "d": (1, 3, 8, 16, 31, 32, 64, 80),
        "dv": ("same", "same", 1, 24),
        "band": (
            "none", "none", "causal_tl", "causal_br", "window_3_0_tl", "window_5_2_br", "window_none_4_tl", "both",
        ),
        "key_lengths": ("none", "none", "ragged", "ragged_nan", "full"),
        "keep": ("none", "none", "qk", "b11k", "b1qk", "bhqk", "1h1k", "hide_qk", "tensor_qk"),
        "bias": ("none", "none", "qk", "111k", "b11k", "b1qk", "1hqk", "bhqk", "b1q1"),
        "bias_dtype": ("same", "f32"),
        "dropout_p": _DROPOUT,
        "scale": (None, None, 0.5, -0.3),
        "return_lse": (False, True),
    },
    "attention_varlen": {
        "dtype": _DTYPES,
        "data": tuple(CLASSES),
        "layout": tuple(LAYOUTS),
        "segments": ("one", "ragged", "with_empty", "tiles", "many", "no_keys", "none"),
        "self": (True, False),
        "heads": ((1, 1), (4, 4), (4, 2), (6, 1)),
        "d": (1, 8, 31, 64),
        "dv": ("same", 24),
        "band": ("none", "causal_tl", "causal_br", "window_5_2_tl", "window_3_none_br"),
        "dropout_p": _DROPOUT,
        "longer_maximum": (False, True),
        "scale": (None, 0.5),
        "return_lse": (False, True),
    },
    "ffn": {
        "dtype": _DTYPES,
        "data": tuple(CLASSES),
        "layout": tuple(LAYOUTS),
        "rows": ((1,), (0,), (5,), (2, 17), (64,), (129,), ()),
        "e": (1, 7, 32, 64, 65, 100),
        "f": (1, 3, 31, 64, 65, 128, 200, 257),
        "eo": ("same", "same", 1, 48),
        "activation": ("relu", "gelu", "gelu_tanh", "silu"),
        "gate": (False, True),
        "b1": (True, False),
        "b2": (True, False),
        "dropout_p": _DROPOUT,
        "dropout_rows": (False, True),
        "recompute": (False, True),
    },
    "linear_cross_entropy": {
        "dtype": _DTYPES,
        "data": tuple(CLASSES),
        "layout": tuple(LAYOUTS),
        "rows": ((1,), (0,), (5,), (2, 17), (64,), (131,), (300,), ()),
        "k": (1, 7, 32, 64, 65, 100, 257),
        "v": (1, 2, 31, 64, 65, 200, 513, 1100),
        "bias": (True, False),
        "ignored": ("none", "some", "none", "some", "all"),
        "ignore_index": (-100, 0, 7),
        "label_smoothing": (0.0, 0.1, 0.0, 1.0),
        "reduction": ("mean", "sum", "none"),
    },
    "rotary": {
        "dtype": _DTYPES,
        "data": tuple(CLASSES),
        "layout": tuple(LAYOUTS),
        "places": ((1, 1, 1), (2, 3, 5), (0, 2, 3), (2, 0, 4), (1, 4, 1), (3, 2, 70), (2, 1, 0)),
        "d": (2, 7, 8, 17, 33, 64, 70, 128, 256),
        "turned": ("all", "half", "none"),
        "tables": ("one", "one_of_one_row", "each_row"),
        "factors": ("same", "f32"),
        "interleaved": (False, True),
    },
}  # fmt: skip


def _large():
    """Normal data with enough elements for C3, one for each kind of path."""
    plain = {"data": "randn", "layout": "contiguous", "dropout_p": 0.0}
    for dtype in ("bf16", "f16", "f32"):
        for width in (192, 768, 1024):
            for op in FACTORS["norm"]["op"]:
                options = {"weight": "same", "bias": "same", "eps": None, "unbiased": False, "dropout_rows": False}
                yield (
                    op,
                    {"op": op, "dtype": dtype, **plain, "rows": (200,), "width": width, **options, "residual": "same"},
                )
        for band, p in (("none", 0.0), ("causal_tl", 0.0), ("window_5_2_br", 0.1)):
            shape = {"lengths_qk": (150, 200), "heads": (2, 4, 2), "d": 64, "dv": "same", "band": band}
            options = {"key_lengths": "none", "keep": "none", "bias": "none", "bias_dtype": "same", "scale": None}
            yield "attention", {"dtype": dtype, **plain, **shape, **options, "return_lse": True, "dropout_p": p}
        for activation, gate in (("relu", False), ("gelu", False), ("silu", True)):
            shape = {"rows": (300,), "e": 128, "f": 512, "eo": "same", "activation": activation, "gate": gate}
            options = {"b1": True, "b2": True, "dropout_rows": False, "recompute": False}
            yield "ffn", {"dtype": dtype, **plain, **shape, **options}


def _large_losses():
    """Normal data with as many rows and classes as make sums long, a mean and what is not reduced."""
    plain = {"data": "randn", "layout": "contiguous", "ignored": "some", "ignore_index": -100}
    for dtype in ("bf16", "f16", "f32"):
        for reduction, smoothing, bias, (rows, k, v) in (
            ("mean", 0.0, False, (700, 96, 3000)),
            ("none", 0.1, True, (520, 257, 1100)),
        ):
            options = {"bias": bias, "label_smoothing": smoothing, "reduction": reduction}
            yield "linear_cross_entropy", {"dtype": dtype, **plain, "rows": (rows,), "k": k, "v": v, **options}


def _found():
    """Calls that once went wrong."""
    plain = {
        "data": "randn",
        "layout": "contiguous",
        "dropout_p": 0.0,
        "dv": "same",
        "scale": None,
        "bias_dtype": "same",
    }
    for dtype in ("f32", "bf16"):
        # A panel of queries of which one row sees one key: the backward took in the keys that fill up its tile.
        shape = {"lengths_qk": (129, 66), "heads": (1, 1, 1), "d": 64, "band": "causal_br", "key_lengths": "none"}
        yield "attention", {"dtype": dtype, **plain, **shape, "keep": "none", "bias": "none", "return_lse": True}


def _in_any_order():
    """Gradients that need not repeat bit by bit; every other call asks for those that do."""
    plain = {"data": "randn", "layout": "contiguous", "dropout_p": 0.1, "d": 32, "dv": "same", "scale": None}
    for dtype in ("f32", "bf16"):
        options = {"dtype": dtype, **plain, "band": "causal_br", "return_lse": True, "deterministic": False}
        mask = {"key_lengths": "ragged", "keep": "none", "bias": "1hqk", "bias_dtype": "same"}
        yield "attention", {**options, **mask, "lengths_qk": (97, 129), "heads": (2, 4, 2)}
        options |= {"segments": "ragged", "self": False, "heads": (4, 2), "longer_maximum": True}
        yield "attention_varlen", {**options, "return_lse": False, "dropout_p": 0.0}  # as aten too can run it


EXTRA = (*_large(), *_found(), *_in_any_order(), *_large_losses())


def word(name, level):
    """A level in a test's id."""
    if isinstance(level, tuple):
        return "x".join(map(str, level)) or "()"
    return str(level) if name in ("dtype", "data", "layout", "activation") else f"{name}={level}"


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
    if levels["eps"] is not None:
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
    inputs = {
        "x": put(draw(data, (*levels["rows"], e), dtype, g)),
        "w1": weight(f, e),
        "b1": vector(f) if levels["b1"] else None,
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
    return inputs


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
