"""DSpine speculative decoding for Hugging Face causal language models."""

from transformers import AutoConfig, AutoModel

from .configuration_dspine import DSpineConfig
from .embedded import load_embedded_target
from .modeling_dspine import DSpineDraftModel

AutoConfig.register("dspine", DSpineConfig, exist_ok=True)
AutoModel.register(DSpineConfig, DSpineDraftModel, exist_ok=True)

__all__ = ["DSpineConfig", "DSpineDraftModel", "load_embedded_target"]
