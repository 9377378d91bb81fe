"""DSpine speculative decoding for Hugging Face causal language models."""

from transformers import AutoConfig, AutoModel

from .configuration_dspine import DSpineConfig
from .decoding import generate
from .embedded import load_embedded_target
from .hub import push_drafter
from .modeling_dspine import DSpineDraftModel

AutoConfig.register("dspine", DSpineConfig, exist_ok=True)
AutoModel.register(DSpineConfig, DSpineDraftModel, exist_ok=True)
DSpineDraftModel.push_to_hub = push_drafter  # with card and results, which the files of a checkpoint know nothing of

__all__ = ["DSpineConfig", "DSpineDraftModel", "generate", "load_embedded_target"]
