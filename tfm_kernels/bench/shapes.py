"""The grid of cases as data: which calls are measured, in which types, forward and in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace

LOW = ("bfloat16", "float16")
ALL = ("float32", *LOW)
PASSES = ("infer", "train")  # infer: forward without a graph; train: forward that records one, then backward


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """What every case has.

    Attributes:
        op: the public function of tfm_kernels.ops that is called.
        dtypes: storage types to measure it in.
        passes: "infer", "train" or both.
        compiled: whether torch.compile competes; it costs seconds a case, so only where it fuses something.
        quick: whether ``--quick`` runs it.
        headline: whether the table in bench/RESULTS.md shows it.
    """

    op: str
    dtypes: tuple[str, ...] = ("float32",)
    passes: tuple[str, ...] = PASSES
    compiled: bool = False
    quick: bool = False
    headline: bool = False

    @property
    @abstractmethod
    def label(self) -> str:
        """The case in a few words; with the op, unique in the grid."""

    def data(self) -> dict:
        """The sizes and options as JSON, without what only steers the run."""
        steering = {"dtypes", "passes", "compiled", "quick", "headline"}
        return {name: value for name, value in asdict(self).items() if name not in steering}


@dataclass(frozen=True, kw_only=True)
class Attention(Case):
    """Dense attention of (batch, heads, queries, dim), or packed where ``packed`` (then queries is the longest)."""

    op: str = "attention"
    batch: int = 1
    heads: int = 8
    key_heads: int = 0  # 0: as many as heads
    queries: int = 128
    keys: int = 0  # 0: as many as queries
    dim: int = 64
    causal: bool = False
    padded: bool = False
    packed: bool = False
    bias: bool = False
    dropout_p: float = 0.0

    @property
    def kv_heads(self) -> int:
        """Hk."""
        return self.key_heads or self.heads

    @property
    def kv_length(self) -> int:
        """Tk."""
        return self.keys or self.queries

    @property
    def lengths(self) -> list[int]:
        """Keys of each sequence: evenly from Tk / batch to Tk (a little above half are live), else all Tk."""
        keys = self.kv_length
        if not (self.padded or self.packed):
            return [keys] * self.batch
        return [-(-keys * (b + 1) // self.batch) for b in range(self.batch)]

    @property
    def label(self) -> str:
        """Such as "B4 H8 T512 D64 causal padded"."""
        time = f"T{self.queries}" if self.kv_length == self.queries else f"T{self.queries}x{self.keys}"
        heads = f"H{self.heads}" if self.kv_heads == self.heads else f"H{self.heads}/{self.key_heads}"
        words = [f"B{self.batch} {heads} {time} D{self.dim}"]
        words += [name for name in ("causal", "padded", "packed", "bias") if getattr(self, name)]
        return " ".join(words + ([f"dropout {self.dropout_p}"] if self.dropout_p else []))


@dataclass(frozen=True, kw_only=True)
class Ffn(Case):
    """(rows, width) -> (rows, hidden) -> (rows, width)."""

    op: str = "ffn"
    rows: int
    width: int
    hidden: int
    activation: str = "gelu"
    gated: bool = False
    dropout_p: float = 0.0

    @property
    def label(self) -> str:
        """Such as "M512 384-1536 gelu gated"."""
        words = [f"M{self.rows} {self.width}-{self.hidden} {self.activation}"] + (["gated"] if self.gated else [])
        return " ".join(words + ([f"dropout {self.dropout_p}"] if self.dropout_p else []))


@dataclass(frozen=True, kw_only=True)
class Int8Ffn(Ffn):
    """The same with weights and rows of int8, without gradients."""

    op: str = "int8_ffn"
    passes: tuple[str, ...] = ("infer",)


@dataclass(frozen=True, kw_only=True)
class Linear(Case):
    """(rows, width) -> (rows, out), without gradients."""

    op: str = "linear"
    rows: int
    width: int
    out: int
    passes: tuple[str, ...] = ("infer",)

    @property
    def label(self) -> str:
        """Such as "M32 256-768"."""
        return f"M{self.rows} {self.width}-{self.out}"


@dataclass(frozen=True, kw_only=True)
class Int8Linear(Linear):
    """The same with weights of int8; ``dynamic``: x is rounded to int8 as well."""

    op: str = "int8_linear"
    dynamic: bool = False

    @property
    def label(self) -> str:
        """Such as "M32 256-768 dynamic"."""
        return super().label + " dynamic" * self.dynamic


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(Case):
    """(rows, width) and as many targets -> (), the mean over the rows that count; ``ignored``: a share of them."""

    op: str = "linear_cross_entropy"
    rows: int
    width: int
    classes: int
    ignored: float = 0.0
    label_smoothing: float = 0.0

    @property
    def counted(self) -> int:
        """How many rows count, about."""
        return round(self.rows * (1.0 - self.ignored))

    @property
    def label(self) -> str:
        """Such as "M512 768-30522 85% ignored"."""
        words = [f"M{self.rows} {self.width}-{self.classes}"]
        words += [f"{self.ignored:.0%} ignored"] if self.ignored else []
        return " ".join(words + ([f"smoothing {self.label_smoothing}"] if self.label_smoothing else []))


@dataclass(frozen=True, kw_only=True)
class Norm(Case):
    """(rows, features), with affine weights; add_* ops with a residual."""

    op: str = "layer_norm"
    rows: int
    features: int
    dropout_p: float = 0.0

    @property
    def label(self) -> str:
        """Such as "M1024 N768 dropout 0.1"."""
        return f"M{self.rows} N{self.features}" + (f" dropout {self.dropout_p}" if self.dropout_p else "")


@dataclass(frozen=True, kw_only=True)
class Rotary(Case):
    """(batch, heads, length, dim), all of a head turned."""

    op: str = "rotary"
    batch: int
    heads: int
    length: int
    dim: int = 64

    @property
    def elements(self) -> int:
        """Of x."""
        return self.batch * self.heads * self.length * self.dim

    @property
    def label(self) -> str:
        """Such as "B4 H9 T256 D64"."""
        return f"B{self.batch} H{self.heads} T{self.length} D{self.dim}"


def _attention() -> list[Case]:
    def a(batch: int, queries: int, **options) -> Attention:
        return Attention(batch=batch, queries=queries, **options)

    varlen = {"op": "attention_varlen", "packed": True}
    return [
        a(16, 16, dtypes=ALL),
        a(8, 64, quick=True),
        a(8, 64, padded=True),
        a(8, 128, dtypes=ALL, headline=True, compiled=True),
        a(8, 128, dim=128),
        a(8, 128, causal=True),
        a(8, 128, padded=True, dtypes=("float32", "bfloat16"), quick=True, headline=True),
        a(8, 128, bias=True),
        a(8, 128, dropout_p=0.1, passes=("train",), compiled=True),
        a(4, 256),
        a(4, 512, dtypes=ALL, headline=True),
        a(2, 512, dim=128, dtypes=("float32", "bfloat16")),
        a(4, 512, causal=True, dtypes=("float32", "bfloat16"), quick=True, headline=True),
        a(4, 512, padded=True, dtypes=ALL, headline=True),
        a(4, 512, padded=True, causal=True),
        a(4, 512, heads=8, key_heads=2, causal=True),
        a(2, 512, bias=True, dtypes=("float32", "bfloat16"), headline=True),
        a(2, 512, dropout_p=0.1, passes=("train",), headline=True),
        a(4, 64, keys=512),
        a(8, 1, keys=1024, passes=("infer",), dtypes=("float32", "bfloat16")),
        a(1, 1024, causal=True),
        a(1, 2048, dtypes=("float32", "bfloat16"), headline=True),
        a(1, 2048, causal=True, dtypes=("float32", "bfloat16"), headline=True),
        a(1, 2048, heads=4, dim=128, causal=True),
        a(16, 128, **varlen, dtypes=("float32", "bfloat16"), quick=True, headline=True),
        a(8, 512, **varlen),
        a(8, 512, **varlen, causal=True),
    ]


def _ffn() -> list[Case]:
    def f(rows: int, width: int, **options) -> Ffn:
        return Ffn(rows=rows, width=width, hidden=4 * width, **options)

    return [
        f(1, 384, dtypes=ALL),
        f(8, 384),
        f(64, 384, dtypes=("float32", "bfloat16"), quick=True),
        f(512, 384, compiled=True),
        f(2048, 384, dtypes=("float32", "bfloat16"), headline=True),
        f(8192, 384, headline=True),
        f(1, 512, activation="relu"),
        f(32, 512, activation="relu"),
        f(128, 512, activation="relu", dtypes=ALL, quick=True),
        f(1024, 512, activation="relu", dtypes=("float32", "bfloat16"), compiled=True, quick=True, headline=True),
        f(1024, 512, activation="relu", dropout_p=0.1, passes=("train",), compiled=True, headline=True),
        f(4096, 512, activation="relu"),
        f(64, 512, activation="silu", gated=True),
        f(1024, 512, activation="silu", gated=True, dtypes=("float32", "bfloat16"), compiled=True, headline=True),
        f(1, 768, dtypes=("float32", "bfloat16")),
        f(16, 768),
        f(256, 768, activation="gelu_tanh", dtypes=("float32", "bfloat16")),
        f(2048, 768, headline=True),
    ]


def _linear() -> list[Case]:
    def n(rows: int, width: int, out: int, **options) -> Linear:
        return Linear(rows=rows, width=width, out=out, **options)

    return [
        n(1, 768, 768),
        n(4, 768, 768, dtypes=ALL, quick=True),
        n(8, 1024, 4096, dtypes=ALL, headline=True),
        n(16, 512, 512),
        n(32, 256, 768),
        n(32, 256, 8000, headline=True),
        n(32, 1024, 1024, dtypes=ALL),
        n(64, 768, 768),
        n(512, 768, 768),
    ]


def _int8_ffn() -> list[Case]:
    def f(rows: int, width: int, hidden: int, **options) -> Int8Ffn:
        return Int8Ffn(rows=rows, width=width, hidden=hidden, **options)

    both = ("float32", "bfloat16")
    return [
        f(1, 768, 3072),
        f(16, 512, 2048, activation="relu", dtypes=both),
        f(64, 384, 1536),
        f(512, 384, 1536, dtypes=ALL, quick=True, headline=True),
        f(1024, 768, 3072, dtypes=both, headline=True),
        f(1024, 512, 1408, activation="silu", gated=True, dtypes=both),
        f(8192, 384, 1536, dtypes=both, headline=True),
    ]


def _int8_linear() -> list[Case]:
    def n(rows: int, width: int, out: int, dynamic: bool = False, **options) -> Int8Linear:
        return Int8Linear(rows=rows, width=width, out=out, dynamic=dynamic, **options)

    both = ("float32", "bfloat16")
    return [
        n(1, 1024, 4096, dtypes=both, headline=True),  # decoding
        n(4, 768, 768, dtypes=ALL, quick=True),
        n(8, 512, 8000, headline=True),
        n(32, 1024, 1024, dtypes=both),
        n(64, 768, 3072, dtypes=both),
        n(1, 1024, 4096, True, dtypes=both),
        n(16, 512, 2048, True, dtypes=both),
        n(64, 768, 3072, True, dtypes=both, headline=True),
        n(256, 384, 1536, True, dtypes=ALL, quick=True),
        n(1024, 768, 768, True, dtypes=both, headline=True),
        n(4096, 384, 1536, True, dtypes=both),
        n(4096, 768, 3072, True, dtypes=both, headline=True),
    ]


def _linear_cross_entropy() -> list[Case]:
    def c(rows: int, width: int, classes: int, **options) -> LinearCrossEntropy:
        return LinearCrossEntropy(rows=rows, width=width, classes=classes, **options)

    both = ("float32", "bfloat16")
    return [
        c(2048, 128, 65, dtypes=both),  # characters
        c(256, 256, 1000, quick=True),
        c(2048, 256, 8000, dtypes=ALL, headline=True),
        c(1024, 256, 8000, label_smoothing=0.1, dtypes=both, headline=True),  # translation
        c(2048, 512, 16000, ignored=0.45, headline=True),  # padding
        c(512, 768, 30522, dtypes=both, headline=True),
        c(2048, 768, 30522, ignored=0.85, dtypes=both, headline=True),  # masked LM
        c(512, 768, 50257, dtypes=both),
        c(16, 512, 32000),
        c(4096, 384, 1000, dtypes=both),
    ]


def _norms() -> list[Case]:
    def n(rows: int, features: int, **options) -> Norm:
        return Norm(rows=rows, features=features, **options)

    add, rms, add_rms = {"op": "add_layer_norm"}, {"op": "rms_norm"}, {"op": "add_rms_norm"}
    return [
        n(1, 768, dtypes=ALL, quick=True),
        n(16, 384),
        n(64, 512, dtypes=("float32", "bfloat16")),
        n(128, 768),
        n(1024, 384, dtypes=ALL),
        n(1024, 768, dtypes=ALL, compiled=True, quick=True, headline=True),
        n(4096, 1024, dtypes=("float32", "bfloat16")),
        n(16384, 512),
        n(512, 4096),
        n(1, 768, **add),
        n(64, 512, **add),
        n(1024, 384, **add, dtypes=ALL),
        n(1024, 768, **add, dtypes=("float32", "bfloat16"), compiled=True, headline=True),
        n(1024, 768, **add, dropout_p=0.1, passes=("train",), dtypes=ALL, compiled=True, quick=True, headline=True),
        n(4096, 1024, **add, dtypes=("float32", "bfloat16"), headline=True),
        n(4096, 1024, **add, dropout_p=0.1, passes=("train",), headline=True),
        n(16384, 512, **add),
        n(64, 768, **rms),
        n(1024, 768, **rms, dtypes=ALL, compiled=True, headline=True),
        n(4096, 1024, **rms),
        n(64, 768, **add_rms),
        n(1024, 768, **add_rms, dtypes=("float32", "bfloat16"), headline=True),
        n(4096, 1024, **add_rms),
    ]


def _rotary() -> list[Case]:
    def r(batch: int, heads: int, length: int, **options) -> Rotary:
        return Rotary(batch=batch, heads=heads, length=length, **options)

    return [
        r(1, 9, 1, passes=("infer",), dtypes=ALL),  # decoding
        r(32, 9, 1, passes=("infer",)),
        r(4, 9, 256, dtypes=ALL, compiled=True, quick=True, headline=True),
        r(1, 32, 512, dim=128, dtypes=("float32", "bfloat16"), headline=True),
        r(8, 12, 1024),
    ]


# by the op's stem
GRID: dict[str, tuple[Case, ...]] = {
    "layer_norm": tuple(_norms()), "attention": tuple(_attention()), "ffn": tuple(_ffn()),
    "linear": tuple(_linear()), "int8_linear": tuple(_int8_linear()), "int8_ffn": tuple(_int8_ffn()),
    "linear_cross_entropy": tuple(_linear_cross_entropy()), "rotary": tuple(_rotary()),
}  # fmt: skip


def quick(case: Case) -> Case:
    """The case as ``--quick`` runs it: one 32-bit type, and no torch.compile, which would take half of the time."""
    return replace(case, dtypes=case.dtypes[:1], compiled=False)
