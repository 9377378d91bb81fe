"""The product of two tiles, as every kernel here takes it."""

import torch
import triton
import triton.language as tl

from ._runtime import INTERPRETED


@triton.jit
def start_early(PDL: tl.constexpr):
    """With PDL: lets the next launch begin, and waits for the one before; what it wrote may be read from here on."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


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
