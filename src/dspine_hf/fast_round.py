"""One round of the fast loop on the device: draft, walk, verify, accept, append. Nothing here waits for the host."""

from dataclasses import dataclass, field
from typing import Any

import torch

from .fast_target import TargetPasses, compiled_method
from .fast_tree import Tree, follow, grow, size
from .fast_walk import Chain, SeenTokens, walk_batch, warp
from .generation_dspine import first_slots
from .layers_dspine import Limits
from .ops_dspine import EAGER
from .static_cache import Places, RaggedDraftCache, column_bucket
from .walk_dspine import noise_like, sampling_options, score_tables


@dataclass
class Rows:
    """
    The batch's text and where each row stands.

    Attributes:
        tokens: `[batch, capacity]`, prompts with their left padding, then what was decided.
        length: `[batch]`, decided columns; the last of them is the anchor, which the target has not read yet.
        start: `[batch]`, the first column that is not padding.
        shift: `[batch]`, column minus position.
        done: `[batch]`, rows that take no more tokens.
        max_length: columns at which a row ends, a tensor without dimensions.
        eos: `[n]` end-of-sequence ids, or None.
        seen: the table of the repetition penalty, or None.
        padded: whether any row has padding.
    """

    tokens: torch.Tensor
    length: torch.Tensor
    start: torch.Tensor
    shift: torch.Tensor
    done: torch.Tensor
    max_length: torch.Tensor
    eos: torch.Tensor | None
    seen: SeenTokens | None
    padded: bool

    @property
    def anchor(self) -> torch.Tensor:
        """The last decided token of every row `[batch, 1]`."""
        return self.tokens.gather(1, self.length[:, None] - 1)

    def begin(
        self, ids: torch.Tensor, mask: torch.Tensor | None, last: torch.Tensor, max_length: int, penalties: list[Any]
    ) -> None:
        """
        Writes the prompts into the batch's state.

        Args:
            ids: `[batch, length]`; `mask` is 0 where they are padding.
            last: the position of the last token of every prompt `[batch]`.
            max_length: columns at which a row ends.
            penalties: the repetition penalties among the call's processors.
        """
        length = ids.shape[1]
        self.tokens.zero_()
        self.tokens[:, :length] = ids
        self.length.fill_(length)
        self.start.zero_()
        if mask is not None:
            self.start.copy_((mask == 0).sum(-1))
        self.shift.copy_(length - 1 - last)
        self.done.fill_(False)
        self.max_length.fill_(max_length)
        if self.seen is not None:
            self.seen.begin(penalties[0], ids)

    def append(self, tokens: torch.Tensor, agreed: torch.Tensor) -> torch.Tensor:
        """
        Appends the first `agreed + 1` `[batch]` of `tokens` `[batch, n]`, up to an end-of-sequence token or the limit.

        Returns:
            `[batch, 3 + n]`: how many tokens each row took, whether it is done, `agreed`, and the tokens.
        """
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        count = torch.minimum(agreed + 1, self.max_length - self.length).masked_fill(self.done, 0)
        if self.eos is not None:
            ends = (tokens.unsqueeze(-1) == self.eos).any(-1) & (slots < count[:, None])
            ended = ends.any(-1)
            count = torch.where(ended, ends.int().argmax(-1) + 1, count)
            self.done |= ended
        # What lies behind a row's length is overwritten later, or padded at the end.
        self.tokens.scatter_(1, self.length[:, None] + slots, tokens)
        if self.seen is not None:
            self.seen.add(tokens, slots < count[:, None])
        self.length += count
        self.done |= self.length >= self.max_length
        return torch.cat([torch.stack([count, self.done.long(), agreed], dim=1), tokens], dim=1)


@dataclass
class Rounds:
    """
    The device's half of one call.

    Attributes:
        passes: the target.
        rows: the batch.
        context: the drafter's context; None without a drafter.
        max_slots: the longest draft.
        do_sample: sample, instead of taking the best.
        last_position: the last position that the target has an embedding for, or None.
        drafter, view: the draft model and its view of the target, put in for each call.
        compiled: whether the drafter's passes go through torch.compile.
        widths: K and S of this call; None: the drafter's.
        attend: fused attention for drafts, as `ops_dspine.verify_attention`; None: there is none.
        nodes: how many drafted tokens a tree has; 0: drafts are chains.
        chain: the draft of this round.
    """

    passes: TargetPasses
    rows: Rows
    context: RaggedDraftCache | None
    max_slots: int
    do_sample: bool
    last_position: int | None = None
    drafter: Any = field(default=None, init=False)
    view: Any = field(default=None, init=False)
    compiled: bool | str = field(default=False, init=False)
    widths: tuple[int | None, int | None] = field(default=(None, None), init=False)
    attend: Any = field(default=None, init=False)
    nodes: int = field(default=0, init=False)
    chain: Chain | None = field(default=None, init=False)

    def detach(self) -> None:
        """Lets go of the models; the tensors stay."""
        self.drafter = self.view = None
        self.passes.attach(None, None)

    # ---- places -----------------------------------------------------------------------------------------------

    def _places(self, count: int, columns: int, first: int | None) -> tuple[Places, torch.Tensor]:
        """Columns of the anchor and the `count - 1` rows after it, and their positions `[batch, count]`."""
        if self.compiled:  # for every number on the host that it meets, torch.compile would compile the pass again
            columns, first = column_bucket(columns, self.passes.cache.capacity), None
        index = self.rows.length[:, None] - 1 + torch.arange(count, device=self.rows.length.device)
        return Places(index, columns, first), index - self.rows.shift[:, None]

    # ---- draft ------------------------------------------------------------------------------------------------

    def draft(self, processors: list[Any] | None, columns: int, first: int | None) -> Any:
        """
        Drafts a block for every row and walks it.

        Args:
            processors: the active processors if the batched walk can run them; None: leave the walk to the caller.
            columns: upper bound of the columns of the block's rows.
            first: the anchor's column, where all rows share it and the host knows it.

        Returns:
            The block, cut to `max_slots`.
        """
        assert self.context is not None
        rows = self.rows
        slots = self.drafter.config.num_draft_slots
        places, positions = self._places(1 + slots, columns, first)
        self.context.places = places
        seen = self._draft_mask(places) if self.attend is None else self._draft_limits(places)
        options: dict[str, Any] = {} if self.widths[0] is None else {"num_candidates": self.widths[0]}
        if self.do_sample:
            shape = (rows.length.shape[0], self.drafter.device, *self.widths)
            options |= sampling_options(self.drafter.config, processors or [], *shape)
        block = self._method("draft_block")(
            self.view, self.context, rows.anchor[:, 0], positions[:, 0], **seen, **options
        )
        block = first_slots(block, self.max_slots)
        self.chain = None
        if processors is not None:
            ops = getattr(self.drafter, "ops", EAGER)
            self.chain = walk_batch(block, processors, rows.seen, self.do_sample, ops)
            if self._grows(processors):
                self.chain.tree = grow(block.candidates, *score_tables(block), self.nodes, ops)
        return block

    def _grows(self, processors: list[Any]) -> bool:
        """Whether drafts are trees."""
        return bool(self.nodes) and not processors and not self.do_sample

    def verified(self, slots: int, processors: list[Any]) -> int:
        """How many drafted tokens of a row a pass over so many slots verifies: a tree's nodes, or a chain's tokens."""
        if not slots or slots < self.max_slots or not self._grows(processors):
            return slots
        return size(self.nodes, slots, self.widths[0] or self.drafter.config.num_candidates)

    def _draft_limits(self, places: Places) -> dict[str, Any]:
        """What a block sees as the first and the last column of every row."""
        assert self.context is not None
        start, window, self.context.first_column = self.rows.start, self.drafter.config.context_window, 0
        if window is not None:
            start = torch.maximum(start, places.index[:, 0] - window)
        return {"limits": Limits(self.attend, start, places.index[:, -1])}

    def _draft_mask(self, places: Places) -> dict[str, Any]:
        """What a block sees as a mask `[batch, columns]`; nothing where it is all that the context hands out."""
        assert self.context is not None
        window, first = self.drafter.config.context_window, places.first
        if first is not None and not self.rows.padded:
            self.context.first_column = 0 if window is None else max(0, first - window)
            return {}
        anchor = places.index[:, :1]
        at = torch.arange(places.columns, device=anchor.device)
        seen = (at >= self.rows.start[:, None]) & (at <= places.index[:, -1:])
        return {"attention_mask": seen if window is None else seen & (at >= anchor - window)}

    # ---- verify -----------------------------------------------------------------------------------------------

    def verify(
        self,
        count: int,
        processors: list[Any],
        columns: int,
        first: int | None,
    ) -> torch.Tensor:
        """
        Runs the target over the anchor and `count - 1` drafted tokens, and appends what it accepts and one token more.

        Returns:
            See [`Rows.append`].
        """
        if self.chain is not None and self.chain.tree is not None and count == 1 + self.max_slots:
            return self.verify_tree(self.chain.tree, columns, first)
        drafts = None if self.chain is None or count == 1 else self.chain.tokens[:, : count - 1]
        logits = self.target_logits(drafts, columns, first)
        if self.do_sample or processors:
            table = None
            if self.rows.seen is not None:
                table = self.rows.seen.table[:, None] if drafts is None else self.rows.seen.after(drafts)
            logits = warp(logits.float(), processors, self.rows.seen, table)
        return self.accept(logits, drafts, self.chain, None)

    def target_logits(self, drafts: torch.Tensor | None, columns: int, first: int | None) -> torch.Tensor:
        """The target's raw logits `[batch, rows, V]` after the anchor and every draft; its features become context."""
        anchor = self.rows.anchor
        ids = anchor if drafts is None else torch.cat([anchor, drafts], dim=1)
        places, positions = self._places(ids.shape[1], columns, first)
        if self.last_position is not None:  # rows that are done stand behind it
            positions = positions.clamp(max=self.last_position)
        outputs = self.passes.verify(ids, positions, self.rows.start, self.rows.padded, places)
        if self.context is not None:
            self.context.places = places
            self.extend(outputs, positions)
        return outputs.logits.to(anchor.device)

    def verify_tree(self, tree: Tree, columns: int, first: int | None) -> torch.Tensor:
        """
        Runs the target over the anchor and a tree, appends the branch that it takes and one token more, and moves the
        branch's keys and values to where a chain's would be.

        Returns:
            See [`Rows.append`].
        """
        ids = torch.cat([self.rows.anchor, tree.tokens], dim=1)
        places, positions = self._places(ids.shape[1], columns, first)
        positions = positions[:, :1] + tree.depth
        if self.last_position is not None:
            positions = positions.clamp(max=self.last_position)
        outputs = self.passes.verify(ids, positions, self.rows.start, self.rows.padded, places, tree)
        choice = outputs.logits.to(ids.device).argmax(-1)
        ops = getattr(self.drafter, "ops", EAGER)
        agreed, tokens, branch = follow(tree, choice, self.max_slots, ops)
        places, positions = self._places(branch.shape[1], columns, first)
        self.passes.cache.move(places.index[:, :1] + branch, places, ops)
        assert self.context is not None
        self.context.places = places
        self.extend(outputs, positions, rows=branch)
        return self.rows.append(tokens, agreed)

    def extend(
        self, outputs: Any, positions: torch.Tensor, prompt: bool = False, rows: torch.Tensor | None = None
    ) -> None:
        """A pass's features, or those of some `rows` `[batch, n]` of it, become context; those of rejected rows too:
        they are hidden until overwritten."""
        features = self.passes.features(outputs, self.drafter.device, self.drafter.dtype)
        if rows is not None:
            features = features.gather(1, rows.to(features.device).unsqueeze(-1).expand(-1, -1, features.shape[2]))
        extend = self.drafter.extend_context if prompt else self._method("extend_context")
        extend(self.context, features, positions)

    def _method(self, name: str) -> Any:
        return compiled_method(self.drafter, name, self.compiled) if self.compiled else getattr(self.drafter, name)

    # ---- accept -----------------------------------------------------------------------------------------------

    def accept(
        self, scores: torch.Tensor, drafts: torch.Tensor | None, chain: Chain | None, drafted: torch.Tensor | None
    ) -> torch.Tensor:
        """
        Decides which drafts stand, and appends them with the target's own next token.

        Args:
            scores: processed target scores `[batch, rows, V]`.
            drafts: `[batch, rows - 1]`, or None.
            chain: where the drafts were sampled from; unused when greedy.
            drafted: `[batch]`, how many of the drafts are a row's own; None: all.
        """
        if not self.do_sample:
            choice = scores.argmax(-1)  # [batch, rows]
            agreed = torch.zeros_like(choice[:, 0])
            if drafts is not None:
                agreed = leading(_own(drafts == choice[:, :-1], drafted))
            return self.rows.append(choice, agreed)
        law = scores.softmax(-1)  # [batch, rows, V]
        if drafts is None or chain is None:
            token = (law[:, 0] / noise_like(law[:, 0])).argmax(-1, keepdim=True)
            return self.rows.append(token, torch.zeros_like(token[:, 0]))
        assert chain.q is not None and chain.chosen_q is not None
        n = drafts.shape[1]
        p = law[:, :n].gather(2, drafts.unsqueeze(-1)).squeeze(-1)  # [batch, n]
        stands = torch.rand_like(p) * chain.chosen_q[:, :n] < p
        agreed = leading(_own(stands, drafted))
        last = last_token(law, agreed, chain, n if drafted is None else drafted)
        tokens = torch.cat([drafts, last], dim=1).scatter(1, agreed[:, None], last)
        return self.rows.append(tokens, agreed)


def _own(stands: torch.Tensor, drafted: torch.Tensor | None) -> torch.Tensor:
    if drafted is None:
        return stands
    return stands & (torch.arange(stands.shape[1], device=stands.device) < drafted[:, None])


def leading(stands: torch.Tensor) -> torch.Tensor:
    """How many drafts stand before the first that does not: `[batch, n]` -> `[batch]`."""
    return stands.long().cumprod(-1).sum(-1)


def last_token(law: torch.Tensor, agreed: torch.Tensor, chain: Chain, drafted: Any) -> torch.Tensor:
    """
    The token after the accepted drafts, `[batch, 1]`: from the target's law where nothing was rejected, else from what
    the target's law has beyond q (Leviathan et al., arXiv 2211.17192).

    Args:
        law: the target's probabilities `[batch, rows, V]`.
        agreed: `[batch]`, accepted drafts.
        chain: q of every slot.
        drafted: `[batch]` or a number, how many drafts there were.
    """
    assert chain.q is not None
    row = agreed[:, None, None]
    p = law.gather(1, row.expand(-1, 1, law.shape[2])).squeeze(1)  # [batch, V]
    slot = row.clamp(max=chain.q.shape[1] - 1).expand(-1, 1, chain.q.shape[2])
    q = chain.q.gather(1, slot).squeeze(1) * (agreed < drafted)[:, None]  # [batch, n]
    rest = p.scatter_add(1, chain.candidates.gather(1, slot).squeeze(1), -q).clamp_min_(0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    return (rest / noise_like(rest)).argmax(-1, keepdim=True)
