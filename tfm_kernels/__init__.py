"""Fused Transformer layers for PyTorch: drop-in modules, and the proof that the numbers still hold."""

from . import _flops as _flops
from . import models as models
from . import nn as nn
from . import ops as ops
from . import patching as patching
from . import testing as testing
from ._backend import BackendError as BackendError
from ._backend import explain as explain
from ._backend import use_backend as use_backend
from ._version import __version__ as __version__
from .attention_maps import get_attention_maps as get_attention_maps
from .diagnosis import doctor as doctor
from .generation import generate as generate
from .heat_maps import write_heat_maps as write_heat_maps
from .mask import Mask as Mask
from .onnx_export import OnnxReport as OnnxReport
from .onnx_export import export_onnx as export_onnx
from .patching import PatchReport as PatchReport
from .patching import patch as patch
from .patching import unpatch as unpatch
from .proof import ProofReport as ProofReport
from .proof import prove as prove
from .quantization import QuantizationReport as QuantizationReport
from .quantization import quantize as quantize
from .tuning import TuneReport as TuneReport
from .tuning import tune as tune

_flops.tell_torch()
