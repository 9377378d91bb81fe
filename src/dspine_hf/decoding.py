"""generate(): the fast decode loop, for batches, over static caches, with one look at the host per round."""

import copy
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .compat_dspine import CACHE_NAMES, FeatureTaps
from .fast_criteria import HostCriteria
from .fast_round import Rounds, Rows
from .fast_rows import processed_scores, walk_rows
from .fast_stats import RoundLog
from .fast_target import TargetPasses
from .fast_walk import SeenTokens, active_processors, is_fast
from .generation_dspine import refuse_conflicts, refuse_stateful_processors
from .static_cache import Places, RaggedDraftCache
from .stats_dspine import store_stats
from .target_dspine import refuse_unknown_tokens, slots_within_positions

_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states", *CACHE_NAMES}
_WAY_OUT = "use model.generate(..., assistant_model=drafter), which takes it."


def generate(
    model: Any,
    drafter: Any = None,
    input_ids: torch.Tensor | None = None,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    adaptive: bool = False,
    **kwargs: Any,
) -> Any:
    """
    `model.generate()` with a drafter, several times faster: batches, static caches, and CUDA graphs on a GPU.

    Args:
        model: the target, a decoder-only causal LM.
        drafter: a DSpine drafter of this target; None: plain decoding by the same loop, one token a pass.
        input_ids: `[batch, length]` prompts, padded on the left, with an `attention_mask` among `kwargs`.
        streamer, tokenizer, kwargs: what generate() takes.
        adaptive: verify only as many drafted tokens as pay, and none while drafting does not pay.

    Returns:
        What generate() returns: `[batch, length + new]`, rows that ended early padded with `pad_token_id`.

    Raises:
        ValueError: naming the argument or the target's property, and the way out.
    """

    def decode(
        target: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        refuse(target, drafter, input_ids, generation_config, logits_processor, model_kwargs)
        call = FastCall(
            target, drafter, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
        )
        return call.run()

    model, kwargs = _with_stop_strings(model, tokenizer, kwargs)
    if input_ids is not None:
        kwargs["input_ids"] = input_ids
    return model.generate(custom_generate=decode, streamer=streamer, **kwargs)


def _with_stop_strings(model: Any, tokenizer: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A criterion instead of `stop_strings`: generate() hands no tokenizer on to a recipe of one's own."""
    kwargs = dict(kwargs)
    config = kwargs.get("generation_config")
    found = kwargs.pop("stop_strings", None)
    if found is None and config is not None and config.stop_strings is not None:
        found, config = config.stop_strings, copy.deepcopy(config)
        config.stop_strings = None
        kwargs["generation_config"] = config
    own = model.generation_config.stop_strings
    if own is not None:
        found = own if found is None else found
        model = copy.copy(model)
        model.generation_config = copy.deepcopy(model.generation_config)
        model.generation_config.stop_strings = None
    if found is None:
        return model, kwargs
    if tokenizer is None:
        raise ValueError(f"stop_strings={found!r} need the tokenizer. Pass `tokenizer=...`.")
    criteria = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, found)])
    return model, kwargs


def refuse(
    target: Any, drafter: Any, input_ids: torch.Tensor, config: Any, processors: Any, model_kwargs: dict[str, Any]
) -> None:
    """Raises ValueError, naming the way out, for what the loop cannot do; before any work is done."""
    mode = config.get_generation_mode(None)
    if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        mode = GenerationMode.ASSISTED_GENERATION
    refuse_conflicts(target, mode, config)
    refuse_stateful_processors(processors)
    refuse_unknown_tokens(target, input_ids)
    if not input_ids.shape[1]:
        raise ValueError(f"expected a prompt of at least one token; found none. Pass input_ids, or {_WAY_OUT}")
    for name in ("output_scores", "output_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, name, None):
            raise ValueError(f"{name}=True: the fast loop keeps no such record. Drop it, or {_WAY_OUT}")
    for name, value in model_kwargs.items():
        empty = value is None or value is False or (isinstance(value, dict) and not value)
        if name not in _INPUTS and not empty:
            raise ValueError(f"`{name}`: the fast loop takes token ids only. Drop it, or {_WAY_OUT}")
        if name in CACHE_NAMES and (getattr(value, "_is_user_defined", False) or int(value.get_seq_length())):
            raise ValueError(f"`{name}`: the fast loop has a cache of its own. Drop it, or {_WAY_OUT}")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any() | ~mask[:, -1:].bool().all()):
        raise ValueError(
            "expected attention_mask with padding on the left alone and a token in every row; found zeros elsewhere. "
            "Set tokenizer.padding_side = 'left'."
        )
    if drafter is not None:
        drafter.check_target(target)


class FastCall:
    """
    One call of [`generate`].

    Args:
        target, drafter: the two models; no drafter: plain decoding.
        input_ids: `[batch, length]`.
        processors, criteria, config, model_kwargs: what generate() prepared.
        streamer: the user's, or None.
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
        streamer: Any,
    ):
        if streamer is not None and input_ids.shape[0] > 1:
            raise ValueError("a streamer shows one text; found a batch. Drop `streamer`, or pass one prompt.")
        self.target, self.drafter, self.config = target, drafter, config
        self.prompts = input_ids
        self.batch, self.prompt_length = input_ids.shape
        self.processors = list(processors or ())
        self.do_sample = bool(config.do_sample)
        self.streamer = streamer
        self.criteria = HostCriteria(criteria, self.prompt_length)
        self.text_config = target.config.get_text_config(decoder=True)
        self.device = target.get_input_embeddings().weight.device
        if self.device.type == "meta":
            self.device = input_ids.device
        self.max_slots = 0 if drafter is None else _max_slots(drafter, config)
        self.lengths = [self.prompt_length] * self.batch
        self.done = [False] * self.batch
        self.log = RoundLog(self.batch)
        self._model_kwargs = model_kwargs
        self.rounds = self._make_rounds(input_ids, model_kwargs)

    def _make_rounds(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Rounds:
        block = 1 if self.drafter is None else 1 + self.drafter.config.num_draft_slots
        capacity = self.criteria.max_length + block
        taps = view = context = None
        if self.drafter is not None:
            taps = FeatureTaps(self.target, self.drafter.config.target_layer_ids, False)
            view = self.drafter.bind_target(self.target)
            context = RaggedDraftCache(self.drafter.config.num_hidden_layers, capacity)
        passes = TargetPasses(self.target, taps, model_kwargs, capacity)
        learned = getattr(self.text_config, "rope_parameters", None) is None
        limit = getattr(self.text_config, "max_position_embeddings", None) if learned else None
        rows = self._make_rows(input_ids.to(self.device), model_kwargs, capacity)
        return Rounds(
            passes,
            rows,
            self.drafter,
            view,
            context,
            self.max_slots,
            self.do_sample,
            None if limit is None else limit - 1,
        )

    def _make_rows(self, ids: torch.Tensor, model_kwargs: dict[str, Any], capacity: int) -> Rows:
        tokens = ids.new_zeros(self.batch, capacity)
        tokens[:, : self.prompt_length] = ids
        mask = model_kwargs.get("attention_mask")
        start = ids.new_zeros(self.batch)
        if mask is not None:
            start = (mask == 0).sum(-1).to(self.device)
        positions = model_kwargs.get("position_ids")
        if positions is None:
            positions = (torch.arange(self.prompt_length, device=self.device) - start[:, None]).clamp(min=0)
        positions = positions[0] if positions.dim() == 3 else positions
        self.positions = positions.to(self.device).expand(self.batch, -1)
        shift = self.prompt_length - 1 - self.positions[:, -1]
        penalties = [p for p in self.processors if hasattr(p, "prompt_ignore_length")]
        seen = None
        if len(penalties) == 1:
            seen = SeenTokens(
                penalties[0], self.batch, self.target.get_output_embeddings().weight.shape[0], ids.device
            )
            seen.begin(ids)
        eos = self.criteria.eos
        return Rows(
            tokens,
            torch.full_like(start, self.prompt_length),
            start,
            shift,
            torch.zeros_like(start, dtype=torch.bool),
            self.criteria.max_length,
            None if eos is None else eos.to(self.device),
            seen,
            bool((start > 0).any()),
        )

    # ---- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Prefill, rounds until every row is done, and the result."""
        self._take(self._prefill(), [0] * self.batch)
        while not all(self.done):
            processors = active_processors(self.processors, min(self._open(self.lengths)))
            slots = self._room()
            counts, report = self._round(processors, slots)
            self._take(report, counts)
        return self._finish()

    def _open(self, values: list[int]) -> list[int]:
        return [value for value, done in zip(values, self.done, strict=True) if not done]

    def _prefill(self) -> torch.Tensor:
        """Reads the prompts and decides every row's first token with the processors on the whole batch."""
        rounds = self.rounds
        mask = self._model_kwargs.get("attention_mask")
        mask = None if mask is None else mask.to(self.device)
        outputs = rounds.passes.prefill(rounds.rows.tokens[:, : self.prompt_length], mask, self.positions)
        if rounds.context is not None:
            columns = torch.arange(self.prompt_length, device=self.device).expand(self.batch, -1)
            rounds.context.places = Places(columns, self.prompt_length, 0)
            rounds.extend(outputs, self.positions)
        scores = outputs.logits[:, -1].to(torch.float32, copy=True).to(self.device)
        ids = rounds.rows.tokens[:, : self.prompt_length]
        for processor in self.processors:
            scores = processor(ids, scores)
        return rounds.accept(scores[:, None], None, None, None)

    def _room(self) -> int:
        """How many tokens may be drafted, so that no row's pass goes where passes of one token would not."""
        rows = self._open(self.lengths)
        slots = min(self.max_slots, self.criteria.max_length - min(rows) - 1)
        if slots > 0 and slots_within_positions(self.text_config, 0) is not None:
            shift = self.rounds.rows.shift.tolist()
            for row, length in enumerate(self.lengths):
                if not self.done[row]:
                    slots = min(slots, slots_within_positions(self.text_config, length - 1 - shift[row]) or 0)
        return max(0, slots)

    def _round(self, processors: list[Any], slots: int) -> tuple[list[int], torch.Tensor]:
        """One round: how many tokens were drafted for every row, and what [`Rows.append`] says."""
        rounds, longest = self.rounds, max(self.lengths)
        first = longest - 1 if len(set(self.lengths)) == 1 else None
        fast = is_fast(processors)
        counts, block = [0] * self.batch, None
        rounds.chain = None
        if slots:
            columns = longest + rounds.drafter.config.num_draft_slots
            block = rounds.draft(processors if fast else None, columns, first)
        if fast:
            counts = [0 if done else slots for done in self.done]
            return counts, rounds.verify(1 + slots, processors, longest + slots, first)
        if block is not None:
            rounds.chain, counts = walk_rows(rounds, block, processors, self.lengths, self.done, slots)
        drafts = None if rounds.chain is None else rounds.chain.tokens
        drafted = torch.tensor(counts, device=self.device)
        logits = rounds.target_logits(drafts, longest + max(counts), first)
        scores = processed_scores(rounds, logits, drafts, processors, self.lengths, counts, self.done)
        return counts, rounds.accept(scores, drafts, rounds.chain, drafted)

    def _take(self, report: torch.Tensor, counts: list[int]) -> None:
        """Reads what a round decided: the one look at the host."""
        cuts: dict[int, int] = {}
        for row, (count, done, agreed, *tokens) in enumerate(report.tolist()):
            if self.done[row]:
                continue
            stop = self.criteria.stop(self.rounds.rows.tokens[row : row + 1], self.lengths[row], count)
            if stop is not None:
                count, done = stop, 1
                cuts[row] = self.lengths[row] + count
            if self.lengths[row] > self.prompt_length:
                self.log.add(row, self.lengths[row] - self.prompt_length, counts[row], agreed, count)
            self.lengths[row] += count
            self.done[row] = bool(done)
            if self.streamer is not None:
                for token in tokens[:count]:
                    self.streamer.put(torch.tensor([token]))
        for row, length in cuts.items():
            self.rounds.rows.length[row] = length
            self.rounds.rows.done[row] = True

    def _finish(self) -> Any:
        if self.streamer is not None:
            self.streamer.end()
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


def _max_slots(drafter: Any, config: Any) -> int:
    """The longest draft that the drafter and both configs allow."""
    own = getattr(getattr(drafter, "generation_config", None), "num_assistant_tokens", None)
    limits = (drafter.config.num_draft_slots, config.num_assistant_tokens, own)
    return min(int(limit) for limit in limits if limit is not None)
