"""Models that were made on torch's ``meta`` device: shapes first, numbers when there is room."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from hpc_ddp.core.errors import UsageError

Init = Callable[[nn.Module], object]

NEITHER = 2  # the byte of a bool that is neither False nor True


def materialize(module: nn.Module, device: torch.device, init: Init | None = None) -> None:
    """Replace the ``meta`` tensors of a module by tensors on a device, and fill them.

    The numbers are those of a module that is made on the device: each submodule's
    ``reset_parameters`` draws them from the global generators, as its constructor would. Then
    `init`, unless None, is called with the submodule. Whole tensors are filled, so the numbers do
    not depend on the number of ranks that will share them. Submodules without ``meta`` tensors of
    their own are left alone. Tied parameters stay tied.

    Raises
    ------
    UsageError
        a parameter or buffer still has no numbers; the submodules before it are changed
    """
    materialized: dict[torch.Tensor, torch.Tensor] = {}  # by the tensor on ``meta``
    for path, submodule in module.named_modules():
        names = [name for name, tensor in _tensors(submodule) if tensor.is_meta]
        for name in names:
            old = getattr(submodule, name)
            if old not in materialized:
                materialized[old] = _allocate(old, device)
            setattr(submodule, name, materialized[old])
        if not names:
            continue
        reset = getattr(submodule, "reset_parameters", None)
        if reset is not None:
            reset()
        if init is not None:
            init(submodule)
        for name in names:
            if _lacks_numbers(getattr(submodule, name)):
                raise UsageError(
                    f"the model was made on meta, and nothing gives numbers to"
                    f" {f'{path}.{name}'.lstrip('.')} of a {type(submodule).__name__}; accepted:"
                    " a module with reset_parameters(), or init=",
                    hint="init=f is called with each submodule that has tensors: let f fill them",
                )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each parameter and buffer of a module itself, not of its
    submodules; a tensor with several names several times."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _allocate(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor or parameter like `old` on a device, filled with a value that hardly any
    initialisation leaves behind: NaN, `NEITHER`, or the dtype's largest whole number."""
    new = torch.empty_like(old, device=device)
    if new.is_floating_point() or new.is_complex():
        new.data.fill_(torch.nan)
    elif new.dtype is torch.bool:
        new.view(torch.uint8).fill_(NEITHER)
    else:
        new.fill_(torch.iinfo(new.dtype).max)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _lacks_numbers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor still has a number with which `_allocate` has filled it. The largest
    whole number may also be one of the module's own: there the whole tensor must have it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.detach().isnan().any())
    if tensor.dtype is torch.bool:
        return bool((tensor.view(torch.uint8) == NEITHER).any())
    return tensor.numel() > 0 and bool((tensor == torch.iinfo(tensor.dtype).max).all())
