"""What a drafter's layers predict, what a right message is worth there, and whether choosing or covering limits.

Everything is counted over the target's own greedy text, so that "true" is what the target accepts at T = 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from .blocks import Blocks, cut_blocks, run_blocks
from .features import TargetReader
from .offline import has_own_pass, offline_drafts, walk_rounds
from .rewrite_dspine import told_states

DEPTHS = (1, 4, 8, 16, 32)
KINDS = ("only", "from", "prefix", "whole_block")
SCORES_AT_ONCE = 2**26  # numbers, so 256 MiB in fp32


@dataclass
class Shares:
    """Hits over trials by name, each a tensor whose last axis is the slot."""

    hits: dict[str, torch.Tensor] = field(default_factory=dict)
    trials: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, hit: torch.Tensor, valid: torch.Tensor) -> None:
        """Count bools [blocks, slots]: `hit` among those that are `valid`."""
        self.hits[name] = self.hits.get(name, 0) + (hit & valid).sum(0)
        self.trials[name] = self.trials.get(name, 0) + valid.sum(0)

    def add_ranks(self, name: str, ranks: torch.Tensor, valid: torch.Tensor) -> None:
        """Count recall at every depth of `DEPTHS`: ranks [blocks, slots], 0 is the best."""
        for depth in DEPTHS:
            self.add(f"{name}@{depth}", ranks < depth, valid)

    def rate(self, name: str) -> list[float]:
        """The share by slot; 0 where nothing was tried."""
        return [round(x, 4) for x in (self.hits[name] / self.trials[name].clamp_min(1)).tolist()]


def true_ranks(
    score: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, truth: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """How many tokens score above the true one; of equal scores the lower id comes first.

    Args:
        score: rows [m, w] -> scores of the whole vocabulary [m, V]. rows: [.., w]; truth: [..] token ids.

    Returns:
        Ranks [..], 0 for the best token.
    """
    pieces, m = [], max(1, SCORES_AT_ONCE // vocab_size)
    for part, ids in zip(rows.flatten(0, -2).split(m), truth.flatten().split(m), strict=True):
        scores, ids = score(part), ids.unsqueeze(1)
        own = scores.gather(1, ids)
        earlier = torch.arange(scores.shape[1], device=ids.device) < ids
        pieces.append(((scores > own) | ((scores == own) & earlier)).sum(-1))
    return torch.cat(pieces).view_as(truth)


def forced_slots(kind: str, slots: int, device: torch.device) -> torch.Tensor:
    """Which messages are forced in the copy of a block that is read at slot t: bool [t, slot that is written to].

    "only" and "from": slot t's own. "prefix": those of slots 1..t. "whole_block": all of them; since a block attends
    to all of itself, slot t then sees its own token in what slot t + 1 was told.
    """
    ones = torch.ones(slots, slots, dtype=torch.bool, device=device)
    return ones if kind == "whole_block" else ones.tril() if kind == "prefix" else ones.tril().triu()


class DrafterAnalysis:
    """Counts over sequences; [`DrafterAnalysis.add`] one after another, then read [`DrafterAnalysis.result`].

    Args:
        drafter, target: the pair, on one device, in the dtype to measure.
        anchors: blocks per sequence for the passes with forced messages, spread evenly; None: one at every token.
        chunk: blocks in one pass.

    Raises:
        ValueError: a drafter with a pass of its own (a baseline), whose slots these measurements do not describe.
    """

    def __init__(self, drafter: Any, target: Any, anchors: int | None = None, chunk: int = 64):
        if has_own_pass(drafter):
            raise ValueError(f"expected a DSpine or DFlash drafter; {type(drafter).__name__} has a pass of its own.")
        self.drafter, self.anchors, self.chunk = drafter, anchors, chunk
        self.reader, self.view = TargetReader(target, drafter.config.target_layer_ids), drafter.bind_target(target)
        self.layers = [i for i, layer in enumerate(drafter.layers) if layer.injection is not None]
        self.shares, self.sequences, self.new_tokens, self.rounds = Shares(), 0, 0, 0
        ids = torch.arange(drafter.config.vocab_size if self.layers else 0, device=drafter.fc.weight.device)
        self.table = torch.cat([F.normalize(self.view.phi(part), dim=-1) for part in ids.split(8192)])  # [V, r]

    @torch.inference_mode()
    def add(self, prompt: list[int], continuation: list[int]) -> None:
        """Measure one prompt and the target's greedy continuation of it; fewer than two new tokens are passed over."""
        if len(continuation) < 2:
            return
        tokens = torch.tensor([*prompt, *continuation], device=self.drafter.fc.weight.device)
        features, _ = self.reader(tokens[None])
        anchors = torch.arange(len(prompt), len(tokens) - 1, device=tokens.device)
        drafts = offline_drafts(self.drafter, self.view, features, tokens, len(prompt), self.chunk)
        walk = walk_rounds(drafts, tokens[len(prompt) :])
        self.sequences, self.rounds = self.sequences + 1, self.rounds + walk.rounds
        self.new_tokens += walk.new_tokens - 1
        for part, drafted in zip(anchors.split(self.chunk), drafts.split(self.chunk), strict=True):
            self._coverage(features, self._cut(tokens, len(prompt), part), drafted)
        if self.anchors is not None and self.anchors < len(anchors):
            anchors = anchors[torch.linspace(0, len(anchors) - 1, self.anchors, device=anchors.device).long()]
        for part in anchors.split(self.chunk):
            self._messages(features, self._cut(tokens, len(prompt), part))

    def _cut(self, tokens: torch.Tensor, prompt_length: int, anchors: torch.Tensor) -> Blocks:
        prompts, lengths = (anchors.new_tensor([n]) for n in (prompt_length, len(tokens)))
        return cut_blocks(tokens[None], prompts, lengths, anchors[None], self.drafter.config.block_size)

    def _ranks(self, hidden: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Ranks by the head: normed states [.., d], truth [..]."""
        return true_ranks(self.view.logits, hidden, truth, self.drafter.config.vocab_size)

    def _coverage(self, features: torch.Tensor, blocks: Blocks, drafted: torch.Tensor) -> None:
        """Recall of the unary stream, accuracy given the true predecessor, and what befalls drafts that survive."""
        drafter, view, truth, valid = self.drafter, self.view, blocks.labels[0], blocks.valid[0]
        out = run_blocks(drafter, view, features, blocks.anchors, blocks.predecessors[..., 0])
        unary = drafter.norm(out.hidden[0, :, 1:])  # [blocks, slots, d]
        ranks = self._ranks(unary, truth)
        self.shares.add_ranks("unary", ranks, valid)
        covered = ranks < drafter.config.num_candidates
        self.shares.add("covered", covered, valid)
        if drafter.config.selection == "transition":
            told = told_states(drafter, out.rewrite, view.phi(blocks.predecessors))[0]
            told = torch.cat([unary[:, :1], told[:, 1:]], dim=1)  # slot 1 is written with the anchor anyway
            self.shares.add_ranks("conditional", self._ranks(told, truth), valid)
            candidates = view.logits(unary).topk(drafter.config.num_candidates, dim=-1).indices
            best = view.row_logits(told.unsqueeze(2), candidates).argmax(-1)  # [blocks, slots, 1]
            self.shares.add("chosen_given_truth", candidates.gather(2, best)[..., 0] == truth, valid & covered)
        right = drafted == truth
        alive = valid & torch.cat([right[:, :1] | True, right.cumprod(1)[:, :-1].bool()], dim=1)
        self.shares.add("accepted_of_survivors", right, alive)
        self.shares.add("covered_of_survivors", covered | right, alive)
        self.shares.add("chosen_of_covered_survivors", right, alive & (covered | right))

    def _messages(self, features: torch.Tensor, blocks: Blocks) -> None:
        """Ranks by the transfer space at every injected layer, and ranks by the head under forced messages."""
        truth, valid, slots = blocks.labels[0], blocks.valid[0], blocks.labels.shape[-1]
        out = run_blocks(self.drafter, self.view, features, blocks.anchors, blocks.predecessors[..., 0])
        self.shares.add_ranks("forced none", self._ranks(self.drafter.norm(out.hidden[0, :, 1:]), truth), valid)
        for layer, z in zip(self.layers, out.features, strict=True):
            ranks = true_ranks(self._cosines, z[0].float(), truth, self.drafter.config.vocab_size)
            self.shares.add_ranks(f"nearest {layer}", ranks, valid)
            for kind in KINDS:
                layers = [layer] if kind == "only" else [i for i in self.layers if i >= layer]
                ranks = self.forced_ranks(features, blocks, forced_slots(kind, slots, truth.device), layers)
                self.shares.add_ranks(f"{kind} {layer}", ranks, valid)

    def forced_ranks(
        self, features: torch.Tensor, blocks: Blocks, where: torch.Tensor, layers: list[int]
    ) -> torch.Tensor:
        """Ranks by the unary stream [blocks, slots] when true predecessors are told at `layers`.

        Args:
            features: of one sequence [1, length, len(ids) * d]. blocks: cut from it, [1, blocks, ..].
            where: [slots, slots], which messages are forced in the copy of the block that is read at slot t.
        """
        copies = where.shape[0]
        messages = self.view.phi(blocks.predecessors)  # [1, blocks, slots, r]
        forced = torch.where(where[:, None, :, None], messages, torch.full_like(messages, float("nan")))
        told = [forced if i in layers else None for i in range(len(self.drafter.layers))]
        anchors, ids = (t.expand(copies, -1) for t in (blocks.anchors, blocks.predecessors[..., 0]))
        out = run_blocks(self.drafter, self.view, features.expand(copies, -1, -1), anchors, ids, told)
        read = out.hidden[:, :, 1:].diagonal(dim1=0, dim2=2).transpose(1, 2)  # [blocks, slots, d]
        return self._ranks(self.drafter.norm(read), blocks.labels[0])

    def _cosines(self, z: torch.Tensor) -> torch.Tensor:
        return F.normalize(z, dim=-1) @ self.table.T

    def result(self) -> dict[str, Any]:
        """Shares by slot: `nearest` and `forced` by layer too. Depths are written as "1", "4", .."""
        rate, names = self.shares.rate, self.shares.hits
        plain = [n for n in names if "@" not in n]

        def flat(name: str) -> dict[str, list[float]]:
            return {str(k): rate(f"{name}@{k}") for k in DEPTHS}

        def by_layer(name: str) -> dict[str, list[list[float]]]:
            return {str(k): [rate(f"{name} {i}@{k}") for i in self.layers] for k in DEPTHS}

        return {
            "sequences": self.sequences,
            "acceptance_length": round(self.new_tokens / max(1, self.rounds), 4),
            "num_candidates": self.drafter.config.num_candidates,
            "layers": self.layers,
            "nearest": by_layer("nearest"),
            "forced": {"none": flat("forced none"), **{kind: by_layer(kind) for kind in KINDS}},
            **{name: flat(name) for name in ("unary", "conditional") if f"{name}@1" in names},
            **{name: rate(name) for name in plain},
            "trials": {n: self.shares.trials[n].tolist() for n in plain},
        }
