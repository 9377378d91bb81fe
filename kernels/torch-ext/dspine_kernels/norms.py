"""What stands between a drafter's products: its RMSNorms, the rotated heads of queries and keys, and its SwiGLU.

A draft pass has few rows, so that what it costs is how many launches it takes: each of these is one. Results are
rounded to the dtype of the inputs where the separate eager operations round them.
"""

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import early_launches, early_options, next_power_of_2, refuse_unlike
from ._tiles import start_early

MAX_WIDTH = 65536  # numbers of a row, which one program holds
TILE = 2048  # numbers of a program that holds several rows or heads
MANY_ROWS = 1024  # fewer, and every program holds one


@triton.jit
def _rms_kernel(
    x_ptr, w_ptr, y_ptr, outer, inner, rows, M, d, eps,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M of the M rows of x [M // rows, rows, d], whose strides are outer, inner and 1."""
    m, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    w = tl.load(w_ptr + n, mask=n < d, other=0.0).to(tl.float32)
    mask = (m < M)[:, None] & (n < d)[None, :]
    at = (m // rows).to(tl.int64) * outer + (m % rows).to(tl.int64) * inner
    start_early(PDL)
    x = tl.load(x_ptr + at[:, None] + n[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / d + eps)
    dtype = y_ptr.dtype.element_ty
    y = (x * scale[:, None]).to(dtype).to(tl.float32) * w[None, :]
    tl.store(y_ptr + m.to(tl.int64)[:, None] * d + n[None, :], y.to(dtype), mask=mask)


@triton.jit
def _rotated_kernel(
    x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, x_batch, x_row, cos_batch, cos_row, sin_batch, sin_row, rows, heads, eps,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of one row, in halves that are rotated into each other."""
    batch, row = (tl.program_id(0) // rows).to(tl.int64), (tl.program_id(0) % rows).to(tl.int64)
    h, k = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, HALF_PAD)
    inside = k < HALF
    mask = (h < heads)[:, None] & inside[None, :]
    w1 = tl.load(w_ptr + k, mask=inside, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(w_ptr + HALF + k, mask=inside, other=0.0).to(tl.float32)[None, :]
    x_at = x_ptr + batch * x_batch + row * x_row + h[:, None] * (2 * HALF) + k[None, :]
    cos_at = cos_ptr + batch * cos_batch + row * cos_row + k
    sin_at = sin_ptr + batch * sin_batch + row * sin_row + k
    start_early(PDL)
    x1 = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + HALF, mask=mask, other=0.0).to(tl.float32)
    cos1 = tl.load(cos_at, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_at + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_at, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_at + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * HALF) + eps)[:, None]
    dtype = y_ptr.dtype.element_ty
    x1 = ((x1 * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
    x2 = ((x2 * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    y1 = (x1 * cos1).to(dtype).to(tl.float32) - (x2 * sin1).to(dtype).to(tl.float32)
    y2 = (x2 * cos2).to(dtype).to(tl.float32) + (x1 * sin2).to(dtype).to(tl.float32)
    y_at = y_ptr + ((batch * heads + h[:, None]) * rows + row) * (2 * HALF) + k[None, :]
    tl.store(y_at, y1.to(dtype), mask=mask)
    tl.store(y_at + HALF, y2.to(dtype), mask=mask)


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, y_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: BLOCK numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start_early(PDL)
    gate = tl.load(gate_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(y_ptr + at, (silu * up).to(dtype), mask=at < count)


@custom_op("rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    groups, rows, d = x.shape
    out, M, BLOCK_D = x.new_empty(groups, rows, d), groups * rows, next_power_of_2(d)
    BLOCK_M = 1 if M < MANY_ROWS else max(1, TILE // BLOCK_D)
    if M:
        _rms_kernel[(triton.cdiv(M, BLOCK_M),)](
            x, w, out, *x.stride()[:2], rows, M, d, eps, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D,
            num_warps=max(1, min(16, BLOCK_M * BLOCK_D // 256)), **early_options(early_launches(x.device)),
        )  # fmt: skip
    return out


@_rms_norm.register_fake
def _(x, w, eps):
    return x.new_empty(x.shape)


@custom_op("rotated_heads", mutates_args=())
def _rotated_heads(x: torch.Tensor, w: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    batch, rows, width = x.shape
    head_dim = len(w)
    heads = width // head_dim
    out, HALF_PAD = x.new_empty(batch, heads, rows, head_dim), next_power_of_2(head_dim // 2)
    BLOCK_H = min(next_power_of_2(max(heads, 1)), max(1, TILE // (2 * HALF_PAD)))
    if batch * rows * heads:
        strides = (*x.stride()[:2], *cos.stride()[:2], *sin.stride()[:2])
        _rotated_kernel[(batch * rows, triton.cdiv(heads, BLOCK_H))](
            x, w, cos, sin, out, *strides, rows, heads, eps, HALF=head_dim // 2, HALF_PAD=HALF_PAD, BLOCK_H=BLOCK_H,
            num_warps=max(1, min(16, BLOCK_H * HALF_PAD // 128)), **early_options(early_launches(x.device)),
        )  # fmt: skip
    return out


@_rotated_heads.register_fake
def _(x, w, eps, cos, sin):
    batch, rows, width = x.shape
    return x.new_empty(batch, width // w.shape[0], rows, w.shape[0])


@custom_op("swiglu", mutates_args=())
def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out, count, BLOCK = gate.new_empty(gate.shape), gate.numel(), 1024
    if count:
        options = early_options(early_launches(gate.device))
        _swiglu_kernel[(triton.cdiv(count, BLOCK),)](gate, up, out, count, BLOCK=BLOCK, num_warps=4, **options)
    return out


@_swiglu.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape)


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it, with a last stride of 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm: x [.., d] is normalised in fp32, rounded to its dtype, then multiplied by w [d].

    Returns:
        [.., d], dense.

    Raises:
        ValueError: shapes that do not belong together, d above 65536, dtypes or devices that differ.
    """
    refuse_unlike(x=x, w=w)
    if w.dim() != 1 or x.shape[-1:] != w.shape or not 1 <= len(w) <= MAX_WIDTH:
        raise ValueError(
            f"expected x [.., d] and w [d] with d in 1..{MAX_WIDTH}; found {list(x.shape)} and {list(w.shape)}."
        )
    rows = x.flatten(0, -3) if x.dim() > 3 else x[(None,) * (3 - x.dim())]  # [groups, rows, d]
    return ops.rms_norm(_dense_rows(rows), w.contiguous(), float(eps)).view(x.shape)


def rotated_heads(x: torch.Tensor, w: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Every head's RMSNorm and rotary position: what attention takes of a projection to queries or keys.

    Args:
        x: [batch, rows, heads * head_dim]. w: the norm's weight [head_dim], even. eps: of the norm.
        cos, sin: [batch or 1, rows or 1, head_dim] in x's dtype.

    Returns:
        [batch, heads, rows, head_dim], dense.

    Raises:
        ValueError: shapes that do not belong together, dtypes or devices that differ.
    """
    refuse_unlike(x=x, w=w, cos=cos, sin=sin)
    head_dim = len(w) if w.dim() == 1 else 0
    tables = {(b, r, head_dim) for b in (1, *x.shape[:1]) for r in (1, *x.shape[1:2])}
    if (
        x.dim() != 3 or not 2 <= head_dim <= MAX_WIDTH or head_dim % 2 or x.shape[-1] % head_dim
        or not {tuple(cos.shape), tuple(sin.shape)} <= tables
    ):  # fmt: skip
        raise ValueError(
            "expected x [batch, rows, heads * head_dim], w [head_dim] with an even head_dim, and cos and sin "
            f"[batch, rows, head_dim]; found {list(x.shape)}, {list(w.shape)}, {list(cos.shape)} and "
            f"{list(sin.shape)}."
        )
    cos, sin = (_dense_rows(t).expand(*x.shape[:2], head_dim) for t in (cos, sin))
    return ops.rotated_heads(_dense_rows(x), w.contiguous(), float(eps), cos, sin)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of one shape and dtype.

    Raises:
        ValueError: shapes, dtypes or devices that differ.
    """
    refuse_unlike(gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"expected gate and up of one shape; found {list(gate.shape)} and {list(up.shape)}.")
    return ops.swiglu(gate.contiguous(), up.contiguous())
