"""The SGLang plug-in (entry point `sglang.srt.plugins`): registers the drafter's architecture, or says why not.

SGLang runs it in each of its processes. The worker is SGLang's own (DFLASH, with its candidate selector).
"""

from typing import Any

from .signatures import SGLANG, fits

MODELS = "dspine_hf.serving.sglang_models"
WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.__init__"


def register() -> bool:
    """Register DSpine with SGLang's model registry; False, with a warning, if this SGLang is not one we know."""
    if not fits(SGLANG, "SGLang"):
        return False
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ModelRegistry.register(MODELS, overwrite=True, strict=True)
    HookRegistry.register(WORKER, attach_target, HookType.AFTER)
    return True


def attach_target(result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """After the worker is made: give a DSpine drafter its target's head, which its first pass needs."""
    attach = getattr(worker.draft_model, "attach_target", None)
    if attach is not None:
        attach(worker.model_runner.model)
