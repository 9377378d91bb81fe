"""Stands in for the third-party wheels that SGLang imports and that have no build without CUDA: here torchvision."""

import importlib.abc
import importlib.machinery
import sys
import types

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


def install() -> None:
    """Answer imports of the missing wheels; one that is installed is left alone."""
    missing = [name for name in STUBBED if importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Finder())
