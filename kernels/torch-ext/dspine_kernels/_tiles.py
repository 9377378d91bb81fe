"""The product of two tiles, as every kernel here takes it."""

import torch
import triton
import triton.language as tl

from ._runtime import INTERPRETED


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc [M, N] + a [M, K] b [N, K]^T in fp32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)


def product_options(dtype: torch.dtype) -> dict[str, str | bool]:
    """PRECISION and UPCAST of products of `dtype`: fp32 is never rounded to tf32.

    Triton's interpreter multiplies the bits of bf16 operands: there they are widened before, to the same product.
    """
    return {
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "UPCAST": INTERPRETED and dtype is torch.bfloat16,
    }
