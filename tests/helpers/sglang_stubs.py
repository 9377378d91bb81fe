"""Stands in for third-party wheels that SGLang imports and that have no build without CUDA: torchvision, of which
nothing is used, and vLLM's rotary kernel, which is computed with torch.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

import torch

STUBBED = ("torchvision",)


class _AnyName(type):
    """A class of which every attribute is another such class."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__version__ = "0.28.0"


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox) -> None:
    """vLLM's operation, in place: positions [rows], query and key [rows, heads * head_size]."""
    assert is_neox
    cos, sin = (t.unsqueeze(1) for t in cos_sin_cache[positions].chunk(2, dim=-1))
    for rows in (query, key):
        first, second = rows.view(rows.shape[0], -1, head_size).chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        rows.copy_(turned.view(rows.shape))


def install() -> None:
    """Answer imports of the missing wheels; one that is installed is left alone."""
    missing = [name for name in STUBBED if importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Finder())
    if importlib.util.find_spec("vllm") is None:
        sys.modules["vllm"], ops = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
        ops.rotary_embedding = rotary_embedding
        sys.modules["vllm._custom_ops"] = ops
