"""Buffers that show what a kernel leaves unwritten, reads outside of its inputs or writes outside of its outputs."""

import pytest
import torch

GUARD = 256  # elements on either side
UNWRITTEN = -(2**61) - 7  # of integers


def _poison(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else UNWRITTEN


def _untouched(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.isnan() if tensor.is_floating_point() else tensor == UNWRITTEN


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` with NaN around it: reading outside of it shows in whatever is computed."""
    buffer = torch.full((tensor.numel() + 2 * GUARD,), _poison(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    copy = buffer[GUARD:-GUARD].view(tensor.shape)
    return copy.copy_(tensor)


class Allocations:
    """Every buffer that `torch.empty` and its relatives handed out, all NaN, between guards."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def new(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> torch.Tensor:
        if 0 in shape:  # triton's interpreter makes such shells around its arguments
            return torch.zeros(shape, dtype=dtype, device=device)
        tensor = inside(torch.zeros(shape, dtype=dtype, device=device))
        tensor.fill_(_poison(dtype))
        self.buffers.append(tensor)
        return tensor

    def check(self, *outputs: torch.Tensor) -> None:
        """Assert that the guards are as they were and every element of the outputs was written."""
        assert self.buffers, "nothing was allocated while the kernel ran"
        for buffer in self.buffers:
            whole = buffer.as_strided((buffer.numel() + 2 * GUARD,), (1,), 0)
            assert bool(_untouched(whole[:GUARD]).all() & _untouched(whole[-GUARD:]).all()), "written outside"
        for output in outputs:
            assert not bool(_untouched(output).any()), "an element was not written"


@pytest.fixture
def allocations(monkeypatch):
    """Poisons what is allocated without values from here on; call `check` with the outputs afterwards."""
    found, float_size = Allocations(), torch.get_default_dtype()

    def flat(shape):
        return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)

    def empty(*shape, dtype=None, device=None):
        return found.new(flat(shape), dtype or float_size, device)

    def new_empty(self, *shape, dtype=None, device=None):
        return found.new(flat(shape), dtype or self.dtype, device or self.device)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: found.new(tuple(x.shape), x.dtype, x.device))
    return found
