"""What can vary in a call of each op: levels of its factors, and combinations that no pair of them makes."""

from tfm_kernels.testing.data import CLASSES, LAYOUTS

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
        "eps": (None, 1e-6, 1e-2, (0.0, 1e-3)),  # the second of two is eps_outside
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
        "gate": (False, True, "biased"),
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
