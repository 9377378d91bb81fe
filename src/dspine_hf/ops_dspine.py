"""The eager reference of every DSpine operation, one plain function each, and the choice of eager or fused ones."""

import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType

import torch
import torch.nn.functional as F

# Where the kernels are looked for, in this order: the package's own, an installed package, a repository of the Hub.
KERNELS = ("dspine_hf.kernels", "dspine_kernels")
KERNELS_REPOSITORY, KERNELS_VERSION = "dspine-hf/dspine-kernels", 1


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Weightless RMS norm over the last dimension, computed and returned in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with the weight w [d], in the dtype of x: [.., d] -> [.., d]."""
    return w * rms(x, eps).to(x.dtype)


def predicted_feature(n: torch.Tensor, P: torch.Tensor, eps: float) -> torch.Tensor:
    """z = rms(P n): what a slot predicts of its own token, in the transfer space. [.., d] -> [.., r], fp32."""
    return rms(F.linear(n, P), eps)


def gated_write(
    n: torch.Tensor, s: torch.Tensor, A: torch.Tensor, B: torch.Tensor, b: torch.Tensor, U: torch.Tensor
) -> torch.Tensor:
    """U (sigmoid(A n + B s + b) * s): what the message s adds to a slot whose normed state is n.

    Shapes: n [.., d], s [.., r]; A [r, d], B [r, r], b [r], U [d, r]. Leading dimensions broadcast. Returns [.., d].
    """
    s = s.to(n.dtype)
    gate = torch.sigmoid(F.linear(n, A) + F.linear(s, B, b))
    return F.linear(gate * s, U)


def shifted_messages(anchor: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """What slots 1..B-1 receive: phi(anchor), then their predecessor's predicted feature.

    Shapes: anchor [.., r], z [.., B-1, r] (features of slots 1..B-1). Returns [.., B-1, r].
    """
    return torch.cat([anchor.unsqueeze(-2).to(z.dtype), z[..., :-1, :]], dim=-2)


def gated_injection(
    h: torch.Tensor, anchor: torch.Tensor, w: torch.Tensor, P: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    b: torch.Tensor, U: torch.Tensor, eps: float, forced: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Write each slot's predicted feature into its successor, the anchor's feature into slot 1; slot 0 stays.

    Args:
        h: [.., B, d]. anchor: phi(anchor) [.., r].
        w: weight of the injection's norm [d]. P, A: [r, d]. B: [r, r]. b: [r]. U: [d, r].
        forced: messages [.., B-1, r] that replace the predicted ones where they are not NaN.

    Returns:
        The new h, and the features z [.., B-1, r] fp32 of slots 1..B-1.
    """
    n = rms_norm(h[..., 1:, :], w, eps)
    z = predicted_feature(n, P, eps)
    s = shifted_messages(anchor, z)
    if forced is not None:
        s = torch.where(forced.isnan(), s, forced)
    written = h[..., 1:, :] + gated_write(n, s, A, B, b, U)
    return torch.cat([h[..., :1, :], written], dim=-2), z


def topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of every row, descending: [.., V] -> values [.., k] fp32 and indices [.., k]."""
    values, index = logits.topk(k, dim=-1)
    return values.float(), index


# ---- which of them run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ops:
    """The operations of a draft pass: these eager ones, or the fused ones, which have their names and arguments."""

    gated_injection: Callable = gated_injection
    topk: Callable = topk


EAGER = Ops()
_CHOSEN: dict[tuple, Ops] = {}


@torch.compiler.assume_constant_result
def fused_ops(device: str, dtype: torch.dtype, rank: int, candidates: int) -> Ops:
    """The fused operations for these shapes; the eager ones, with one warning that says why, where they cannot run.

    Args:
        device: type of the drafter's device. dtype: of its weights.
        rank: r, the width of the transfer space. candidates: K.
    """
    key = (device, dtype, rank, candidates, os.environ.get("TRITON_INTERPRET"))
    if key not in _CHOSEN:
        kernels, reason = find_kernels()
        if kernels is not None:
            reason = kernels.why_not(device, dtype=dtype, rank=rank, candidates=candidates)
        if kernels is None or reason:
            warnings.warn(f"use_fused_kernels=True: {reason}; the eager operations run.", stacklevel=2)
            _CHOSEN[key] = EAGER
        else:
            _CHOSEN[key] = Ops(**{op.name: getattr(kernels, op.name) for op in fields(Ops)})
    return _CHOSEN[key]


def find_kernels() -> tuple[ModuleType | None, str]:
    """The kernel package and "", or None and the reason why there is none.

    The repository of the Hub is only asked when the `kernels` library is installed, which downloads it once, refuses
    organisations that it does not trust, and takes a local build from LOCAL_KERNELS=dspine-hf/dspine-kernels=<folder>.
    """
    for name in KERNELS:
        try:
            return importlib.import_module(name), ""
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    get_kernel = getattr(_kernels_library(), "get_kernel", None)
    if get_kernel is None:
        return None, f"neither {' nor '.join(KERNELS)} is installed, nor the kernels library"
    try:
        return get_kernel(KERNELS_REPOSITORY, version=KERNELS_VERSION), ""
    except Exception as error:  # no network, no such repository, no trust, no build for this machine
        return None, f"the kernels library cannot load {KERNELS_REPOSITORY} ({type(error).__name__}: {error})"


def _kernels_library() -> ModuleType | None:
    try:
        return importlib.import_module("kernels")
    except ImportError:
        return None
