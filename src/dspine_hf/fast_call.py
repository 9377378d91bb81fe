"""One call of the fast loop: the host's half, which prepares the batch, keeps count and decides what runs next."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from . import graphs
from .compat_dspine import FeatureTaps
from .fast_criteria import HostCriteria
from .fast_reports import Draft, Launched, Reports
from .fast_round import Rounds, Rows
from .fast_rows import processed_scores, walk_rows
from .fast_stats import RoundLog
from .fast_target import TargetPasses
from .fast_walk import SeenTokens, active_processors, is_fast
from .ops_dspine import EAGER, fused_ops
from .policy import Policy, give_back_policy, longest_draft, take_policy
from .static_cache import Places, RaggedDraftCache
from .stats_dspine import store_stats
from .target_dspine import last_position, refuse_position, slots_within_positions


@dataclass
class Options:
    """
    What a call of the fast loop takes beyond generate()'s own arguments; see [`dspine_hf.generate`].

    Attributes:
        streamer: the user's, or None.
        widths: K and S of the call; None: the drafter's.
        tree_nodes: how many drafted tokens a tree has; 0: drafts are chains.
        clock: what `adaptive` measures rounds with, in seconds.
        recorder: captures a function as a graph.
    """

    streamer: Any = None
    adaptive: bool = False
    use_graphs: bool | None = None
    compiled: bool | str = False
    fused_attention: bool | None = None
    widths: tuple[int | None, int | None] = (None, None)
    tree_nodes: int = 0
    clock: Callable[[], float] = time.perf_counter
    recorder: Callable[..., graphs.Recording] = graphs.record


class FastCall:
    """
    One call of [`dspine_hf.generate`].

    Args:
        target, drafter: the two models; no drafter: plain decoding.
        input_ids: `[batch, length]`.
        processors, criteria, config, model_kwargs: what generate() prepared.
        options: the rest.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any,
        input_ids: torch.Tensor,
        processors: Any,
        criteria: Any,
        config: Any,
        model_kwargs: dict[str, Any],
        options: Options,
    ):
        if options.streamer is not None and input_ids.shape[0] > 1:
            raise ValueError("a streamer shows one text; found a batch. Drop `streamer`, or pass one prompt.")
        self.target, self.drafter, self.config, self.options = target, drafter, config, options
        self.prompts = input_ids
        self.batch, self.prompt_length = input_ids.shape
        self.processors = list(processors or ())
        self.do_sample = bool(config.do_sample)
        self.criteria = HostCriteria(criteria, self.prompt_length)
        self.text_config = target.config.get_text_config(decoder=True)
        self._bounded = slots_within_positions(self.text_config, 0) is not None
        self.device = target.get_input_embeddings().weight.device
        if self.device.type == "meta":
            self.device = input_ids.device
        self.max_slots = 0 if drafter is None else longest_draft(drafter, config)
        self.view = None if drafter is None else drafter.bind_target(target).tabulated()
        self.lengths, self.done = [self.prompt_length] * self.batch, [False] * self.batch
        self.log = RoundLog(self.batch)
        self.mask = model_kwargs.get("attention_mask")
        self.mask = None if self.mask is None else self.mask.to(self.device)
        self.positions = self._positions(model_kwargs.get("position_ids"))
        self._last = last_position(target)
        refuse_position(self._last, self.positions)
        self._prepare(model_kwargs)

    def _positions(self, given: torch.Tensor | None) -> torch.Tensor:
        """Positions of the prompts `[batch, length]`: the user's, or counted from the first real token."""
        if given is None:
            real = torch.ones_like(self.prompts) if self.mask is None else self.mask
            given = (real.long().cumsum(-1) - 1).clamp(min=0)
        return (given[0] if given.dim() == 3 else given).to(self.device).expand(self.batch, -1)

    # ---- what lives on the device -----------------------------------------------------------------------------

    def _prepare(self, model_kwargs: dict[str, Any]) -> None:
        """Takes the device's state of an earlier call with the same shapes, or makes it."""
        slots = 0 if self.drafter is None else self.drafter.config.num_draft_slots
        self._behind = max(slots, self.options.tree_nodes)  # columns behind the anchor that a round writes
        capacity, key = self.criteria.max_length + 1 + self._behind, None
        if self._records():
            capacity = -(-capacity // graphs.CAPACITY_STEP) * graphs.CAPACITY_STEP
            key = self._key()
        kept = None if key is None else graphs.take(self.target, key, capacity)
        rounds = self._make_rounds(model_kwargs, capacity) if kept is None else kept.cleared()
        self._attach(rounds)
        last = self.positions[:, -1]
        rounds.rows.begin(self.prompts.to(self.device), self.mask, last, self.criteria.max_length, self._penalties())
        self.rounds, self._key_of_graphs = rounds, key
        self.graphed: graphs.GraphedRounds | None = None
        lengths = list(range(1, self.max_slots + 1))
        if key is not None:
            self._kept = graphs.Kept(rounds) if kept is None else kept
            self.graphed = graphs.GraphedRounds(self._kept, self.processors, self.options.recorder)
            lengths = graphs.draft_lengths(self.max_slots)
        self._allowed = [0, *lengths]
        self.policy: Policy | None = None
        self._kind = (self.batch, self.do_sample)
        if self.options.adaptive and self.max_slots:
            fresh = Policy(lengths, self.options.clock)
            self.policy = take_policy(self.drafter, self.target, self._kind, fresh)
        # The device runs ahead of the host where nothing there can change what comes next: a round, or, where a policy
        # chooses the length of what is verified, a draft.
        self._ahead = self.graphed is not None and not self._bounded and not self.criteria.needs_text
        pinned = self._ahead and self.policy is None and self.device.type == "cuda"
        self._reports = Reports(self.batch * (4 + self.max_slots), pinned)

    def _records(self) -> bool:
        """Whether this call replays graphs."""
        if self.options.use_graphs is False:
            return False
        able = graphs.can_record(self.target) or self.options.recorder is not graphs.record
        able = able and not torch.is_autocast_enabled(self.device.type)  # frees the weights that it casts when it ends
        if self.options.use_graphs and not able:
            raise ValueError(
                "use_graphs=True: expected a target on one CUDA device whose rotary table does not depend on the "
                "length, outside of autocast; found another. Leave `use_graphs` unset."
            )
        lasting = is_fast(self.processors, self.prompt_length) and graphs.signature(self.processors) is not None
        return able and lasting and (self.options.use_graphs or not graphs.is_uncapturable(self.target))

    def _key(self) -> tuple:
        """All that the recorded kernels depend on, but how many columns there are."""
        drafter = None if self.drafter is None else id(self.drafter)
        eos = None if self.criteria.eos is None else tuple(self.criteria.eos.tolist())
        padded = self.mask is not None and not bool(self.mask.all())
        shape = (drafter, self.batch, padded, eos, self.do_sample, self.max_slots)
        asked, eager = self.options, self.text_config._attn_implementation == "eager"
        how = (asked.compiled, asked.fused_attention, asked.widths, asked.tree_nodes, eager)
        models = graphs.state_of(self.target, self.drafter)
        return (*shape, *how, torch.is_inference_mode_enabled(), graphs.signature(self.processors), models)

    def _make_rounds(self, model_kwargs: dict[str, Any], capacity: int) -> Rounds:
        context = None
        if self.drafter is not None:
            context = RaggedDraftCache(self.drafter.config.num_hidden_layers, capacity)
        passes = TargetPasses(self.target, model_kwargs, capacity)
        return Rounds(passes, self._make_rows(capacity), context, self.max_slots, self.do_sample, self._last)

    def _make_rows(self, capacity: int) -> Rows:
        length = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        seen, penalties = None, self._penalties()
        if len(penalties) == 1:
            vocab_size = self.target.get_output_embeddings().weight.shape[0]
            seen = SeenTokens(penalties[0].penalty, self.batch, vocab_size, self.device)
        return Rows(
            torch.zeros(self.batch, capacity, dtype=torch.long, device=self.device),
            length,
            torch.zeros_like(length),
            torch.zeros_like(length),
            torch.zeros_like(length, dtype=torch.bool),
            torch.zeros((), dtype=torch.long, device=self.device),
            None if self.criteria.eos is None else self.criteria.eos.to(self.device),
            seen,
            self.mask is not None and not bool(self.mask.all()),
        )

    def _penalties(self) -> list[Any]:
        return [p for p in self.processors if type(p) is RepetitionPenaltyLogitsProcessor]

    def _attach(self, rounds: Rounds) -> None:
        """Puts the call's models into its rounds."""
        own = getattr(self.drafter, "ops", EAGER)  # chosen here, where torch.compile does not look
        fused = own is not EAGER
        taps, asked = None, fused if self.options.fused_attention is None else self.options.fused_attention
        asked = asked and not torch.is_autocast_enabled(self.device.type)  # with two dtypes of queries and values
        ops = fused_ops(self.device.type, self.target.dtype, 1, 1) if asked else EAGER  # not the drafter's
        attend = None if ops.verify_attention is EAGER.verify_attention else ops.verify_attention
        if self.drafter is not None:
            taps = FeatureTaps(self.target, self.drafter.config.target_layer_ids, False)
            rounds.drafter, rounds.view = self.drafter, self.view
            rounds.attend = own.verify_attention if fused and asked else None
            rounds.widths, rounds.nodes = self.options.widths, self.options.tree_nodes
        rounds.compiled = self.options.compiled
        rounds.passes.attach(self.target, taps, attend, rounds.compiled)

    # ---- the loop ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> Any:
        """Prefill, rounds until every row is done, and the result."""
        try:
            launched = self._reports.send(self.prefill(), Draft(0, [], True, [0] * self.batch), 0)
            while True:
                ahead = self._run_ahead(launched)
                self._take(launched)
                if all(self.done):
                    return self._finish()
                launched = self._round(launched.following) if ahead is None else ahead
        finally:
            if self.policy is not None:
                give_back_policy(self.drafter, self.target, self._kind, self.policy)
            if self._key_of_graphs is not None:
                graphs.keep(self.target, self._key_of_graphs, self._kept)

    def prefill(self) -> torch.Tensor:
        """Reads the prompts and decides every row's first token with the processors on the whole batch."""
        rounds = self.rounds
        ids = rounds.rows.tokens[:, : self.prompt_length]
        outputs = rounds.passes.prefill(ids, self.mask, self.positions)
        if rounds.context is not None:
            columns = torch.arange(self.prompt_length, device=self.device).expand(self.batch, -1)
            rounds.context.places = Places(columns, self.prompt_length, 0)
            rounds.extend(outputs, self.positions, prompt=True)
        scores = outputs.logits[:, -1].to(torch.float32, copy=True).to(self.device)
        for processor in self.processors:
            scores = processor(ids, scores)
        return rounds.accept(scores[:, None], None, None, None)

    def _run_ahead(self, unread: Launched) -> Launched | None:
        """
        Launches the round after one whose report was not read yet; None where the host must read that first.

        Where the report turns out to be the last, the round has changed no row: it was in vain, and has drawn random
        numbers where the call samples.
        """
        limit = self.criteria.max_length - 1  # every row that is not done takes a token
        over = all(done or length >= limit for length, done in zip(self.lengths, self.done, strict=True))
        if not self._ahead or self.policy is not None or over:
            return None
        assert self.graphed is not None
        ahead = 1 + unread.kept
        if not self.graphed.recorded(self._room(), self._used(ahead)):
            return None
        draft = self._draft(ahead)
        return self._reports.send(self._verify(draft, draft.slots, ahead), draft, draft.slots)

    def _round(self, draft: Draft | None) -> Launched:
        """Launches a round with this draft, or with one that it makes."""
        if self.policy is not None:
            self.policy.begin()
        draft = self._draft() if draft is None else draft
        kept = self._cut(draft)
        launched = self._reports.send(self._verify(draft, kept), draft, kept)
        if self._ahead and self.policy is not None:
            following = self._draft(ahead=1 + kept)
            launched.following = following if self._ahead else None
        return launched

    def _open(self) -> list[int]:
        """The lengths of the rows that are not done."""
        return [length for length, done in zip(self.lengths, self.done, strict=True) if not done]

    def _room(self) -> int:
        """How many tokens may be drafted, so that no row's pass goes where passes of one token would not."""
        slots = self.max_slots  # graphs keep their length: rows take no more tokens than they have room for
        if self.graphed is None:
            slots = min(slots, self.criteria.max_length - min(self._open()) - 1)
        if self._bounded:
            shift = self.rounds.rows.shift.tolist()
            for length, offset, done in zip(self.lengths, shift, self.done, strict=True):
                if not done:
                    refuse_position(self._last, length - 1 - offset)
                    slots = min(slots, slots_within_positions(self.text_config, length - 1 - offset) or 0)
        return max(length for length in self._allowed if length <= max(0, slots))

    def _shared_column(self) -> int | None:
        return self.lengths[0] - 1 if len(set(self.lengths)) == 1 else None

    def _used(self, ahead: int) -> int:
        """Upper bound of the columns that a recorded round uses, where rows may have taken `ahead` unseen ones."""
        return min(max(self.lengths) + ahead, self.criteria.max_length) + self._behind + 1

    def _draft(self, ahead: int = 0) -> Draft:
        """
        Drafts a block for every row, where there is room and it pays.

        Args:
            ahead: columns that rows may have taken since the host last looked.
        """
        rounds, nothing = self.rounds, [0] * self.batch
        processors = active_processors(self.processors, min(self._open()))
        fast, slots = is_fast(processors, self.prompt_length), self._room()
        rounds.chain = None
        if not slots or (fast and self.policy is not None and not self.policy.wants_draft()):
            return Draft(0, processors, fast, nothing)
        drafted = self._replay(lambda graphed: graphed.draft(self._used(ahead)))
        if drafted is not None or (ahead and self.graphed is None):
            return Draft(slots, processors, True, nothing)
        columns = max(self.lengths) + self.drafter.config.num_draft_slots  # the last is the block's: it sees them all
        block = rounds.draft(processors if fast else None, columns, self._shared_column())
        if fast:
            return Draft(slots, processors, True, nothing)
        rounds.chain, counts = walk_rows(rounds, block, processors, self.lengths, self.done, slots)
        return Draft(max(counts), processors, False, counts)

    def _cut(self, draft: Draft) -> int:
        """How many drafted tokens this round verifies."""
        if not draft.slots or not draft.fast or self.policy is None:
            return draft.slots
        if draft.confidence is None:
            assert self.rounds.chain is not None
            draft.confidence = self.rounds.chain.confidence.tolist()
        rows = [values for values, done in zip(draft.confidence, self.done, strict=True) if not done]
        return self.policy.cut(rows, draft.slots)

    def _verify(self, draft: Draft, kept: int, ahead: int = 0) -> torch.Tensor:
        """Runs the target over `kept` drafts of every row; see [`Rows.append`] for what it returns."""
        rounds = self.rounds
        report = self._replay(lambda graphed: graphed.verify(kept, self._used(ahead)))
        if report is not None:
            return report
        columns, first = max(self.lengths) + max(kept, self.options.tree_nodes), self._shared_column()
        if draft.fast:
            return rounds.verify(1 + kept, draft.processors, columns, first)
        drafts = None if rounds.chain is None else rounds.chain.tokens
        logits = rounds.target_logits(drafts, columns, first)
        scores = processed_scores(rounds, logits, drafts, draft.processors, self.lengths, draft.counts, self.done)
        return rounds.accept(scores, drafts, rounds.chain, torch.tensor(draft.counts, device=self.device))

    def _replay(self, run: Callable[[graphs.GraphedRounds], Any]) -> Any:
        """Half a round as a graph; None where this call has none, or none any more."""
        if self.graphed is None:
            return None
        try:
            return run(self.graphed)
        except graphs.CaptureFailed as error:
            if self.options.use_graphs:
                raise
            graphs.go_on_without(self.target, error)
            self.graphed = self._key_of_graphs = None
            self._ahead = False
            return None

    def _take(self, launched: Launched) -> None:
        """Reads what a round decided, and how sure the next draft is: the one look at the device."""
        draft, kept, following = launched.draft, launched.kept, launched.following
        chain = self.rounds.chain if following is not None and following.slots else None
        found = launched.read(None if chain is None else chain.confidence)
        outcomes, cuts = [], {}
        sizes = (kept, self.rounds.verified(kept, draft.processors)) if draft.fast else None
        for row, (count, done, agreed, *tokens) in enumerate(found):
            if self.done[row]:
                continue
            stop = self.criteria.stop(self.rounds.rows.tokens[row : row + 1], self.lengths[row], count)
            if stop is not None:
                count, done, cuts[row] = stop, 1, self.lengths[row] + stop
            if self.lengths[row] > self.prompt_length:
                own, verified = sizes or (draft.counts[row], draft.counts[row])
                self.log.add(row, self.lengths[row] - self.prompt_length, own, agreed, count, verified)
                outcomes.append((draft.confidence[row] if draft.confidence else [], agreed, count))
            self.lengths[row] += count
            self.done[row] = bool(done)
            if self.options.streamer is not None:
                for token in tokens[:count]:
                    self.options.streamer.put(torch.tensor([token]))
        for row, length in cuts.items():
            self.rounds.rows.length[row] = length
            self.rounds.rows.done[row] = True
        if self.policy is not None and draft.fast and outcomes:
            self.policy.end(draft.slots > 0, kept, outcomes)

    def _finish(self) -> Any:
        """Pads what lies behind each row's end, and counts."""
        if self.options.streamer is not None:
            self.options.streamer.end()
        longest = max(self.lengths)
        sequences = self.rounds.rows.tokens[:, :longest].clone()
        pad = getattr(self.config, "_pad_token_tensor", None)
        behind = torch.arange(longest, device=self.device) >= self.rounds.rows.length[:, None]
        sequences = sequences.masked_fill_(behind, 0 if pad is None else int(pad)).to(self.prompts.device)
        if self.drafter is not None:
            store_stats(self.drafter, self.log.stats([length - self.prompt_length for length in self.lengths]))
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences
