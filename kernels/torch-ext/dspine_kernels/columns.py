"""Columns of many key/value stores moved in one launch: what a branch of a tree leaves behind in every layer."""

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import early_launches, early_options, next_power_of_2
from ._tiles import start_early

MAX_MOVED = 64  # columns of a batch row
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # a number is moved as it is, whatever it means


@triton.jit
def _move_kernel(
    pointers_ptr, source_ptr, target_ptr, heads, rows, capacity, n,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, N_PAD: tl.constexpr, WORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # rows: batch * heads, of one store.
    start_early(PDL)
    store, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    begin = tl.load(pointers_ptr + store).to(tl.pointer_type(WORD)) + row.to(tl.int64) * capacity * WIDTH
    place, at = tl.arange(0, N_PAD), tl.arange(0, WIDTH_PAD)
    there = place < n
    batch = row // heads
    source = tl.load(source_ptr + batch * n + place, mask=there, other=0)
    target = tl.load(target_ptr + batch * n + place, mask=there, other=0)
    mask = (there & (source != target))[:, None] & (at < WIDTH)[None, :]
    kept = tl.load(begin + source[:, None] * WIDTH + at[None, :], mask=mask)
    tl.debug_barrier()  # a column may be read for one place and written for another
    tl.store(begin + target[:, None] * WIDTH + at[None, :], kept, mask=mask)


@custom_op("move_columns", mutates_args={"stores"})
def _move_columns(
    stores: list[torch.Tensor], pointers: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:
    batch, heads, capacity, width = stores[0].shape
    programs = len(stores) * batch * heads
    if not programs or not source.numel() or not width:
        return
    _move_kernel[(programs,)](
        pointers, source, target, heads, batch * heads, capacity, source.shape[1],
        WIDTH=width, WIDTH_PAD=next_power_of_2(width), N_PAD=next_power_of_2(source.shape[1]),
        WORD=_WORDS[stores[0].element_size()], num_warps=1, **early_options(early_launches(pointers.device)),
    )  # fmt: skip


@_move_columns.register_fake
def _(stores, pointers, source, target):
    return None


def addresses(stores: list[torch.Tensor]) -> torch.Tensor:
    """Where the stores lie, as [`move_columns`] takes it: int64 [len(stores)] on their device. Cannot be captured."""
    return torch.tensor([store.data_ptr() for store in stores], dtype=torch.int64, device=stores[0].device)


def move_columns(
    stores: list[torch.Tensor], pointers: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copies the columns `source` of every store to `target`, as if all of them were read before one is written.

    Args:
        stores: keys or values [batch, heads, capacity, width], contiguous and alike in shape, dtype and device.
        pointers: what [`addresses`] says of them; they may not have moved since.
        source, target: columns of every batch row [batch, n], int64, n at most 64; no target twice in a row.

    Raises:
        ValueError: stores that are not alike or not contiguous, columns of another shape or dtype, or too many.
    """
    first = stores[0]
    for store in stores:
        unlike = (store.shape, store.dtype, store.device) != (first.shape, first.dtype, first.device)
        if unlike or store.dim() != 4 or not store.is_contiguous():
            raise ValueError(
                f"expected contiguous stores of one dtype, like {list(first.shape)} {first.dtype} on {first.device}; "
                f"found {list(store.shape)} {store.dtype} on {store.device}. Move them group by group."
            )
    for name, columns in (("source", source), ("target", target)):
        if columns.dtype != torch.int64 or columns.dim() != 2 or columns.shape != (first.shape[0], source.shape[1]):
            raise ValueError(
                f"expected {name} [{first.shape[0]}, n] int64, as many as of source; found {list(columns.shape)} "
                f"{columns.dtype}."
            )
    if source.shape[1] > MAX_MOVED:
        raise ValueError(
            f"expected at most {MAX_MOVED} columns a row; found {source.shape[1]}. Use `StaticRows.move`."
        )
    if pointers.shape != (len(stores),) or pointers.dtype != torch.int64:
        raise ValueError(f"expected the addresses of {len(stores)} stores; found {list(pointers.shape)}.")
    ops.move_columns(stores, pointers, source.contiguous(), target.contiguous())
