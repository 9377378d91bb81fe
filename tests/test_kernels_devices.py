"""Every operation of the kernel package launches on the device of its tensors, whatever device is the current one."""

import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from dspine_hf import kernels

if not kernels.available("cpu"):
    pytest.skip(kernels.why_not("cpu"), allow_module_level=True)

from triton.runtime.interpreter import GridExecutor

ROOT = Path(__file__).resolve().parents[1]
FILES = {path.name: path.read_text() for path in (ROOT / "kernels" / "torch-ext" / "dspine_kernels").glob("*.py")}
NAMES = [name for text in FILES.values() for name in re.findall(r'@custom_op\(\s*"(\w+)"', text)]


def call(name, monkeypatch):
    """A call of the operation, and its first tensor."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from kernel_cases import TINY, arguments

    torch.manual_seed(0)
    if name in ("linears", "gated_linear"):
        x, gate, up = torch.randn(3, 48), torch.randn(20, 48), torch.randn(20, 48)
        return partial(getattr(kernels, name), x, *([[gate, up]] if name == "linears" else [gate, up])), x
    args = arguments(name, TINY, torch.float32, None, "cpu")
    if name == "move_columns":
        keys, values, *rest = args
        args = [[keys, values], kernels.addresses([keys, values]), *rest]
    first = args[0][0] if name == "move_columns" else args[0]
    return partial(getattr(kernels, name), *args), first


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_launches_under_the_device_of_its_first_tensor(name, monkeypatch):
    run, first = call(name, monkeypatch)
    entered, current, launches, execute = [], [], [], GridExecutor.__call__

    @contextmanager
    def device_of(tensor):
        entered.append(tensor.data_ptr())
        current.append(tensor)
        yield
        current.pop()

    def launch(*args, **options):
        launches.append(len(current))
        return execute(*args, **options)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    run()
    assert entered == [first.data_ptr()] and not current
    assert launches and all(launches)


def test_all_operations_are_made_in_one_place():
    assert {name for name, text in FILES.items() if "torch.library" in text} == {"_ops.py"}
    assert len(NAMES) == len(set(NAMES)) == 14


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_keeps_its_schema_and_its_fake(name, monkeypatch):
    run, _ = call(name, monkeypatch)
    operation, given = getattr(kernels._ops.ops, name), []

    class Asked(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is operation.default:
                given.append(args)
            return func(*args, **(kwargs or {}))

    with Asked():
        run()
    (args,) = given
    torch.library.opcheck(operation, args)
