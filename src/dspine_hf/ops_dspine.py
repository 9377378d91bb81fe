"""The eager reference of every DSpine operation: one plain function each, as DESIGN.md section 1 writes it."""

import torch
import torch.nn.functional as F


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Weightless RMS norm over the last dimension, computed and returned in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


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
