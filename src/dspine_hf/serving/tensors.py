"""Strict loading: the tensors that an engine reads are exactly those of the drafter, or loading stops."""

from collections.abc import Iterable

import torch

from ..configuration_dspine import DSpineConfig
from ..modeling_dspine import DSpineDraftModel


def drafter_tensors(config: DSpineConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name, once names and shapes are those that its config says.

    Raises:
        ValueError: a tensor is missing, superfluous, there twice, or of another shape.
    """
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in DSpineDraftModel(config).state_dict().items()}
    found: dict[str, torch.Tensor] = {}
    twice = []
    for name, tensor in tensors:
        if name in found:
            twice.append(name)
        found[name] = tensor
    wrong = sorted(name for name in wanted.keys() & found.keys() if tuple(found[name].shape) != wanted[name])
    for kind, names in (
        ("missing", sorted(wanted.keys() - found.keys())),
        ("superfluous", sorted(found.keys() - wanted.keys())),
        ("there twice", sorted(twice)),
        ("of another shape than config.json says", wrong),
    ):
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"expected exactly the {len(wanted)} tensors of this drafter; {len(names)} are {kind}: {shown}. "
                "Save the drafter again, or export the folder again with 'dspine export'."
            )
    return found
