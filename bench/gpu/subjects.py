"""The ops that are proven on a GPU, in order. A new one is a file like layer_norm.py and a line here."""

from . import attention, ffn, int8_ffn, int8_linear, layer_norm, linear_cross_entropy, rotary
from .subject import GpuSubject

SUBJECTS: tuple[GpuSubject, ...] = (
    layer_norm.TRITON,
    layer_norm.CUDA,
    attention.TRITON,
    attention.CUDA,
    ffn.TRITON,
    ffn.CUDA,
    linear_cross_entropy.TRITON,
    rotary.TRITON,
    int8_linear.TRITON,
    int8_ffn.TRITON,
)
STEMS = tuple(dict.fromkeys(subject.stem for subject in SUBJECTS))  # an op has a subject for each backend
