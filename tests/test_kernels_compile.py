"""Every kernel compiles for NVIDIA and AMD GPUs, without one: the interpreter also runs what no compiler accepts."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from dspine_hf import kernels
from dspine_hf.ops_dspine import Ops

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(bool(kernels.MISSING), reason=kernels.MISSING)

# Runs in a process of its own, where kernels are not made for the interpreter: every launch becomes a compilation.
COMPILE = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.bool: "*i1"}}
COUNTED = "ld.global.b16", "bulk.prefetch.L2", "griddepcontrol"
target, compiled = GPUTarget(*{target!r}), {{}}

def described(value, constexpr):
    "Signature, constant and attributes of one argument, as a launch would have them."
    if constexpr or value is None or value is True or value is False or (type(value) is int and value == 1):
        return "constexpr", value, []
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype], None, [["tt.divisibility", 16]]
    if isinstance(value, float):
        return "fp32", None, []
    return "i32", None, [["tt.divisibility", 16]] if value % 16 == 0 else []

def compile_instead(self, *args, grid, warmup, **options):
    named = dict(zip(self.arg_names, args)) | {{n: options.pop(n) for n in self.arg_names if n in options}}
    found = [described(named[p.name], p.is_constexpr) for p in self.params]
    signature = {{p.name: kind for p, (kind, _, _) in zip(self.params, found)}}
    constants = {{(i,): value for i, (kind, value, _) in enumerate(found) if kind == "constexpr"}}
    attributes = {{(i,): attrs for i, (_, _, attrs) in enumerate(found) if attrs}}
    kernel = triton.compile(ASTSource(self, signature, constants, attributes), target=target, options=options)
    compiled.setdefault(operation, []).append(
        [self.__name__, kernel.metadata.shared, *(kernel.asm.get("ptx", "").count(name) for name in COUNTED)]
    )

JITFunction.run = compile_instead
import dspine_kernels
from kernel_cases import Shape, arguments
torch.version.hip = "6.4" if target.backend == "hip" else None
for name in ("injection", "attention", "linear", "norms", "pairs", "tree"):
    module = getattr(dspine_kernels, name)
    module.early_launches = lambda device: target.backend == "cuda"
for operation in {operations!r}:
    for shape in (Shape(V=999), Shape(d=576, r=128, B=8, K=16, V=999, heads=9, kv_heads=3, head_dim=64, keys=70)):
        getattr(dspine_kernels, operation)(*arguments(operation, shape, torch.bfloat16, None, "cpu"))
operation = "verify_attention"
for shape in (Shape(nodes=63), Shape(heads=9, kv_heads=3, head_dim=64, keys=70, nodes=20)):
    for window in (0, 40):
        *args, tree = arguments(operation, shape, torch.bfloat16, None, "cpu")
        dspine_kernels.verify_attention(*args[:5], window=window, tree=tree)
operation = "trees"
for slots, K, R, nodes, dtype in ((15, 32, 32, 63, torch.bfloat16), (7, 4, 1, 20, torch.float32)):
    first, pairs = (torch.empty(*s, dtype=dtype) for s in ((2, K), (2, slots - 1, R, K)))
    tree = dspine_kernels.grow_tree(torch.empty(2, slots, K, dtype=torch.int64), first, pairs, nodes)
    dspine_kernels.follow_tree(*tree, torch.empty_like(tree[2]), slots)
operation = "linears"
for rows in (1, 16, 60):
    x, W, K = (torch.empty(*s, dtype=torch.bfloat16) for s in ((rows, 4096), (4096, 4096), (1024, 4096)))
    dspine_kernels.linears(x, [W, K, K])
    dspine_kernels.linears(x, [torch.empty(20000, 4096, dtype=torch.bfloat16)])
    dspine_kernels.gated_linear(x, W, W)
    x, W = (torch.empty(n, 576, dtype=torch.bfloat16) for n in (2 * rows, 576))
    dspine_kernels.linears(x, [W])
    dspine_kernels.gated_linear(x, W, W)
operation = "linears, others early too"
import torch._inductor.config
torch._inductor.config.triton.enable_pdl = True
dspine_kernels.linears(x, [W])
print(json.dumps(compiled))
"""


@pytest.mark.parametrize(
    ("target", "shared"),
    [
        pytest.param(("cuda", 90, 32), 227 * 1024, id="sm_90"),
        pytest.param(("hip", "gfx942", 64), 64 * 1024, id="gfx942"),
    ],
)
def test_every_kernel_compiles_and_fits_into_the_gpus_shared_memory(target, shared, tmp_path):
    operations = [op.name for op in fields(Ops)]
    paths = os.pathsep.join([str(ROOT / "kernels" / "torch-ext"), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    code = textwrap.dedent(COMPILE.format(target=target, operations=operations))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert list(compiled) == [*operations, "trees", "linears", "linears, others early too"]
    assert not [kernel for found in compiled.values() for kernel in found if kernel[1] > shared]
    assert not any(kernel[1] for kernel in compiled["trees"])  # one warp, which never waits for another
    # Weights are loaded 16 bytes at a time: what is loaded number by number is at most a norm's weight.
    if target[0] == "cuda":  # of five products with every number of rows the last two have small weights
        assert [kernel[3] > 0 for kernel in compiled["linears"]] == 3 * [False, False, False, True, True]
        assert all(kernel[4] == 2 for kernel in compiled["linears"])
    weighty = ("gated_injection", "pair_write", "pair_scores", "verify_attention", "linears")
    assert not [kernel for name in weighty for kernel in compiled[name] if kernel[2] > 4]
