"""The package's torch operations: their namespace, of which a Hub build has its own, and the device they launch on."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

NAMESPACE = "dspine"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The full name of an operation of this build, as `torch.library` takes it."""
    return f"{NAMESPACE}::{op_name}"


def custom_op(op_name: str, **options: Any) -> Callable[[Callable], Any]:
    """As `torch.library.custom_op`, for an operation of this build: it runs on the device of its first tensor.

    Triton launches on the current device, whatever device the tensors are on.
    """

    def register(run: Callable) -> Any:
        @functools.wraps(run)
        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            tensor = _first_tensor((*args, *kwargs.values()))
            if tensor is None:
                return run(*args, **kwargs)
            backend = torch.xpu if tensor.device.type == "xpu" else torch.cuda
            with backend.device_of(tensor):  # changes nothing for other tensors than the backend's
                return run(*args, **kwargs)

        return torch.library.custom_op(add_op_namespace_prefix(op_name), **options)(on_its_device)

    return register


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    for value in values:
        found = _first_tensor(value) if isinstance(value, list | tuple) else value
        if isinstance(found, torch.Tensor):
            return found
    return None
