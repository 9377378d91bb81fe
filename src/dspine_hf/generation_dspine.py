"""DSpineCandidateGenerator: one draft round inside generate(), and the call that it is a part of."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .compat_dspine import (
    FeatureTaps,
    check_cache,
    check_layer_types,
    find_cache,
    hooked_view,
    is_sliding,
)
from .context_dspine import DraftContext
from .refusals_dspine import refuse_conflicts, refuse_moved_modes, refuse_stateful_processors
from .rounds_dspine import CriteriaProxy, CropRecorder, EagerCrop, StreamerProxy, trim_output
from .stats_dspine import DraftLog, GenerationStats, load_stats, store_stats
from .steps_dspine import StepRecorder
from .target_dspine import last_position, refuse_position, refuse_unknown_tokens, slots_within_positions
from .walk_dspine import sampling_options, walk


class DSpineCandidateGenerator(CandidateGenerator):
    """
    Drafts one block per round from the features of the target's last pass.

    Args:
        call: the generate() call that this belongs to.
        generation_config: the call's own copy.
        logits_processor: the call's processors, which run inside the walk.
    """

    requires_model_outputs = True

    def __init__(self, call: "DraftedCall", generation_config: Any, logits_processor: Any):
        self._call = call
        self._processors = list(logits_processor or ())
        self._do_sample = bool(generation_config.do_sample)
        self._max_length = generation_config.max_length
        limits = (
            call.drafter.config.num_draft_slots,
            generation_config.num_assistant_tokens,
            call.num_assistant_tokens,
        )
        self._max_slots = min(int(limit) for limit in limits if limit is not None)
        self._view = call.drafter.bind_target(call.target)
        self._text_config = call.target.config.get_text_config(decoder=True)
        self._bounded = slots_within_positions(self._text_config, 0) is not None
        self._last_position = last_position(call.target)

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """What the loop adds to the inputs of every target pass."""
        return {"output_hidden_states": self._call.taps.request}

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Appends a draft to `input_ids` `[1, length]`; the second value is q as `[1, drafted, V]` fp32 log-probabilities
        when sampling, None when greedy or when nothing was drafted.
        """
        call = self._call
        call.begin_round(input_ids, model_kwargs, is_first_iteration)
        refuse_position(self._last_position, call.last_position)
        if is_first_iteration:
            return input_ids, None
        slots = min(self._max_slots, self._max_length - input_ids.shape[1] - 1)
        if self._bounded and call.anchor_position is not None:
            within = slots_within_positions(self._text_config, int(call.anchor_position))
            slots = slots if within is None else min(slots, within)
        if slots < 1:
            call.log.add(input_ids.shape[1], None)
            return input_ids, None
        config, anchor = call.drafter.config, (input_ids[:, -1], call.anchor_position)
        sampling = sampling_options(config, self._processors, 1, call.drafter.device) if self._do_sample else {}
        block = call.drafter.draft_block(self._view, call.context.cache, *anchor, **sampling)
        draft = walk(first_slots(block, slots), input_ids, self._processors, self._do_sample, config.vocab_size)
        if not draft.tokens.shape[1]:
            call.log.add(input_ids.shape[1], None)
            return input_ids, None
        tokens = draft.tokens.to(input_ids.device)
        call.log.add(input_ids.shape[1], tokens)
        return torch.cat([input_ids, tokens], dim=1), draft.log_q

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """The number of drafted tokens does not depend on earlier rounds."""


def first_slots(block: Any, slots: int) -> Any:
    """A block's first `slots` slots. Slots see each other, so a shorter draft is a whole block that is cut."""
    if slots >= block.candidates.shape[1]:
        return block
    table, rest = block.transitions, {}
    if table is not None:
        rows = None if table.rows is None else table.rows[:, : slots - 1]
        rest["transitions"] = replace(table, pairs=table.pairs[:, : slots - 1], rows=rows)
    if block.noise is not None:
        rest["noise"] = block.noise[:, :slots]
    return replace(block, candidates=block.candidates[:, :slots], unary=block.unary[:, :slots], **rest)


class TargetInCall:
    """
    The target as the assisted loop sees it during one call: itself, with two corrections.

    The loop's first pass does not skip prompt tokens that a user's cache already holds, and it shortens a mask that is
    longer than its ids (a cache with only the new ids, or `inputs_embeds`). Both are put right where inputs are
    prepared. Every output is noted, because the loop does not hand out its last one.
    """

    def __init__(self, target: Any, call: "DraftedCall"):
        self._target = target
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def device(self) -> torch.device:
        """Where the ids are: an offloaded target says "meta"."""
        return self._call.device

    def __call__(self, **inputs: Any) -> Any:
        return self._call.note_outputs(self._target(**inputs))

    def get_compiled_call(self, *args: Any, **kwargs: Any) -> Callable:
        """The target's compiled forward pass, with its outputs noted."""
        compiled = self._target.get_compiled_call(*args, **kwargs)
        return lambda **inputs: self._call.note_outputs(compiled(**inputs))

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As the target's own, for the tokens that are not in its cache yet and with the mask over all that are."""
        if kwargs.get("is_first_iteration"):
            next_sequence_length = self._call.prompt_rows
        mask = self._call.mask
        if mask is not None and kwargs.get("attention_mask") is not None:
            drafted = (
                0 if next_sequence_length is None or kwargs.get("is_first_iteration") else next_sequence_length - 1
            )
            kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(1, drafted)], dim=1)
        return self._target.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, **kwargs
        )

    def _get_candidate_generator(self, **kwargs: Any) -> Any:
        return self._target._get_candidate_generator(**kwargs)


class DraftedCall:
    """
    One call of generate() with a DSpine drafter; everything that lives as long as the call lives here.

    Args:
        drafter, target: the two models.
        input_ids: `[1, prompt]`, empty when only `inputs_embeds` were given.
        generation_config: the call's own copy.
        model_kwargs: the target's keyword arguments, its cache among them.

    Raises:
        ValueError: for a batch, or a cache whose rows cannot be taken back.
    """

    def __init__(
        self, drafter: Any, target: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ):
        if input_ids.shape[0] != 1:
            raise ValueError(
                f"expected one prompt, found a batch of {input_ids.shape[0]}: generate() drafts for batch size 1. "
                "Loop over the prompts."
            )
        if not input_ids.shape[1] and model_kwargs.get("inputs_embeds") is None:
            raise ValueError(
                "expected a prompt of at least one token; found none. Begin with the tokenizer's bos_token_id, or "
                "pass no prompt at all."
            )
        refuse_unknown_tokens(target, input_ids)
        self.target_cache = find_cache(model_kwargs)
        check_cache(self.target_cache)
        self.drafter, self.target = drafter, target
        self.prompt_length, self.device = input_ids.shape[1], input_ids.device
        config = getattr(drafter, "generation_config", None)
        self.num_assistant_tokens = getattr(config, "num_assistant_tokens", None)
        past_length = int(self.target_cache.get_seq_length())
        self.prompt_rows = _rows_of_first_pass(input_ids, generation_config, model_kwargs, past_length)
        wants_states = bool(model_kwargs.get("output_hidden_states"))
        wants_attentions = bool(model_kwargs.get("output_attentions"))
        self.taps = FeatureTaps(target, drafter.config.target_layer_ids, wants_states)
        self.context = DraftContext(drafter, self.taps, self.target_cache, past_length)
        self.log = DraftLog()
        self.steps = StepRecorder(self.target_cache, wants_states, wants_attentions)
        self.crop = CropRecorder(self.target_cache) if is_sliding(self.target_cache) else EagerCrop(self.target_cache)
        self.mask: torch.Tensor | None = None
        self.anchor_position: torch.Tensor | None = None  # [1]
        self._length = self.prompt_length  # tokens decided when the last pass began
        self._outputs: Any = None

    def dspine_candidate_generator(self, generation_config: Any, logits_processor: Any, **_: Any) -> Any:
        """Called by the hook: this object stands in for the assistant inside the loop."""
        return DSpineCandidateGenerator(self, generation_config, logits_processor)

    def note_outputs(self, outputs: Any) -> Any:
        """Remembers the output of the pass that just ran."""
        self._outputs = outputs
        return outputs

    def begin_round(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], is_first: bool) -> None:
        """Finishes the last round (crop, features) and notes where the next pass begins."""
        self.crop.flush()
        self.mask = model_kwargs.get("attention_mask")
        if is_first:
            ids_or_embeds = input_ids if input_ids.shape[1] else model_kwargs["inputs_embeds"]
            past_length = int(self.target_cache.get_seq_length())
            rows = ids_or_embeds.shape[1] if self.prompt_rows is None else self.prompt_rows
            self.context.begin(model_kwargs, past_length + rows, input_ids.device)
            return
        self.steps.add(self._outputs, input_ids.shape[1] - self._length)
        self._append_features(input_ids.shape[1])
        self._length = input_ids.shape[1]
        self.anchor_position = self.context.position(self._length - self.prompt_length)

    @property
    def last_position(self) -> torch.Tensor:
        """The position `[1]` of the last token decided: the anchor's, or before the first pass the prompt's end."""
        return self.context.position(0) if self.anchor_position is None else self.anchor_position

    def _append_features(self, length: int) -> None:
        """The last pass is verified up to `length` tokens: its rows before the new anchor become context."""
        if self.anchor_position is None:
            self.context.append_prompt(self._outputs)
        else:
            self.context.append_verified(self._outputs, length - self._length, self.anchor_position)

    def finish(self, result: Any, cut: int | None) -> Any:
        """Trims what was accepted beyond the stop, leaves the context for a next turn, and counts."""
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        length = sequences.shape[1] if cut is None else cut
        self.crop.flush(sequences.shape[1] - length)
        self.steps.add(self._outputs, length - self._length)
        result = trim_output(result, self.prompt_length, length)
        if not isinstance(result, torch.Tensor):
            self.steps.replace(result)
        if getattr(self.target_cache, "_is_user_defined", False) or not isinstance(result, torch.Tensor):
            self._append_features(length)
            self.context.keep(int(self.target_cache.get_seq_length()))
        store_stats(self.drafter, self.log.count(sequences[0, :length], self.prompt_length))
        return result


def _rows_of_first_pass(
    input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], past_length: int
) -> int | None:
    """How many prompt tokens are not in the cache yet, if the prompt repeats those that are; None: feed all of it."""
    if not past_length:
        return None
    mask = model_kwargs.get("attention_mask")
    embeds = model_kwargs.get("inputs_embeds")
    length = input_ids.shape[1] if embeds is None else embeds.shape[1]
    mask_length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    if embeds is None and mask_length != length:
        return None
    if length <= past_length:
        raise ValueError(
            f"the prompt has {length} tokens and the cache already holds {past_length}: nothing is left to feed. Crop "
            "the cache, or pass the whole conversation with new tokens at its end."
        )
    return length - past_length


class AssistsGenerate:
    """What makes a draft model an `assistant_model`: the methods that the hook looks for, and a call's figures."""

    @property
    def generation_stats(self) -> GenerationStats | None:
        """
        Figures of the last finished generate() call with this drafter: the calling thread's own, or in a thread that
        made none the last one of any thread. None before the first. See [`GenerationStats`].
        """
        return load_stats(self)

    def dspine_refuse(self, kwargs: dict[str, Any]) -> None:
        """
        Refuses the keyword arguments of modes for which Transformers asks for code of the Hub before anything else.

        Raises:
            ValueError: naming the argument.
        """
        refuse_moved_modes(kwargs)

    def dspine_validate(self, target: Any, mode: Any, generation_config: Any, mode_kwargs: dict[str, Any]) -> None:
        """
        Refuses, before any work is done, what cannot be combined with a drafter.

        Raises:
            ValueError: naming the argument or the target's property, and the way out.
        """
        refuse_conflicts(target, mode, generation_config)
        check_layer_types(target)
        self.check_target(target)  # type: ignore[attr-defined]
        mode_kwargs.pop("assistant_tokenizer", None)

    def dspine_generate(self, target: Any, **kwargs: Any) -> Any:
        """`target.generate(**kwargs)` drafted by this model, whether or not `GenerationMixin` carries the hook."""
        view = hooked_view(target)
        return type(view).generate(view, assistant_model=self, **kwargs)

    def dspine_assisted_decoding(self, loop: Callable, target: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Runs the assisted loop of transformers with this drafter.

        Args:
            loop: `GenerationMixin._assisted_decoding`, unwrapped.
            target, args, kwargs: what it was called with.
        """
        bound = inspect.signature(loop).bind(target, *args, **kwargs)
        arguments = bound.arguments
        model_kwargs = arguments.pop("model_kwargs", {})
        generation_config = arguments["generation_config"]
        refuse_stateful_processors(arguments["logits_processor"])
        call = DraftedCall(self, target, arguments["input_ids"], generation_config, model_kwargs)
        streamer = arguments.get("streamer")
        if streamer is not None:
            arguments["streamer"] = StreamerProxy(streamer)
        criteria = CriteriaProxy(
            arguments["stopping_criteria"],
            call.prompt_length,
            getattr(generation_config, "_eos_token_tensor", None),
            arguments.get("streamer"),
        )
        arguments.update(stopping_criteria=criteria, assistant_model=call)
        arguments.pop("self")
        try:
            result = loop(TargetInCall(target, call), **arguments, **model_kwargs)
            return call.finish(result, criteria.cut)
        finally:
            call.crop.restore()
