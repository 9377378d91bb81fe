"""Loads a target by Hub name, folder or GGUF file, and a drafter onto the device and dtype of its target."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from .configuration_dspine import DSpineConfig
from .sources import HUB_SECONDS
from .target_dspine import resident

TARGET = "the target (a Hub name, a model folder or a .gguf file)"
DRAFTER = "the drafter (a folder or a Hub name; 'dspine train' makes one)"
CODE_FREE = ("config.json", "*.safetensors", "*.safetensors.index.json")
_FOUND: set[tuple[str, str]] = set()  # endpoints, and the names that they have


@contextlib.contextmanager
def from_hub(name: str | Path, what: str = DRAFTER, **options: Any) -> Iterator[None]:
    """Inside, a model is loaded by `name`, which the Hub has, or the cache where the Hub cannot be reached.

    The Hub is asked once, before libraries that would try again and again. A folder is not asked for.

    Args:
        what: what to call the model, and what it may be, in an error.
        options: those of `from_pretrained`, of which `cache_dir`, `local_files_only`, `revision` and `token` count.

    Raises:
        FileNotFoundError: neither has a model of this name.
    """
    reason, name = "", str(name)
    known = constants.ENDPOINT, name
    if Path(name).is_dir() or (known in _FOUND and not constants.HF_HUB_OFFLINE) or options.get("local_files_only"):
        yield
        return
    try:
        validate_repo_id(name)
        if constants.HF_HUB_OFFLINE:
            reason = "no such model in the cache, and HF_HUB_OFFLINE is set"
        else:
            HfApi().model_info(name, timeout=HUB_SECONDS, token=options.get("token"))
    except HFValidationError:
        raise FileNotFoundError(_nothing(name, what, "and it is no Hub name")) from None
    except GatedRepoError:
        pass  # loading it says how to get access
    except RepositoryNotFoundError:
        reason = "and the Hub has no model of this name that you may read"
    except Exception as error:  # of the HTTP client that huggingface_hub has, which is not always the same
        how = "answers with an error" if isinstance(error, HfHubHTTPError) else "cannot be reached"
        reason = f"no such model in the cache, and the Hub {how} ({type(error).__name__})"
    if not reason:
        _FOUND.add(known)
        yield
        return
    place = {key: options[key] for key in ("cache_dir", "revision") if options.get(key)}
    kept = (try_to_load_from_cache(name, file, **place) for file in ("config.json", "adapter_config.json"))
    if not any(isinstance(file, str) for file in kept):
        raise FileNotFoundError(_nothing(name, what, reason))
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def checkpoint_folder(source: str, what: str = DRAFTER) -> Path:
    """The folder at `source`, or the one that the Hub's model of this name is kept in, without its code.

    Raises:
        FileNotFoundError: nothing is there.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    with from_hub(source, what):
        return Path(snapshot_download(source, allow_patterns=list(CODE_FREE)))


def _nothing(name: str, what: str, reason: str) -> str:
    return (
        f"expected {what}; found '{name}': no such folder here, {reason}. Check the spelling, or name a folder "
        "that is here."
    )


def load_target(
    name_or_path: str | Path, dtype: torch.dtype | str = torch.bfloat16, **model_kwargs: Any
) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM and its tokenizer.

    Args:
        name_or_path: a Hub name (`org/name`), a folder written by `save_pretrained`, or a `.gguf` file.
        dtype: the dtype of the weights; "auto" keeps the checkpoint's own (fp32 for a GGUF file).
        model_kwargs: passed on to `AutoModelForCausalLM.from_pretrained`, e.g. `device_map`.

    Returns:
        (model, tokenizer), the model in eval mode. The weights of a GGUF file are unpacked into plain tensors.

    Raises:
        FileNotFoundError: nothing is there, neither here nor on the Hub.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        return load_gguf_target(path, dtype, **model_kwargs)
    if path.is_dir():
        name_or_path = path
    elif _looks_like_a_path(str(name_or_path)):
        raise FileNotFoundError(
            f"expected a Hub name (org/name), a model folder or a .gguf file as the target; found nothing at "
            f"'{name_or_path}'. Check the path, or write a Hub name without a leading './' or '/'."
        )
    with from_hub(name_or_path, TARGET, **model_kwargs):
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype, **model_kwargs)
        return model.eval(), AutoTokenizer.from_pretrained(name_or_path)


def load_gguf_target(
    file: Path, dtype: torch.dtype | str = torch.bfloat16, **model_kwargs: Any
) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM and its tokenizer from one GGUF file, its weights unpacked into plain tensors of `dtype`.

    Returns:
        (model, tokenizer), the model in eval mode. It can be saved, cast and trained like any other.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if not file.is_file():
        raise FileNotFoundError(f"expected a GGUF file; found none at '{file}'. Check the path.")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32 if dtype == "auto" else dtype,
        quantization_config=GgufConfig(dequantize=True),
        **{"attn_implementation": "sdpa", **model_kwargs},
    )
    _forget_quantization(model)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def check_drafter(name_or_path: str | Path) -> str | Path:
    """Make sure, by its config alone, that a drafter is there; returns what to load it by.

    Raises:
        FileNotFoundError: no drafter is there, neither here nor on the Hub.
        ValueError: something else is there.
        OSError: the Hub has a repository of this name, without a config.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir() or _looks_like_a_path(str(name_or_path)):
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"expected a drafter's folder (config.json and *.safetensors) at '{path}'; found no config.json. "
                f"Check the path, or train one with 'dspine train --target ...'."
            )
        name_or_path = path
    with from_hub(name_or_path):
        found = PreTrainedConfig.get_config_dict(name_or_path)[0].get("model_type")
    if found != DSpineConfig.model_type:
        raise ValueError(
            f"expected a DSpine drafter at '{name_or_path}' (model_type 'dspine'); found model_type {found!r}. Give a "
            "drafter's folder or Hub name, or convert the checkpoint first."
        )
    return name_or_path


def load_drafter(name_or_path: str | Path, target: PreTrainedModel, **model_kwargs: Any) -> PreTrainedModel:
    """Load a drafter in the target's dtype, onto the device of the target's output head, and check that they fit.

    Args:
        name_or_path: a folder or a Hub name. target: the model that it drafts for.
        model_kwargs: passed on to `AutoModel.from_pretrained`, e.g. `use_fused_kernels`.

    Raises:
        FileNotFoundError: no drafter is there, neither here nor on the Hub.
        ValueError: the drafter was made for a target of other shapes.
    """
    name_or_path = check_drafter(name_or_path)
    with from_hub(name_or_path, **model_kwargs):
        drafter = AutoModel.from_pretrained(name_or_path, dtype=target.dtype, **model_kwargs)
    drafter.check_target(target)
    return drafter.to(resident(target.get_output_embeddings(), "weight").device).eval()


def _forget_quantization(model: PreTrainedModel) -> None:
    """Take off the marks that the GGUF loader leaves on a model whose weights are plain tensors again.

    They would make `save_pretrained`, `float()` and `Trainer` refuse it.
    """
    for holder, names in ((model.config, ("quantization_config",)), (model, ("hf_quantizer", "quantization_method"))):
        for name in names:
            if hasattr(holder, name):
                delattr(holder, name)
    model.is_quantized = False


def _looks_like_a_path(name: str) -> bool:
    """Whether a string can only be meant as a path: a Hub name has at most one slash and does not start with one."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
