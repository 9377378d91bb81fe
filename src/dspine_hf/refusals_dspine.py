"""What cannot be combined with a drafter, refused by name before any work is done."""

from collections.abc import Mapping
from typing import Any

from transformers.generation.configuration_utils import GenerationMode

from .compat_dspine import check_cache_implementation

_STATEFUL_PROCESSORS = (
    "WatermarkLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)
_MOVED_MODES: dict[str, tuple] = {"num_beam_groups": (1, None), "constraints": (None,), "force_words_ids": (None,)}


def refuse_moved_modes(arguments: Mapping[str, Any]) -> None:
    """
    Refuses the arguments of modes for which Transformers asks for code of the Hub before it asks the drafter.

    Raises:
        ValueError: naming the argument.
    """
    for name, allowed in _MOVED_MODES.items():
        if arguments.get(name) not in allowed:
            raise _conflict(name, arguments[name])


def _conflict(name: str, value: Any) -> ValueError:
    return ValueError(
        f"{name}={value!r} cannot be combined with a DSpine drafter. Drop `{name}`, or generate without "
        "`assistant_model`."
    )


def refuse_conflicts(target: Any, mode: Any, generation_config: Any) -> None:
    """
    Raises ValueError, naming the argument, for modes of generation that a drafter cannot take part in.

    Args:
        target: the model that generates.
        mode: the `GenerationMode` that the arguments amount to.
        generation_config: the call's own copy.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder; a DSpine drafter needs a decoder-only target. Generate "
            "without `assistant_model`."
        )
    wanted = {
        **_MOVED_MODES,
        "num_beams": (1, None),
        "num_return_sequences": (1, None),
        "prompt_lookup_num_tokens": (None,),
        "assistant_early_exit": (None,),
        "assistant_ensemble_weight": (None,),
        "use_mtp": (False, None),
        "dola_layers": (None,),
        "speculation_type": (None,),
        "guidance_scale": (1, None),
        "watermarking_config": (None,),
    }
    for name, allowed in wanted.items():
        value = getattr(generation_config, name, None)
        if value not in allowed:
            raise _conflict(name, value)
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"a DSpine drafter assists greedy decoding and sampling; these arguments amount to {mode}. Use greedy "
            "decoding or sampling, or generate without `assistant_model`."
        )
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False leaves nothing to verify drafts against. Pass `use_cache=True`.")
    check_cache_implementation(generation_config.cache_implementation)


def refuse_stateful_processors(processors: Any) -> None:
    """Raises ValueError for a processor whose state would also count draft tokens that are rejected."""
    for processor in processors:
        kind = type(processor).__name__
        if kind in _STATEFUL_PROCESSORS:
            raise ValueError(
                f"{kind} keeps a state of its own over the tokens, which rejected drafts would disturb. Remove it "
                "from `logits_processor`, or generate without `assistant_model`."
            )
