"""generate(): the fast decode loop, for batches, over static caches, with one look at the host per round."""

import copy
import functools
import warnings
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from .compat_dspine import CACHE_NAMES, check_layer_types
from .fast_call import FastCall, Options
from .fast_tree import BITS
from .refusals_dspine import refuse_conflicts, refuse_stateful_processors
from .target_dspine import refuse_unknown_tokens

_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states", *CACHE_NAMES}
CPU_CANDIDATES = 8
_WAY_OUT = "use model.generate(..., assistant_model=drafter), which takes it."


def generate(
    model: Any,
    drafter: Any = None,
    input_ids: torch.Tensor | None = None,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    adaptive: bool = False,
    use_graphs: bool | None = None,
    compiled: bool | str = False,
    fused_attention: bool | None = None,
    num_candidates: int | None = None,
    num_sampled_candidates: int | None = None,
    tree_nodes: int | None = None,
    **kwargs: Any,
) -> Any:
    """
    `model.generate()` with a drafter, several times faster: batches, static caches, and CUDA graphs on a GPU.

    Args:
        model: the target, a decoder-only causal LM.
        drafter: a DSpine drafter of this target; None: plain decoding by the same loop, one token a pass.
        input_ids: `[batch, length]` prompts, padded on the left, with an `attention_mask` among `kwargs`.
        streamer, tokenizer, kwargs: what generate() takes.
        num_candidates: K of this call, 1 to the drafter's; None: the drafter's, but on a CPU at most 8, where fewer
            candidates save more time than the few per cent of acceptance length cost.
        num_sampled_candidates: S of this call, when sampling, 1 to V; None: the drafter's. On a CPU 256 of them make a
            draft 3 % slower than 8.
        tree_nodes: verify so many drafted tokens at once, those on the likeliest paths through the candidates, and go
            on along the path that the target takes. More tokens a pass are accepted, and a pass has more rows. Greedy
            decoding without processors does so; other calls draft chains. None: chains.
        adaptive: verify only as many drafted tokens as pay, and none while drafting does not pay. The text's law stays
            the target's; but it depends on a clock then which of its texts a seed gives.
        use_graphs: replay each half of a round as a CUDA graph, kept for later calls until
            [`dspine_hf.graphs.release`]; None: where the target allows it.
        compiled: run the passes of target and drafter, other than the prompt's, through torch.compile; every number of
            rows is compiled once. "fused": so that products of few rows are the kernel package's too. Any other string
            is a mode of torch.compile, such as "max-autotune-no-cudagraphs".
        fused_attention: verify and draft with the kernel package's attention; None: if the drafter's config asks for
            fused kernels.

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
        widths = _widths(drafter, num_candidates, num_sampled_candidates, input_ids.device)
        call = FastCall(
            target,
            drafter,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            Options(streamer, adaptive, use_graphs, compiled, fused_attention, widths, tree_nodes or 0),
        )
        return call.run()

    _refuse_other_assistants(drafter, kwargs)
    if tree_nodes is not None and (tree_nodes < 1 or drafter is None or adaptive):
        raise ValueError(
            f"tree_nodes={tree_nodes}: expected a number from 1, with a drafter and without adaptive=True, which cuts "
            "chains. Drop one of them."
        )
    if tree_nodes is not None and tree_nodes > BITS:
        _warn_of_large_trees()
    _refuse_unknown_modes(compiled)
    name = kwargs.get("cache_implementation") or getattr(kwargs.get("generation_config"), "cache_implementation", None)
    if name not in (None, "dynamic", "dynamic_full"):
        raise ValueError(f"cache_implementation={name!r}: the fast loop has a static cache of its own. Drop it.")
    kwargs = _with_stop_strings(model, tokenizer, kwargs)
    if input_ids is not None:
        kwargs["input_ids"] = input_ids
    return model.generate(custom_generate=decode, streamer=streamer, **kwargs)


def _refuse_other_assistants(drafter: Any, kwargs: dict[str, Any]) -> None:
    """Raises for what would draft beside the drafter or in place of it."""
    for name in ("assistant_model", "custom_generate"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"`{name}` does not go with dspine_hf.generate, which has a loop of its own. Pass a DSpine drafter "
                f"as the second argument, or use model.generate(..., {name}=...)."
            )
    if drafter is not None and not hasattr(drafter, "check_target"):
        raise TypeError(
            f"expected a DSpine drafter or None as the second argument; found {type(drafter).__name__}. Load one "
            "with AutoModel.from_pretrained."
        )


@functools.cache
def _warn_of_large_trees() -> None:
    """Once a process."""
    warnings.warn(
        f"tree_nodes above {BITS}: the operations without kernels run, which are slow. Trees of more than some tens "
        f"of tokens seldom pay; {BITS} or fewer take the kernels.",
        stacklevel=3,
    )


def _refuse_unknown_modes(compiled: bool | str) -> None:
    """Raises ValueError for a string that is neither "fused" nor a mode of torch.compile."""
    if not isinstance(compiled, str) or compiled == "fused":
        return
    from torch._inductor import list_mode_options

    modes = list(list_mode_options())
    if compiled not in modes:
        raise ValueError(
            f'compiled={compiled!r}: expected True, False, "fused" or a mode of torch.compile; found none of them. '
            f"Its modes: {', '.join(modes)}."
        )


def _with_stop_strings(model: Any, tokenizer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A criterion instead of `stop_strings`: generate() hands no tokenizer on to a recipe of one's own."""
    kwargs = dict(kwargs)
    config = kwargs.get("generation_config")
    found = kwargs.pop("stop_strings", None)
    if config is not None and config.stop_strings is not None:
        found = config.stop_strings if found is None else found
        config = copy.deepcopy(config)
        config.stop_strings = None
        kwargs["generation_config"] = config
    own = model.generation_config.stop_strings
    if own is not None:
        found = own if found is None else found
        kwargs["stop_strings"] = None  # the argument takes precedence
    if found is None:
        return kwargs
    if tokenizer is None:
        raise ValueError(f"stop_strings={found!r} need the tokenizer. Pass `tokenizer=...`.")
    criteria = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, found)])
    return kwargs


def _widths(
    drafter: Any, kept: int | None, sampled: int | None, device: torch.device
) -> tuple[int | None, int | None]:
    """K and S of a call; None: the drafter's."""
    if drafter is None:
        return None, None
    most = drafter.config.num_candidates
    if kept is None and device.type == "cpu":
        kept = min(most, CPU_CANDIDATES)
    if kept is not None and not 1 <= kept <= most:
        raise ValueError(f"num_candidates={kept}: expected 1 to {most}, the drafter's own. Pass a number in between.")
    vocabulary = drafter.config.vocab_size
    if sampled is not None and not 1 <= sampled <= vocabulary:
        raise ValueError(
            f"num_sampled_candidates={sampled}: expected 1 to {vocabulary}, the vocabulary. Pass a number in between."
        )
    return (kept if kept != most else None), sampled


def refuse(
    target: Any, drafter: Any, input_ids: torch.Tensor, config: Any, processors: Any, model_kwargs: dict[str, Any]
) -> None:
    """Raises ValueError, naming the way out, for what the loop cannot do; before any work is done."""
    mode = config.get_generation_mode(None)
    if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        mode = GenerationMode.ASSISTED_GENERATION
    refuse_conflicts(target, mode, config)
    check_layer_types(target)
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
