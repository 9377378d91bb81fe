"""The cases of examples/bench_kernels.py: shapes, random arguments, the work they ask for, and whole draft passes.

python examples/bench_kernels.py --out kernels.json
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dspine_hf import DSpineConfig, DSpineDraftModel
from dspine_hf.fast_tree import Tree, follow, grow
from dspine_hf.layers_dspine import Limits
from dspine_hf.ops_dspine import EAGER, FusedOps, Ops
from dspine_hf.static_cache import Places, RaggedDraftCache


@dataclass(frozen=True)
class Shape:
    """What an operation is called with; keys: rows that verification attends to; nodes: drafts of its tree, or 0."""

    d: int = 4096
    r: int = 256
    B: int = 16
    K: int = 16
    V: int = 151936
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    keys: int = 1040
    nodes: int = 0

    @property
    def rows(self) -> int:
        """Of a verification: the anchor and its drafts."""
        return 1 + self.nodes if self.nodes else self.B


TINY = Shape(d=48, r=16, B=4, K=4, V=300, heads=4, kv_heads=2, head_dim=16, keys=40)
CORNERS = {
    "d": (576, 8192),
    "r": (64, 256),
    "B": (4, 32),
    "K": (4, 32),
    "batch": (1, 64),
    "V": (49152, 151936),
    "nodes": (0, 63),
    "heads": (9, 32),
    "head_dim": (64, 128),
}
TINY_CORNERS = {
    "d": (24, 72),
    "r": (8, 20),
    "B": (3, 5),
    "K": (2, 5),
    "batch": (1, 2),
    "V": (61, 300),
    "nodes": (0, 9),
    "heads": (3, 4),
    "head_dim": (16, 24),
}
USES = {
    "rms_norm": ("d", "B", "batch"),
    "rotated_heads": ("B", "batch", "heads", "head_dim"),
    "swiglu": ("d", "B", "batch"),
    "gated_injection": ("d", "r", "B", "batch"),
    "topk": ("K", "B", "batch", "V"),
    "pair_write": ("d", "r", "B", "K", "batch"),
    "pair_scores": ("d", "B", "K", "batch"),
    "walk_chain": ("B", "K", "batch"),
    "verify_attention": ("B", "batch", "nodes"),
    "grow_tree": ("B", "K", "batch", "nodes"),
    "follow_tree": ("batch", "nodes"),
    "move_columns": ("B", "batch"),
}


def corners(op: str, grid: dict[str, tuple]) -> list[dict[str, int]]:
    """The corners that an operation is checked at: all parameters low, all high, and each alone high."""
    low, high = ({name: grid[name][end] for name in USES[op]} for end in (0, 1))
    return [low, high, *({**low, name: high[name]} for name in USES[op])]


def arguments(op: str, p: Shape, dtype: torch.dtype, head: torch.Tensor | None, device: str) -> list[Any]:
    """Fresh random arguments of an operation; head: E [V, d]."""

    def drawn(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, device=device) * scale).to(dtype)

    n, d, r, m = p.batch, p.d, p.r, max(p.B - 2, 1)
    w, small = drawn(d, scale=0.3) + 1, d**-0.5
    if op == "rms_norm":
        return [drawn(n, p.B, d), w, 1e-6]
    if op == "rotated_heads":
        turn = torch.randn(n, p.B, p.head_dim // 2, device=device).repeat(1, 1, 2) * 100
        x, w = drawn(n, p.B, p.heads * p.head_dim), drawn(p.head_dim, scale=0.3) + 1
        return [x, w, 1e-6, turn.cos().to(dtype), turn.sin().to(dtype)]
    if op == "swiglu":
        return [drawn(n, p.B, 3 * d), drawn(n, p.B, 3 * d)]
    A, B, b, U = drawn(r, d, scale=small), drawn(r, r, scale=r**-0.5), drawn(r), drawn(d, r, scale=r**-0.5)
    ids = torch.randint(p.V if head is None else len(head), (n, p.B - 1, p.K), device=device)
    if op == "gated_injection":
        return [drawn(n, p.B, d), drawn(n, r, dtype=torch.float32), w, drawn(r, d, scale=small), A, B, b, U, 1e-6]
    if op == "topk":
        return [drawn(n, p.B - 1, p.V), p.K]
    if op == "pair_write":
        return [drawn(n, m, d), w, 1e-6, drawn(n, m, p.K, r, dtype=torch.float32), A, B, b, U]
    if op == "pair_scores":
        return [drawn(n, m, p.K, d), w, 1e-6, drawn(p.V, d) if head is None else head, ids[:, :m].contiguous()]
    if op == "walk_chain":
        noise = torch.empty(ids.shape, device=device).exponential_()
        scores = {"dtype": torch.float32, "scale": 3.0}
        return [ids, drawn(n, p.K, **scores), drawn(n, p.B - 2, p.K, p.K, **scores), noise]
    if op == "grow_tree":  # no token twice in a slot, so that tokens tell paths apart
        ids = ids // p.K * p.K + torch.arange(p.K, device=device)
        return [ids, drawn(n, p.K, scale=3.0), drawn(n, p.B - 2, p.K, p.K, scale=3.0), max(p.nodes, 1)]
    if op == "follow_tree":
        return drawn_branch(n, 1 + max(p.nodes, 1), device)
    if op == "move_columns":
        stores = [drawn(n, p.kv_heads, p.keys, p.head_dim) for _ in range(2)]
        source = torch.rand(n, 2 * p.B, device=device).argsort(-1)[:, : p.B]
        return [*stores, source + p.keys - 2 * p.B, torch.arange(p.B, device=device).repeat(n, 1) + p.keys - 2 * p.B]
    start = torch.zeros(n, dtype=torch.int64, device=device)
    q, k, v = (drawn(n, *s, p.head_dim) for s in ((p.heads, p.rows), (p.kv_heads, p.keys), (p.kv_heads, p.keys)))
    if p.nodes:
        _, depth, tree = drawn_tree(n, p.rows, device)
        return [q, k, v, start, p.keys - p.rows + depth, None, 0, 0.0, 0, tree]
    limit = torch.arange(p.keys - p.B, p.keys, device=device).expand(n, -1).contiguous()
    return [q, k, v, start, limit]


def drawn_tree(batch: int, rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents, depths and ancestors, as bits of int64, `[batch, rows]` each, of random trees: the root is row 0."""
    parent = (torch.rand(batch, rows, device=device) * torch.arange(rows, device=device)).long()
    depth, tree = torch.zeros_like(parent), torch.ones_like(parent)
    for i in range(1, rows):
        above = parent[:, i : i + 1]
        depth[:, i : i + 1] = depth.gather(1, above) + 1
        tree[:, i : i + 1] = tree.gather(1, above) | (torch.ones_like(above) << i)
    return parent, depth, tree


def drawn_branch(batch: int, rows: int, device: str) -> list[Any]:
    """Random trees, and the choices of a target that follows each of them to one of its rows."""
    parent, depth, tree = drawn_tree(batch, rows, device)
    tokens = torch.randint(1000, (batch, rows), device=device) * rows + torch.arange(rows, device=device)
    branch = tree.gather(1, torch.randint(rows, (batch, 1), device=device))
    choice = torch.full_like(tokens, -1)
    for i in range(1, rows):
        above, own = parent[:, i : i + 1], tokens[:, i : i + 1]
        choice.scatter_(1, above, torch.where((branch >> i) & 1 == 1, own, choice.gather(1, above)))
    return [tokens[:, 1:].contiguous(), parent[:, 1:].contiguous(), depth, tree, choice, rows - 1]


def path_scores(
    candidates: torch.Tensor, first: torch.Tensor, pairs: torch.Tensor, nodes: int, tokens: torch.Tensor,
    parent: torch.Tensor, depth: torch.Tensor, bits: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The ascending scores of the paths of a tree `[batch, N]`; NaN of those that its numbers do not describe.

    Arguments and results of `grow_tree`. Of equally likely paths any may be taken, in any order.
    """
    (batch, slots, _), one = candidates.shape, torch.ones_like(bits[:, 0])
    row, total, last = torch.arange(batch, device=tokens.device), torch.zeros(bits.shape).to(bits.device), bits * 0
    total[:, 0].masked_fill_((depth[:, 0] != 0) | (bits[:, 0] != 1), float("nan"))
    for i in range(1, bits.shape[1]):
        above = parent[:, i - 1].clamp(0, i - 1)
        slot = depth[row, above]
        here = candidates[row, slot.clamp(0, slots - 1)] == tokens[:, i - 1 : i]
        table = pairs[row, (slot - 1).clamp(0, slots - 2), last[row, above]]
        steps = torch.where(slot[:, None] == 0, first, table).float().log_softmax(-1) - 1e-3  # what a step costs
        last[:, i] = here.int().argmax(-1)
        total[:, i] = total[row, above] + steps[row, last[:, i]]
        right = (above == parent[:, i - 1]) & here.any(-1) & (depth[:, i] == slot + 1) & (slot < slots)
        right &= bits[:, i] == bits[row, above] | (one << i)
        total[:, i].masked_fill_(~right, float("nan"))
    return total[:, 1:].sort(-1).values


def grown(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """Eager `grow_tree`."""
    tree = grow(*inputs)
    return tree.tokens, tree.parent, tree.depth, tree.bits


def followed(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """Eager `follow_tree`."""
    return follow(Tree(*inputs[:4]), *inputs[4:])


def moved(
    keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, target: torch.Tensor, ops: Any = None
) -> tuple[torch.Tensor, ...]:
    """Keys and values whose columns `source` were copied to `target`: in place by fused operations, else in copies."""
    if ops is not None:
        ops.move_columns([keys, values], ops.addresses([keys, values]), source, target)
        return keys, values
    row, found = torch.arange(len(source), device=source.device)[:, None], (keys.clone(), values.clone())
    for store, old in zip(found, (keys, values), strict=True):
        store[row, :, target] = old[row, :, source]
    return found


EAGER_TREES = {"grow_tree": grown, "follow_tree": followed, "move_columns": moved}  # these have no place among `Ops`


def operation(ops: Ops, op: str) -> Callable[..., Any]:
    """The operation of that name among eager or fused ones."""
    if isinstance(ops, FusedOps):
        return partial(moved, ops=ops) if op == "move_columns" else getattr(ops, op)
    return EAGER_TREES[op] if op in EAGER_TREES else getattr(ops, op)


def work(op: str, p: Shape, args: list[Any], outputs: list[torch.Tensor]) -> tuple[int, int]:
    """The fewest bytes that move (inputs and outputs once; of the head, the candidates' rows) and the operations."""
    moved = sum(t.numel() * t.element_size() for t in (*args, *outputs) if isinstance(t, torch.Tensor))
    n, m = p.batch, max(p.B - 2, 1)
    if op == "pair_scores":
        moved += (args[4].numel() - len(args[3])) * p.d * args[3].element_size()
    return moved, {
        "gated_injection": 2 * n * (p.B - 1) * (3 * p.d * p.r + p.r**2),
        "pair_write": 2 * n * m * (p.d * p.r + p.K * (p.d * p.r + p.r**2)),
        "pair_scores": 2 * n * m * p.K**2 * p.d,
        "verify_attention": 4 * n * p.heads * p.rows * p.keys * p.head_dim,
    }.get(op, 0)


class Borrowed(nn.Module):
    """What a drafter borrows of a target: an embedding and a head with random weights."""

    def __init__(self, p: Shape, dtype: torch.dtype):
        super().__init__()
        self.embedding, self.head = nn.Embedding(p.V, p.d, dtype=dtype), nn.Linear(p.d, p.V, bias=False, dtype=dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def draft_call(
    target: Borrowed, p: Shape, dtype: torch.dtype, method: dict[str, Any], backend: Any = None
) -> tuple[DSpineConfig, Any]:
    """A drafter's config, and a call that drafts one block behind its context and walks it greedily.

    backend: of torch.compile for the pass; None: it is not compiled.
    """
    device = target.head.weight.device
    shapes = {"hidden_size": p.d, "vocab_size": p.V, "num_attention_heads": p.heads, "num_key_value_heads": p.kv_heads}
    shapes |= {"head_dim": p.head_dim, "intermediate_size": 3 * p.d, "block_size": p.B, "transfer_rank": p.r}
    candidates = 1 if method.get("selection") == "independent" else p.K
    config = DSpineConfig(**shapes, num_candidates=candidates, **method)
    with torch.device(device):
        drafter = DSpineDraftModel(config).requires_grad_(False).eval()
        for layer in drafter.layers:
            if layer.injection is not None:
                layer.injection.U.weight.normal_(std=0.02)
        drafter.transfer.W.normal_(std=p.d**-0.5)
        drafter.to(dtype)
        view, rows, seen = drafter.bind_target(target).tabulated(), p.keys - p.B, {}
        cache = RaggedDraftCache(config.num_hidden_layers, p.keys)  # as in the fast loop
        cache.places = Places(torch.arange(rows).unsqueeze(0), rows, 0)
        features = torch.randn(1, rows, len(config.target_layer_ids) * p.d, dtype=dtype)
        drafter.extend_context(cache, features, torch.arange(rows).unsqueeze(0))
        cache.places = Places(torch.arange(rows, p.keys).unsqueeze(0), p.keys)
        anchor, position = torch.tensor([5]), torch.tensor([rows])
        if drafter.ops is not EAGER:
            seen["limits"] = Limits(drafter.ops.verify_attention, torch.tensor([0]), torch.tensor([p.keys - 1]))
    draft = drafter.draft_block
    if backend is not None:
        draft = torch.compile(draft, dynamic=False, backend=backend)

    def call() -> torch.Tensor:
        block = draft(view, cache, anchor, position, **seen)
        if block.transitions is None:
            return block.candidates[..., 0]
        return drafter.ops.walk_chain(block.candidates, block.transitions.first, block.transitions.pairs)[0]

    return config, call
