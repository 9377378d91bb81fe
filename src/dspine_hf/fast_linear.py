"""Compiled passes whose products of few rows are the kernel package's: weights with one input share a launch."""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from .ops_dspine import find_kernels

MAX_ROWS, MAX_NARROW_ROWS = 64, 128
NARROW = 2048  # every program reads all of x, which costs little where rows are so short
MAX_WEIGHTS = 3
LINEARS = {F.linear, torch._C._nn.linear}
SILUS = {F.silu, torch._C._nn.silu}
IN_PLACE = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul}


def few_rows(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """The backend of torch.compile that puts the kernels into a graph, then compiles it with inductor."""
    from torch._dynamo.backends.registry import lookup_backend  # slow to import

    return lookup_backend("inductor")(rewritten(graph), inputs)


def rewritten(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """
    The graph with every product of few rows as one of the kernel package's, in place.

    Only products without a bias, of 16-bit numbers and dense weights change, none of which is written to later. What a
    SwiGLU does with two of them becomes one operation; up to three others of one input become one.
    """
    kernels, _ = find_kernels()
    if kernels is None:
        return module
    graph = module.graph
    written = {_storage(node.args[0]) for node in graph.nodes if _writes(node)}
    for node in list(graph.nodes):
        _merge_gated(graph, node, kernels, written)
    groups: dict[Any, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if _is_product(node, written):
            groups.setdefault(node.args[0], []).append(node)
    for found in groups.values():
        for start in range(0, len(found), MAX_WEIGHTS):
            _merge(graph, found[start : start + MAX_WEIGHTS], kernels)
    graph.lint()
    module.recompile()
    return module


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None


def _writes(node: torch.fx.Node) -> bool:
    """Whether a node changes its first argument in place."""
    if not node.args or node.op not in ("call_function", "call_method"):
        return False
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))
    return in_place or node.target in IN_PLACE


def _storage(node: Any) -> Any:
    """What tells whether two tensors of a graph are views of the same memory."""
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _is_product(node: torch.fx.Node, written: set[Any]) -> bool:
    """Whether a node is a product that the kernels take."""
    if node.op != "call_function" or node.target not in LINEARS or node.kwargs.get("bias") is not None:
        return False
    if len(node.args) < 2 or any(argument is not None for argument in node.args[2:]):
        return False
    x, weight = (_value(argument) for argument in node.args[:2])
    if any(_storage(argument) in written for argument in node.args[:2]):
        return False  # another product of it, at another place, would be one of other numbers
    if x is None or weight is None or node.args[1].op not in ("placeholder", "get_attr"):
        return False
    fits = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
    rows, most = x.numel() // x.shape[-1], MAX_NARROW_ROWS if x.shape[-1] <= NARROW else MAX_ROWS
    return fits and x.device == weight.device and 0 < rows <= most and _run_on(x.device.type)


@cache
def _run_on(device: str) -> bool:
    kernels, _ = find_kernels()
    return kernels is not None and kernels.available(device)


def _merge_gated(graph: torch.fx.Graph, node: torch.fx.Node, kernels: Any, written: set[Any]) -> None:
    """silu(x G^T) * (x U^T) as one operation, where `node` is that product and nothing else reads its parts."""
    if node.op != "call_function" or node.target not in (operator.mul, torch.mul) or len(node.args) != 2:
        return
    for silu, up in (node.args, node.args[::-1]):
        if not isinstance(silu, torch.fx.Node) or not isinstance(up, torch.fx.Node) or silu.target not in SILUS:
            continue
        if not silu.args:
            continue
        gate = silu.args[0]
        both = isinstance(gate, torch.fx.Node) and _is_product(gate, written) and _is_product(up, written)
        if not both or gate.args[0] is not up.args[0] or any(len(part.users) > 1 for part in (silu, gate, up)):
            continue
        if _value(gate.args[1]).shape == _value(up.args[1]).shape:
            with graph.inserting_before(node):
                merged = graph.call_function(kernels.gated_linear, (gate.args[0], gate.args[1], up.args[1]))
            merged.meta = dict(node.meta)
            node.replace_all_uses_with(merged)
            for part in (node, silu, gate, up):
                graph.erase_node(part)
            return


def _merge(graph: torch.fx.Graph, products: list[torch.fx.Node], kernels: Any) -> None:
    """Products of one input as one operation, where the first of them is."""
    with graph.inserting_before(products[0]):
        merged = graph.call_function(kernels.linears, (products[0].args[0], [node.args[1] for node in products]))
        merged.meta["example_value"] = [_value(node) for node in products]
        parts = [graph.call_function(operator.getitem, (merged, i)) for i in range(len(products))]
    for node, part in zip(products, parts, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
