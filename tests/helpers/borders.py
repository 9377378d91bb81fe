"""Inputs with real strides and poisoned borders in every dimension: a read beyond the view shows in the result."""

import torch


def bordered(tensor: torch.Tensor, poison: float = float("nan"), border: int = 3) -> torch.Tensor:
    """The same values as a view into a larger storage that holds `poison` on every side; the last stride stays 1."""
    whole = torch.full([n + 2 * border for n in tensor.shape], poison, dtype=tensor.dtype, device=tensor.device)
    view = whole[tuple(slice(border, border + n) for n in tensor.shape)]
    return view.copy_(tensor)
