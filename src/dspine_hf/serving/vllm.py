"""The vLLM plug-in (entry point `vllm.general_plugins`): registers the drafter's architecture, or says why not.

The engine runs it in each of its processes. Its drafting method is "dflash", unchanged; the model class is ours.
"""

from .signatures import VLLM, fits

MODEL = "dspine_hf.serving.vllm_model:DSpineForCausalLM"
# The name in config.json, and what vLLM makes of it for method "dflash".
ARCHITECTURES = ("DSpineDraftModel", "DFlashDSpineDraftModel")


def register() -> bool:
    """Register DSpine with vLLM's model registry; False, with a warning, if this vLLM is not one we know."""
    if not fits(VLLM, "vLLM"):
        return False
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, MODEL)
    return True
