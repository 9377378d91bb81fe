"""Every difference between the supported transformers versions, and the hook that brings a drafter into generate().

The hook wraps methods of `GenerationMixin`. Each wrapper asks the assistant, by method and never by class,
whether it drafts DSpine blocks; everything else goes to the original. So a drafter loaded as remote code is served by
a hook that the installed package put there, and the other way round.
"""

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import __version__ as transformers_version
from transformers.cache_utils import StaticLayer
from transformers.generation.utils import GenerationMixin

HOOK_PROTOCOL = 2
"""Version of the agreement between hook and drafter: a newer hook replaces an older one."""

_PROTOCOL_ATTRIBUTE = "dspine_protocol"
_HOOKED_PARAMETERS = {
    "_extract_generation_mode_kwargs": ("kwargs", "assistant_model"),
    "_validate_generation_mode": ("generation_mode", "generation_config", "generation_mode_kwargs"),
    "_assisted_decoding": (
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "streamer",
        "assistant_model",
    ),
    "_get_candidate_generator": (
        "generation_config",
        "input_ids",
        "logits_processor",
        "model_kwargs",
        "assistant_model",
    ),
}
CACHE_NAMES = ("cache", "past_key_values")
STATIC_CACHE_CAN_BE_CROPPED = hasattr(StaticLayer, "crop")

_UNCROPPABLE_LAYER_TYPES = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv", "hybrid")


def _refuse_compiled(assistant: Any) -> None:
    """`torch.compile(drafter)` is a module around the drafter, which hides what makes it one."""
    if hasattr(type(getattr(assistant, "_orig_mod", None)), "dspine_validate"):
        raise ValueError(
            "expected assistant_model=<DSpine drafter>; found torch.compile(drafter), a module around it. Compile the "
            "drafter in place with drafter.compile(), and pass the drafter itself."
        )


def _wrap_extract_generation_mode_kwargs(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _extract_generation_mode_kwargs(self, *args, **kwargs):
        arguments = signature.bind(self, *args, **kwargs).arguments
        assistant = arguments["assistant_model"]
        if hasattr(type(assistant), "dspine_refuse"):
            assistant.dspine_refuse(arguments["kwargs"])
        return original(self, *args, **kwargs)

    return _extract_generation_mode_kwargs


def _wrap_validate_generation_mode(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        if not hasattr(type(assistant), "dspine_validate"):
            _refuse_compiled(assistant)
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        assistant.dspine_validate(self, generation_mode, generation_config, generation_mode_kwargs)
        rest = {k: v for k, v in generation_mode_kwargs.items() if k not in ("assistant_model", "assistant_tokenizer")}
        return original(self, generation_mode, generation_config, rest)

    return _validate_generation_mode


def _wrap_assisted_decoding(original: Callable) -> Callable:
    @functools.wraps(original)
    def _assisted_decoding(self, *args, **kwargs):
        assistant: Any = kwargs.get("assistant_model")
        if not hasattr(type(assistant), "dspine_assisted_decoding"):
            return original(self, *args, **kwargs)
        return assistant.dspine_assisted_decoding(original, self, *args, **kwargs)

    return _assisted_decoding


def _wrap_get_candidate_generator(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_candidate_generator(self, *args, **kwargs):
        assistant: Any = kwargs.get("assistant_model")
        if not hasattr(type(assistant), "dspine_candidate_generator"):
            return original(self, *args, **kwargs)
        return assistant.dspine_candidate_generator(*args, **kwargs)

    return _get_candidate_generator


_WRAPPERS = {
    "_extract_generation_mode_kwargs": _wrap_extract_generation_mode_kwargs,
    "_validate_generation_mode": _wrap_validate_generation_mode,
    "_assisted_decoding": _wrap_assisted_decoding,
    "_get_candidate_generator": _wrap_get_candidate_generator,
}


def install_hook(mixin: type = GenerationMixin, protocol: int = HOOK_PROTOCOL) -> None:
    """
    Wraps those methods of `mixin` once: a wrapper of an older protocol is replaced, any other is kept.

    Raises:
        ImportError: if a method is missing or no longer takes the parameters that the wrapper relies on.
    """
    for name, needed in _HOOKED_PARAMETERS.items():
        current: Any = getattr(mixin, name, None)
        found = () if current is None else tuple(inspect.signature(current).parameters)
        if any(parameter not in found for parameter in needed):
            raise ImportError(
                f"dspine_hf relies on GenerationMixin.{name}{needed}, but transformers {transformers_version} has "
                f"{name}{found}. Install a supported version: pip install 'transformers>=5.18,<5.25'."
            )
        installed = getattr(current, _PROTOCOL_ATTRIBUTE, None)
        if installed is not None:
            if installed >= protocol:
                continue
            current = current.__wrapped__
        wrapper = _WRAPPERS[name](current)
        setattr(wrapper, _PROTOCOL_ATTRIBUTE, protocol)
        setattr(mixin, name, wrapper)


@functools.cache
def _hooked_class(family: type) -> type:
    hooked = type(family.__name__, (family,), {"__module__": family.__module__, "__doc__": family.__doc__})
    install_hook(hooked)
    return hooked


def hooked_view(target: Any) -> Any:
    """The target under a subclass that carries the hook, weights shared; it and its class stay as they are."""
    view = copy.copy(target)
    family: Any = type(target)
    view.__class__ = _hooked_class(family)
    return view


def find_cache(container: Any) -> Any:
    """The target's cache in `model_kwargs` or in a model output, whatever this version calls it; None if absent."""
    for name in CACHE_NAMES:
        cache = container.get(name)
        if cache is not None:
            return cache
    return None


def _layer_is(layer: Any, name: str) -> bool:
    return any(name in base.__name__ for base in type(layer).__mro__)


def check_cache(cache: Any) -> None:
    """
    Refuses a target cache whose last rows cannot be taken back after a rejected draft.

    Raises:
        ValueError: no cache, or one with quantised, linear-attention or not croppable static layers.
    """
    if cache is None or not hasattr(cache, "layers"):
        raise ValueError(
            "assistant_model=<DSpine drafter> needs a target with a standard key/value cache, but this call has none. "
            "Leave `use_cache` on, or generate without `assistant_model`."
        )
    for layer in cache.layers:
        kind = type(layer).__name__
        if _layer_is(layer, "QuantizedLayer"):
            raise ValueError(
                f"a quantised cache ({kind}) cannot take back rejected draft tokens. Use the default dynamic cache: "
                "leave `cache_implementation` unset."
            )
        if _layer_is(layer, "LinearAttention"):
            raise ValueError(
                f"a linear-attention or hybrid target ({kind}) cannot take back rejected draft tokens: its recurrent "
                "state keeps no history. Generate without `assistant_model`."
            )
        if _layer_is(layer, "StaticLayer") and not STATIC_CACHE_CAN_BE_CROPPED:
            raise ValueError(
                f"a static cache ({kind}) cannot be cropped in transformers {transformers_version}. Use the default "
                "dynamic cache, or upgrade to 'transformers>=5.24,<5.25'."
            )
        if _layer_is(layer, "StaticSlidingWindowLayer") and not getattr(layer, "is_croppable", False):
            raise ValueError(
                f"this static sliding-window cache is longer than its window of {layer.max_cache_len} rows, so that "
                "rows are overwritten before a draft is verified. Use the default dynamic cache: leave "
                "`cache_implementation` unset."
            )
        if not getattr(layer, "is_croppable", True) or not hasattr(layer, "crop"):
            raise ValueError(
                f"the target's cache layer {kind} cannot be cropped. Use the default dynamic cache, or generate "
                "without `assistant_model`."
            )


def check_cache_implementation(implementation: str | None) -> None:
    """Refuses, before anything is prepared, the names of `cache_implementation` that `check_cache` would refuse."""
    if implementation == "quantized":
        raise ValueError(
            "cache_implementation='quantized' cannot take back rejected draft tokens. Leave `cache_implementation` "
            "unset to use the default dynamic cache."
        )
    dynamic = (None, "dynamic", "dynamic_full", "offloaded")
    if implementation not in dynamic and not STATIC_CACHE_CAN_BE_CROPPED:
        raise ValueError(
            f"cache_implementation={implementation!r} cannot be cropped in transformers {transformers_version}. Leave "
            "it unset to use the default dynamic cache, or upgrade to 'transformers>=5.24,<5.25'."
        )


def check_layer_types(target: Any) -> None:
    """
    Refuses targets with recurrent or linear-attention layers, by their configuration.

    Raises:
        ValueError: naming the layer types that keep no history.
    """
    layer_types = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ()
    found = sorted({kind for kind in layer_types if any(word in str(kind) for word in _UNCROPPABLE_LAYER_TYPES)})
    if found or getattr(target, "_is_stateful", False):
        raise ValueError(
            f"{type(target).__name__} is a linear-attention, recurrent or hybrid target "
            f"({', '.join(found) or 'stateful'}): its state cannot take back rejected draft "
            "tokens. Generate without `assistant_model`."
        )


def is_sliding(cache: Any) -> bool:
    """Whether any layer of the cache forgets rows that left its window."""
    return any(getattr(layer, "is_sliding", False) for layer in cache.layers)


class FeatureTaps:
    """
    Asks the target for the hidden states after `layer_ids` only, and finds them in what it returns.

    A list given as `output_hidden_states` means "after layer i" for index i in some versions and for index i + 1 in
    others, and some families ignore the list and return every state. The length of the returned tuple tells which: it
    counts the embeddings or it does not. So the first pass of a target class asks for both, later ones for one.

    Args:
        target: the causal language model.
        layer_ids: 0-based decoder layers whose outputs the drafter reads.
        all_states: the user wants every hidden state too, so ask for all of them.
    """

    _index_shift: "weakref.WeakKeyDictionary[type, int]" = weakref.WeakKeyDictionary()

    def __init__(self, target: Any, layer_ids: list[int], all_states: bool):
        self.family = type(target)
        self.layer_ids = list(layer_ids)
        self.num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.all_states = all_states

    @property
    def request(self) -> bool | list[int]:
        """What to pass as `output_hidden_states`."""
        if self.all_states:
            return True
        shift = self._index_shift.get(self.family)
        shifts = (0, 1) if shift is None else (shift,)
        return sorted({i + s for i in self.layer_ids for s in shifts})

    def read(self, outputs: Any) -> list[torch.Tensor]:
        """
        Returns the tapped states of one target pass, one `[1, rows, hidden]` per tap.

        Raises:
            ValueError: if the target returns no hidden states, or not one per layer.
        """
        states = getattr(outputs, "hidden_states", None) or ()
        shift = len(states) - self.num_layers
        taps = [states[i + shift] for i in self.layer_ids] if shift in (0, 1) else [None]
        if any(tap is None for tap in taps):
            raise ValueError(
                f"expected {self.family.__name__} to return {self.num_layers} or {self.num_layers + 1} hidden states, "
                f"with those of layers {self.layer_ids} among them; found {len(states)}. This target cannot feed a "
                "DSpine drafter: generate without `assistant_model`."
            )
        if not self.all_states:
            self._index_shift[self.family] = shift
        return taps
