"""The namespace of the package's torch operations. A Hub build has its own, so that two can live together."""

import torch

NAMESPACE = "dspine"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The full name of an operation of this build, as `torch.library` takes it."""
    return f"{NAMESPACE}::{op_name}"
