"""AdamW, with weight decay on matrices alone."""

from __future__ import annotations

import torch
from torch import nn


def decayed(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that weight decay pulls to zero, and the others.

    Decayed are the weights of two or more dimensions, except embeddings: a norm's scale and a bias have nothing to
    regularise, and an embedding would decay for tokens that are not seen. A weight shared with an embedding is one.

    Args:
        model: any module.

    Returns:
        (decayed, the others), each parameter that needs a gradient once, in the model's order.
    """
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[parameter.dim() < 2 or id(parameter) in tables].append(parameter)
    return groups


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
) -> torch.optim.AdamW:
    """AdamW over ``decayed``'s two groups; torch's fused kernel. The defaults of betas and eps are the paper's.

    Args:
        model: whose parameters are trained.
        learning_rate: of all of them, before a schedule.
        weight_decay: of the first group, times the learning rate at each update.
        betas: of the running means of the gradient and its square.
        eps: added to the root of the latter.

    Source: Loshchilov, Hutter 2019, arXiv:1711.05101; Vaswani et al. 2017, section 5.3.
    """
    heavy, light = decayed(model)
    groups = [{"params": heavy, "weight_decay": weight_decay}, {"params": light, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=0.0, fused=True)
