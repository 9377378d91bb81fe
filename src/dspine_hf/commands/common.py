"""What the commands share: their common options, loading target and drafter, and one timed answer."""

import contextlib
import difflib
import io
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import torch
import typer
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers import PreTrainedModel, TextStreamer
from transformers.utils import logging

from ..configuration_dspine import DSpineConfig
from ..decoding import generate
from ..embedded import TARGET_NAME, embedded_drafter_folder, load_embedded_target
from ..loading import check_drafter, load_drafter, load_target

Device = Annotated[
    str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...; default: cuda where it is, else cpu.")
]


class Dtype(StrEnum):
    """The dtypes a target can be loaded in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"

    @property
    def torch(self) -> torch.dtype:
        return getattr(torch, self.value)


@dataclass
class Pair:
    """A target with its tokenizer and its drafter, and what to call them."""

    target: PreTrainedModel
    tokenizer: Any
    drafter: PreTrainedModel
    target_name: str
    drafter_name: str


@dataclass
class Answer:
    """One timed answer: its text, new tokens and seconds, and the drafter's statistics if it had a drafter."""

    text: str
    token_ids: list[int]
    seconds: float
    stats: Any = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds


class CallbackStreamer(TextStreamer):
    """Hands each finished piece of the answer's text to a function, as soon as it is known."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


def load_pair(
    target: str | None, drafter: str | None, dtype: torch.dtype, device: str | None = None, **drafter_kwargs: Any
) -> Pair:
    """Load a target and its drafter; None stands for the embedded target and for the drafter trained for it.

    `drafter_kwargs` go to [`load_drafter`].

    Raises:
        ValueError: a target was named without a drafter, or the device cannot be used.
        FileNotFoundError, ImportError: something is not there; the message names the cure.
    """
    if drafter is None:
        if target is not None:
            raise ValueError(
                f"expected --drafter with the drafter trained for '{target}'; found none. Name its folder or Hub "
                f"name, or train one with 'dspine train --target {target}'."
            )
        drafter = str(embedded_drafter_folder())
    place = usable_device(device)
    check_drafter(drafter)
    model, tokenizer = load_quietly(target, dtype)
    model = model.to(place)
    loaded = load_drafter(drafter, model, **drafter_kwargs)
    return Pair(model, tokenizer, loaded, target or TARGET_NAME, Path(drafter).name)


def load_quietly(target: str | None, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The target of this name and its tokenizer, None: the embedded one. Nothing is drawn while a file is unpacked."""
    here = target is None or Path(target).expanduser().exists()
    with _without_progress_bars() if here else contextlib.nullcontext():
        return load_embedded_target(dtype) if target is None else load_target(target, dtype)


def hide_loading_bars() -> None:
    """Transformers draws no bar for weights that it loads or writes; downloads keep theirs."""
    downloads = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()


def usable_device(name: str | None) -> torch.device:
    """The device of this name, once it holds a tensor; None: a CUDA device where there is one, else the CPU.

    Raises:
        ValueError: the device cannot hold a tensor.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"expected --device with a device that this PyTorch can use; found '{name}' ({reason}). Name "
            "'cpu', or leave it out."
        ) from error
    return device


def encode(tokenizer: Any, prompt: str, device: torch.device, chat: bool = True) -> dict[str, torch.Tensor]:
    """Tokenize a prompt, in the target's chat template where it has one: input_ids and attention_mask [1, length]."""
    if chat and tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


@torch.inference_mode()
def answer(
    pair: Pair,
    inputs: dict[str, torch.Tensor],
    *,
    drafted: bool,
    max_new_tokens: int,
    temperature: float = 0.0,
    on_text: Callable[[str], None] | None = None,
    loop: dict[str, Any] | None = None,
) -> Answer:
    """Generate one answer, plain or drafted, and time it from the call to the last token, prefill included.

    Args:
        loop: options of [`dspine_hf.generate`], which then decodes; None: the target's own generate() does.
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    streamer = CallbackStreamer(pair.tokenizer, on_text) if on_text else None
    assistant = {"assistant_model": pair.drafter} if drafted else {}
    start = time.perf_counter()
    options = {**inputs, **sampling, "max_new_tokens": max_new_tokens, "streamer": streamer}
    if loop is not None:
        ids = generate(pair.target, pair.drafter if drafted else None, **options, **loop)
    else:
        ids = pair.target.generate(**options, **assistant)
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    seconds = time.perf_counter() - start
    new_ids = ids[0, inputs["input_ids"].shape[1] :].tolist()
    text = pair.tokenizer.decode(new_ids, skip_special_tokens=True)
    return Answer(text, new_ids, seconds, pair.drafter.generation_stats if drafted else None)


def loop_options(
    fast: bool,
    tree_nodes: int | None,
    adaptive: bool = False,
    compiled: bool | str = False,
    candidates: int | None = None,
) -> dict[str, Any] | None:
    """What [`dspine_hf.generate`] is to be told beyond generate()'s arguments; None: it is not asked for.

    Raises:
        ValueError: trees together with drafts that are cut.
    """
    if tree_nodes is not None and adaptive:
        raise ValueError("--adaptive cuts chains, and --tree-nodes asks for trees. Leave one of them out.")
    asked = {"tree_nodes": tree_nodes, "adaptive": adaptive, "compiled": compiled, "num_candidates": candidates}
    options = {name: value for name, value in asked.items() if value}
    return options if fast or options else None


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hide the bars that loading draws on stderr; log messages still come through, and warnings once it is done."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for warning in caught:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


def parse_fields(fields: list[str]) -> dict[str, Any]:
    """The values of --config name=value: JSON where it is JSON, else the word itself.

    Raises:
        ValueError: a field is not of that form, no field of a DSpineConfig, or its value is of another type.
    """
    types = DSpineConfig.field_types()
    values: dict[str, Any] = {}
    for field in fields:
        name, equals, text = field.partition("=")
        if not equals:
            raise ValueError(f"expected --config name=value; found '{field}'. For example: --config block_size=16.")
        if name not in types:
            close = difflib.get_close_matches(name, types, n=1)
            meant = f" Did you mean '{close[0]}'?" if close else ""
            raise ValueError(
                f"expected --config with a field of DSpineConfig; found '{name}'.{meant} "
                f"The fields are: {', '.join(sorted(types))}."
            )
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if not any(_is_of(value, member) for member in _members(types[name])):
            raise ValueError(f"expected {_in_words(types[name])} as --config {name}; found '{text}'.")
        values[name] = value
    return values


KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    list: "a list like [1, 2]",
    dict: 'an object like {"rope_theta": 10000}',
    type(None): "null",
}


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether JSON's `value` is of a type as `int` or `list[int]`; a bool is no number."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _in_words(kind: Any) -> str:
    return " or ".join(KINDS[get_origin(member) or member] for member in _members(kind))
