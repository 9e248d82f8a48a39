"""Planted defects: the mistakes kernels are known to make, put into the emulations one at a time.

The contract has to catch every one of them, in every storage type it concerns, on the data meant for it.
"""

from .attention import ATTENTION as ATTENTION
from .defect import Defect as Defect
from .ffn import FFN as FFN
from .linear_cross_entropy import LINEAR_CROSS_ENTROPY as LINEAR_CROSS_ENTROPY
from .norm import NORM as NORM

DEFECTS: tuple[Defect, ...] = (*ATTENTION, *NORM, *FFN, *LINEAR_CROSS_ENTROPY)
