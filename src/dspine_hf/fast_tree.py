"""Trees of drafts: the target verifies the likeliest paths through the transition cache at once, not one chain.

A path's probability is the product of its steps', so it never exceeds that of what it continues, and the N likeliest
paths of all lengths form a tree. Every node is a row of one pass that sees its own ancestors alone. Greedy decoding
follows the branch that the target itself takes. Source of the tree mask: X. Miao et al., SpecInfer, arXiv 2305.09781.
"""

from dataclasses import dataclass

import torch

from .ops_dspine import EAGER, FUSED_CANDIDATES, FusedOps, Ops
from .walk_dspine import finite

# A path must come before what continues it, also where rounding makes both equally likely: every step costs something,
# and none so much that this would be lost in the sum.
_STEP, _LEAST = 1e-3, -20.0
BITS = 63  # drafts whose rows are bits of one number, the anchor's beside them
FUSED_SLOTS = 32  # more of them, and torch's own operations run


@dataclass
class Tree:
    """
    N drafted tokens behind the anchor, parents before their children. Rows are counted with the anchor as row 0.

    Attributes:
        tokens: `[batch, N]`.
        parent: `[batch, N]`, the row of each token's parent.
        depth: `[batch, N + 1]`, how many steps a row is behind the anchor.
        seen: the rows that a row sees, its ancestors and itself, as `bits` or, of more than 63 drafts, as `sees`.
    """

    tokens: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    seen: torch.Tensor

    @property
    def bits(self) -> torch.Tensor:
        """`[batch, N + 1]`, int64: bit j of a row is whether it sees row j. Raises ValueError above 63 drafts."""
        if self.seen.dim() != 2:
            raise ValueError(f"expected a tree of at most {BITS} drafts; found {self.tokens.shape[1]}.")
        return self.seen

    @property
    def sees(self) -> torch.Tensor:
        """`[batch, N + 1, N + 1]`, whether a row sees another."""
        if self.seen.dim() != 2:
            return self.seen
        places = torch.arange(self.seen.shape[1], device=self.seen.device)
        return ((self.seen.unsqueeze(-1) >> places) & 1).bool()


def grow(candidates: torch.Tensor, first: torch.Tensor, pairs: torch.Tensor, nodes: int, ops: Ops = EAGER) -> Tree:
    """
    The likeliest paths.

    Args:
        candidates: token ids `[batch, slots, K]`.
        first: slot 1's scores `[batch, K]`.
        pairs: later slots' scores `[batch, slots - 1, R, K]`, row i after candidate i of the slot before; R is K, or 1
            where slots are independent.
        nodes: N; fewer where there are no more paths.
        ops: the drafter's operations: the fused ones among them grow trees of up to 63 drafts in one launch.
    """
    batch, slots, width = candidates.shape
    if isinstance(ops, FusedOps) and nodes <= BITS and slots <= FUSED_SLOTS and width <= FUSED_CANDIDATES:
        return Tree(*ops.grow_tree(candidates, first, pairs, nodes))
    total, last = _steps(first).topk(min(nodes, width), dim=-1)  # [batch, kept] each: of paths, and their ends
    origin = torch.full_like(last, -1)  # the number of the parent among all paths below; -1: the anchor
    levels, begin = [(total, last, origin)], 0
    for slot in range(1, slots):
        table = _steps(pairs[:, slot - 1])  # [batch, R, K]
        row = last if table.shape[1] > 1 else torch.zeros_like(last)
        steps = table.gather(1, row.unsqueeze(-1).expand(-1, -1, width))  # [batch, kept, K]
        longer = (total.unsqueeze(-1) + steps).flatten(1)
        total, place = longer.topk(min(nodes, longer.shape[1]), dim=-1)
        last, origin = place % width, begin + place // width
        begin += steps.shape[1]
        levels.append((total, last, origin))
    # Made on the device: a copy from the host could not be captured.
    level = torch.cat([torch.full_like(ends[0], depth) for depth, (_, ends, _) in enumerate(levels, start=1)])
    everything, last, origin = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    chosen = everything.topk(min(nodes, everything.shape[1]), dim=-1).indices.sort(dim=-1).values  # [batch, N]
    depth = level[chosen]
    tokens = candidates.gather(1, (depth - 1).unsqueeze(-1).expand(-1, -1, width))
    tokens = tokens.gather(2, last.gather(1, chosen).unsqueeze(-1)).squeeze(-1)
    parent = torch.searchsorted(chosen, origin.gather(1, chosen)) + 1
    parent = parent.masked_fill(depth == 1, 0)
    rows, depth = (torch.cat([torch.zeros_like(t[:, :1]), t], dim=1) for t in (parent, depth))
    if rows.shape[1] <= 1 + BITS:
        own = torch.ones_like(rows) << torch.arange(rows.shape[1], device=rows.device)
    else:
        own = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device).expand(batch, -1, -1)
        rows = rows.unsqueeze(-1).expand_as(own)
    seen = own
    for _ in range(slots):
        seen = own | seen.gather(1, rows)
    return Tree(tokens, parent, depth, seen)


def size(nodes: int, slots: int, width: int) -> int:
    """How many nodes a tree has that `nodes` were asked for, of `width` candidates in each of `slots` slots."""
    return min(nodes, sum(width**length for length in range(1, slots + 1)))


def _steps(scores: torch.Tensor) -> torch.Tensor:
    return finite(scores).log_softmax(-1).clamp(min=_LEAST) - _STEP


def follow(
    tree: Tree, choice: torch.Tensor, slots: int, ops: Ops = EAGER
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The branch that the target takes.

    Args:
        choice: the target's own token after every row `[batch, N + 1]`.
        slots: the length of the longest branch.
        ops: the drafter's operations: the fused ones among them follow trees of up to 63 drafts in one launch.

    Returns:
        How many drafts stand `[batch]`; the tokens `[batch, slots + 1]`: the branch, the target's next token, and
        whatever; the rows of the branch `[batch, slots + 1]`, the anchor's first; those behind it lie in their places.
    """
    if isinstance(ops, FusedOps) and tree.tokens.shape[1] <= BITS:
        return ops.follow_tree(tree.tokens, tree.parent, tree.depth, tree.bits, choice, slots)
    sees = tree.sees
    agree = torch.cat([torch.ones_like(tree.tokens[:, :1], dtype=torch.bool),
                       tree.tokens == choice.gather(1, tree.parent)], dim=1)  # fmt: skip
    stands = (agree.unsqueeze(1) | ~sees).all(-1)  # [batch, N + 1]: the row and all its ancestors agree
    agreed, end = (tree.depth * stands).max(-1)
    branch = sees.gather(1, end.view(-1, 1, 1).expand(-1, 1, sees.shape[2]))  # [batch, 1, N + 1]
    steps = torch.arange(slots + 1, device=choice.device)
    on_it = branch & (tree.depth.unsqueeze(1) == steps.view(1, -1, 1))  # [batch, slots + 1, N + 1]
    rows = torch.where(steps <= agreed.unsqueeze(1), on_it.int().argmax(-1), steps.clamp(max=tree.depth.shape[1] - 1))
    tokens = choice.gather(1, rows)  # the target's choice after a row of the branch is the next one's token
    return agreed, tokens, rows
