"""Putting the fused layers into existing models, and taking them out again."""

from . import bart as bart
from . import bert as bert
from . import distilbert as distilbert
from . import gemma as gemma
from . import gpt_neox as gpt_neox
from . import huggingface_parts as huggingface_parts
from . import llama as llama
from . import olmo as olmo
from . import phi3 as phi3
from . import pre_norm as pre_norm
from . import sequential as sequential
from . import torch_encoder as torch_encoder
from . import torch_nn as torch_nn
from .hand_written import declare_attention as declare_attention
from .hand_written import declare_feed_forward as declare_feed_forward
from .hand_written import declare_layer_norm as declare_layer_norm
from .hand_written import declare_residual as declare_residual
from .model import patch as patch
from .model import settings as settings
from .model import unpatch as unpatch
from .registry import Recipe as Recipe
from .registry import backend as backend
from .registry import recipe as recipe
from .registry import register_recipe as register_recipe
from .report import Entry as Entry
from .report import PatchReport as PatchReport
