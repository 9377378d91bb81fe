"""The left-to-right walk through the pair scores, as the engines need it: tables per slot, nothing read back."""

import torch


def realised_scores(first: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Scores of every slot's candidates given the best candidate of the slot before.

    Args:
        first: [batch, K], slot 1 given the anchor.
        pairs: [batch, slots - 1, K_prev, K], slots 2.. given their predecessor's candidates.

    Returns:
        [batch, slots, K]; the argmax of each row is the drafted token's index.
    """
    rows = [first]
    for slot in range(pairs.shape[1]):
        best = rows[-1].argmax(-1).view(-1, 1, 1).expand(-1, 1, pairs.shape[-1])
        rows.append(pairs[:, slot].gather(1, best).squeeze(1))
    return torch.stack(rows, dim=1)


def lattice(first: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """One table for every slot, for an engine that walks by itself: [batch, slots, K_prev, K].

    Args:
        first: [batch, K], slot 1 given the anchor: its row for every predecessor.
        pairs: [batch, slots - 1, K_prev, K], slots 2.. given their predecessor's candidates.
    """
    return torch.cat([first[:, None, None].expand(-1, 1, first.shape[-1], -1), pairs], dim=1)
