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


def lattice(unary: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """One table for every slot, for an engine that walks by itself: [batch, slots, S, S], the predecessor first.

    Args:
        unary: [batch, slots, S], best first: slot 1 given the anchor, and any slot given none of its K predecessors.
        pairs: [batch, slots - 1, K, S], slots 2.. given the K best candidates of the slot before.
    """
    size, known = unary.shape[-1], pairs.shape[2]
    first = unary[:, :1, None].expand(-1, -1, size, -1)
    others = unary[:, 1:, None].expand(-1, -1, size - known, -1)
    return torch.cat([first, torch.cat([pairs, others], dim=2)], dim=1)
