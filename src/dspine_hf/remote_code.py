"""The code that travels with a checkpoint, so that it loads with trust_remote_code=True without the package."""

import inspect
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .configuration_dspine import DSpineConfig
from .custom_generate_dspine import generate
from .modeling_dspine import DSpineDraftModel

AUTO_MAP = {
    "AutoConfig": f"configuration_dspine.{DSpineConfig.__name__}",
    "AutoModel": f"modeling_dspine.{DSpineDraftModel.__name__}",
}
RECIPE = "custom_generate/generate.py"


def shipped_files() -> dict[str, Path]:
    """Every code file of a checkpoint, by its path in the repository."""
    model = inspect.getfile(DSpineDraftModel)
    files = {Path(file).name: Path(file) for file in (model, *get_relative_import_files(model))}
    return {**dict(sorted(files.items())), RECIPE: Path(inspect.getfile(generate))}


def with_auto_map(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a drafter's config.json with the classes named that its own files define."""
    return {**config, "auto_map": dict(AUTO_MAP)}
