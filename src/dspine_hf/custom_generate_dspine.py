"""generate() with a drafter as a `custom_generate` recipe, for whoever wants no class of Transformers patched.

Every checkpoint carries a copy as `custom_generate/generate.py`, where it stands alone: it imports nothing.
"""

from typing import Any


def generate(model: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
    """
    `model.generate(..., assistant_model=drafter, custom_generate="org/name", trust_remote_code=True)`.

    Args:
        model: the target.
        assistant_model: a DSpine drafter.
        kwargs: everything else that generate() takes.

    Raises:
        ValueError: no drafter, or an assistant of another kind.
    """
    if not hasattr(type(assistant_model), "dspine_generate"):
        found = "none" if assistant_model is None else type(assistant_model).__name__
        raise ValueError(
            f"expected assistant_model=<DSpine drafter>; found {found}. Load the drafter of this repository with "
            "AutoModel.from_pretrained(..., trust_remote_code=True) and pass it."
        )
    return assistant_model.dspine_generate(model, **kwargs)
