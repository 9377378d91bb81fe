"""The kernel benchmark goes through all of its steps in small; what it times there means nothing."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from dspine_hf import kernels
from dspine_hf.ops_dspine import EAGER, FusedOps, Ops, fused_ops

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytestmark = pytest.mark.skipif(not kernels.available("cpu"), reason=kernels.why_not("cpu"))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, EXAMPLES / "bench_kernels.py", "--tiny", "--no-compile", "--out", "kernels.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "kernels.json").read_text()) | {"printed": done.stdout}


def test_every_operation_is_checked_in_every_dtype_and_passes(found):
    checked = {(corner["operation"], corner["dtype"]) for corner in found["checks"]}
    assert {op for op, _ in checked} == {op.name for op in fields(FusedOps)} - {"addresses"}
    assert len(checked) == 3 * (len(fields(FusedOps)) - 1)
    assert not [corner for corner in found["checks"] if not corner["passed"]]


def test_every_operation_is_timed_against_its_floor(found):
    names = {row["operation"] for row in found["operations"]}
    assert names == {op.name for op in fields(FusedOps)} - {"addresses", "move_columns"}
    for row in found["operations"]:
        assert row["eager"] > 0 and row["fused"] > 0 and row["bytes"] > 0
        assert row["floor"] == pytest.approx(row["bytes"] / found["bandwidth"] * 1e6)


def test_whole_passes_of_both_placements_and_of_dflash_are_timed_eager_and_fused(found):
    passes = {(row["drafter"], row["m"], row["way"]) for row in found["passes"]}
    assert len(passes) == 14 and {m for drafter, m, _ in passes if drafter == "DSpine mlp"} == {0, 1, 4}
    assert {"DFlash", "DSpine layer", "DSpine mlp"} == {drafter for drafter, _, _ in passes}
    assert all(row["over DFlash"] == 1.0 for row in found["passes"] if row["drafter"] == "DFlash")


def test_every_variant_of_the_injection_is_as_exact(found):
    assert len({row["variant"] for row in found["variants"]}) >= 4
    assert all(row["fused"] > 0 and row["error"] < 1e-5 for row in found["variants"])


def test_margins_around_inputs_that_a_kernel_writes_or_reads_are_noticed(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import bench_kernels

    def careless(logits, k):
        whole = logits.as_strided((logits.numel() + 1,), (1,))
        whole[-1] = 0.0
        return EAGER.topk(logits, k)

    ops = [replace(EAGER, topk=careless), EAGER]
    errors = [bench_kernels.check("topk", o, bench_kernels.TINY, torch.float32, "cpu", guard=True) for o in ops]
    assert errors == [float("inf"), 0.0]


def test_trees_that_are_not_the_likeliest_and_columns_that_stay_are_noticed(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import bench_kernels

    fused = fused_ops("cpu", torch.float32, 6, 4)
    shape = replace(bench_kernels.TINY, B=6, nodes=9, batch=2)

    def another(candidates, first, pairs, nodes):  # a tree of other paths
        return fused.grow_tree(candidates, -first, pairs, nodes)

    def mixed(*args):  # the parents of another batch row
        tokens, parent, *rest = fused.grow_tree(*args)
        return tokens, parent.flip(0), *rest

    wrong = {
        "grow_tree": [another, mixed],
        "follow_tree": [lambda *args: fused.follow_tree(*args[:4], args[4].roll(1, 0), args[5])],
        "move_columns": [lambda *args: None],
    }
    for op, versions in wrong.items():
        assert bench_kernels.check(op, fused, shape, torch.float32, "cpu", guard=True) <= 1e-5
        for version in versions:
            error = bench_kernels.check(op, replace(fused, **{op: version}), shape, torch.float32, "cpu")
            assert not error <= 1e-2, op


def test_what_is_printed_names_the_operations(found):
    assert all(op.name in found["printed"] for op in fields(Ops))


def test_products_of_few_rows_are_timed_with_every_tile_and_are_exact(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, EXAMPLES / "bench_products.py", "--tiny", "--rows", "3", "--out", "products.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "products.json").read_text())["products"]
    assert {row["product"] for row in rows} == {"q, k, v", "gate, up"}
    assert len(rows) == 2 * 9  # torch, and the kernel by eight tiles
    assert all(row["time"] > 0 and row["error"] < 2e-2 for row in rows)
