"""Whether and where the kernels can run, and the small sums that every launch needs."""

import os
import sys

import torch

try:
    import triton
except Exception as error:  # a triton that does not fit the machine fails in many ways
    triton = None
    MISSING = f"triton cannot be imported ({type(error).__name__}: {error})"
else:
    MISSING = ""

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # as triton itself decides, when it decorates a kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RANK = 512  # r
MAX_K = 32  # candidates


def available(device: torch.device | str | None = None) -> bool:
    """Whether the kernels can run on tensors of `device`; None: whether they can run at all."""
    return not why_not(device)


def why_not(
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    rank: int = 1,
    candidates: int = 1,
) -> str:
    """The reason why the kernels cannot run for a drafter, as half a sentence; empty when they can.

    Args:
        device: where its tensors are; None: anywhere.
        dtype: of its weights. rank: r, the width of its transfer space. candidates: K.
    """
    if MISSING:
        return MISSING
    kind = None if device is None else torch.device(device).type
    if kind == "cpu" and not INTERPRETED:
        return "the tensors are on the CPU"
    if kind not in (None, "cuda", "xpu", "cpu"):
        return f"the kernels are not made for {kind} tensors"
    if dtype not in DTYPES:
        return f"the kernels compute in float32, bfloat16 or float16, not in {dtype}"
    if rank > MAX_RANK:
        return f"the kernels take a transfer rank of at most {MAX_RANK}, not {rank}"
    return f"the kernels take at most {MAX_K} candidates, not {candidates}" if candidates > MAX_K else ""


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def early_launches(device: torch.device) -> bool:
    """Whether a launch on the device may begin while the one before it ends (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip is not None or INTERPRETED:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def early_options(pdl: bool) -> dict[str, int]:
    """How a kernel with a PDL argument is launched.

    Where torch.compile launches its kernels early too, they wait for the launch before them only if they read what it
    wrote. So no launch may then begin before all but the last one have ended: PDL = 2, see `_tiles.start_early`.
    """
    if not pdl:
        return {"PDL": 0}
    inductor = sys.modules.get("torch._inductor.config")
    others = getattr(getattr(inductor, "triton", None), "enable_pdl", False)
    return {"PDL": 2 if others else 1, "launch_pdl": True}


def refuse_unlike(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors have one dtype that the kernels know, and one device."""
    first_name, first = next(iter(tensors.items()))
    if first.dtype not in DTYPES:
        raise ValueError(f"expected {first_name} in float32, bfloat16 or float16; found {first.dtype}. Cast it.")
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"expected {name} like {first_name}, {first.dtype} on {first.device}; found {tensor.dtype} on "
                f"{tensor.device}. Cast or move it."
            )


def refuse_tables(candidates: torch.Tensor, first: torch.Tensor, pairs: torch.Tensor) -> None:
    """Raises ValueError unless candidates [rows, slots, K] have scores [rows, K] and [rows, slots - 1, K or 1, K]."""
    rows, slots, K = candidates.shape
    wanted = [(rows, K), (rows, max(slots - 1, 0), pairs.shape[-2], K)]
    if [tuple(first.shape), tuple(pairs.shape)] != wanted or pairs.shape[-2] not in (1, K):
        raise ValueError(
            f"expected first {[rows, K]} and pairs [{rows}, {slots - 1}, {K} or 1, {K}] for candidates "
            f"{list(candidates.shape)}; found {list(first.shape)} and {list(pairs.shape)}."
        )
