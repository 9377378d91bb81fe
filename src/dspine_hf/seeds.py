"""Random numbers as a function of what they are for: the same after a restart and for any number of processes."""

import torch

_MASK = 0xFFFFFFFF


def hash_seed(*keys: int) -> int:
    """One 32-bit seed from integers, e.g. (run seed, step, batch)."""
    h = 0
    for key in keys:
        h = _mix(h ^ (int(key) & _MASK))
    return h


def hashed_uniform(seed: int, step: int, index: torch.Tensor, count: int) -> torch.Tensor:
    """`count` numbers in [0, 1) for each sequence: index [batch] -> [batch, count], fp32, on the index's device."""
    h = _mix(index.long() ^ hash_seed(seed, step)).unsqueeze(1)  # [batch, 1]
    places = torch.arange(count, device=index.device) * 0x9E3779B9
    return (_mix((h + places) & _MASK) >> 8).float() / 2**24


def _mix(x):
    """A bijection of 32-bit integers that spreads every input bit; for Python integers and int64 tensors alike."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B + 0x1B873593) & _MASK
    return x ^ (x >> 16)
