"""The product of two tiles, as every kernel here takes it."""

import torch
import triton
import triton.language as tl

from ._runtime import INTERPRETED

EARLY_PROGRAMS = tl.constexpr(264)  # of a launch that begins early: two per multiprocessor of an H200


@triton.jit
def start_early(PDL: tl.constexpr):
    """With PDL: lets the next launch begin, and waits for the one before; what it wrote may be read from here on.

    PDL = 2 waits first: then a launch that has begun knows that all but the last one before it have ended.
    """
    if PDL == 2:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    elif PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_early(W, first, N, K, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr):
    """Asks the L2 cache for the beginnings of BLOCK_N rows of the 16-bit weight W [N, K], from row `first` on.

    128 pieces of AHEAD numbers each, 128 // BLOCK_N a row: they lie one after another. Nothing waits for them.
    Programs behind the first EARLY_PROGRAMS, which begin when others end, ask for nothing.
    """
    piece = tl.arange(0, 128)
    parts: tl.constexpr = 128 // BLOCK_N
    row, column = first + piece // parts, piece % parts * AHEAD
    there = (row < N) & (column + AHEAD <= K) & (tl.program_id(0) < EARLY_PROGRAMS)
    address = (W + row.to(tl.int64) * K + column).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [address, tl.where(there, 2 * AHEAD, 0)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def product(a, b, acc, UPCAST: tl.constexpr):
    """acc [M, N] + a [M, K] b [N, K]^T in fp32; fp32 operands are never rounded to tf32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


def product_options(dtype: torch.dtype) -> dict[str, bool]:
    """UPCAST of products of `dtype`: triton's interpreter multiplies the bits of bf16, which are widened before."""
    return {"UPCAST": INTERPRETED and dtype is torch.bfloat16}
