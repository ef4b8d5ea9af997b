"""Eval mode, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, without gradients, and each part back as it was."""
    were_training = [each for each in model.modules() if each.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each in were_training:  # frozen parts may have been in eval mode before
            each.training = True
