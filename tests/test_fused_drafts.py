"""A drafter with use_fused_kernels drafts what it drafts without, or says once why it runs the eager operations."""

import collections
import copy
import json
import os
import shutil
import subprocess
import sys
import textwrap
import types
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

import drafter_cases as cases
from dspine_hf import kernels, modeling_dspine, ops_dspine
from dspine_hf.remote_code import shipped_files

SOURCES = Path(__file__).resolve().parents[1] / "kernels" / "torch-ext"
interpreted = pytest.mark.skipif(not kernels.available("cpu"), reason=kernels.why_not("cpu"))


@pytest.fixture(autouse=True)
def nothing_chosen_yet(monkeypatch):
    monkeypatch.setattr(ops_dspine, "_CHOSEN", {})


@pytest.fixture
def ran(monkeypatch):
    """How often each fused operation ran."""
    counts, chosen = collections.Counter(), modeling_dspine.fused_ops

    def counted(name, operation):
        def call(*args, **kwargs):
            counts[name] += 1
            return operation(*args, **kwargs)

        return call

    def counting(*args):
        ops = chosen(*args)
        return type(ops)(**{f.name: counted(f.name, getattr(ops, f.name)) for f in fields(ops)})

    monkeypatch.setattr(modeling_dspine, "fused_ops", counting)
    return counts


def draft(drafter, target, fused, batch=1, dtype=torch.float32, noise=None):
    drafter = copy.deepcopy(drafter).to(dtype)
    drafter.config.use_fused_kernels = fused
    context, positions = cases.random_context(7, drafter.config)
    cache = drafter.new_cache()
    drafter.extend_context(cache, context.expand(batch, -1, -1), torch.tensor([positions] * batch))
    anchors = torch.arange(3, 3 + batch)
    return drafter.draft_block(drafter.bind_target(target), cache, anchors, torch.full((batch,), 7), noise=noise)


def same_drafts(found, expected, tolerance):
    assert torch.equal(found.candidates, expected.candidates)
    torch.testing.assert_close(found.unary, expected.unary, **tolerance)
    assert (found.transitions is None) == (expected.transitions is None)
    if found.transitions is not None:
        torch.testing.assert_close(found.transitions.first, expected.transitions.first, **tolerance)
        torch.testing.assert_close(found.transitions.pairs, expected.transitions.pairs, **tolerance)


FP32 = {"rtol": 2e-5, "atol": 2e-5}


@interpreted
@pytest.mark.parametrize("sampled", [20, 50])
def test_a_sampled_block_is_the_same_and_warns_of_nothing(sampled, recwarn, ran):
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target)
    noise = torch.empty(2, drafter.config.num_draft_slots, sampled).exponential_()
    expected, found = (draft(drafter, target, fused, 2, noise=noise) for fused in (False, True))
    same_drafts(found, expected, FP32)
    assert torch.equal(found.transitions.rows, expected.transitions.rows)
    assert bool(ran["topk"]) == bool(ran["pair_scores"]) == (sampled <= 32) and ran["pair_write"]
    assert not [w for w in recwarn if "use_fused_kernels" in str(w.message)]


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="as it comes"),
        pytest.param({"injection_placement": "mlp", "rewrite_layers": 0}, id="before the MLP"),
        pytest.param({"injection_placement": "layer", "rewrite_layers": 1}, id="the last two layers again"),
        pytest.param({"injection_placement": "mlp", "rewrite_layers": 2}, id="all layers again, before the MLP"),
        pytest.param(
            {"injection_placement": "mlp", "rewrite_layers": 2, "chain_passes": 2}, id="a chain before pairs"
        ),
        pytest.param({"injection": "last", "block_size": 2}, id="one write, one slot"),
        pytest.param({"selection": "independent"}, id="slots on their own"),
        pytest.param({"injection": "none", "selection": "independent"}, id="DFlash"),
        pytest.param({"logit_scale": 0.5, "logit_softcap": 2.0}, id="scaled and capped scores"),
        pytest.param({"logit_scale": -1.0}, id="turned scores"),
        pytest.param({"transfer_rank": 24, "num_candidates": 7, "block_size": 9}, id="wider"),
    ],
)
def test_fused_drafts_are_the_eager_ones(options, ran):
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, **options)
    config = drafter.config
    expected = draft(drafter, target, fused=False, batch=2)
    assert not ran
    same_drafts(draft(drafter, target, fused=True, batch=2), expected, FP32)
    conditioned = config.selection == "transition" and config.block_size > 2
    layers, chains, again = config.num_hidden_layers, config.chain_passes, config.rewrite_layers
    runs = 1 + chains if conditioned else 0  # of the rewritten layers
    writes = again + (config.injection_placement == "mlp")  # which feed_forward follows or precedes
    wanted = {
        "rms_norm": 2 * layers + 1 + chains + runs * (again + writes),
        "rotated_heads": 2 * layers + runs * again + chains * again,
        "swiglu": layers + runs * writes,
        "gated_injection": sum(config.injects(layer) for layer in range(layers)),
        "topk": 1 + chains,
        "pair_write": (1 + again) * runs,
        "pair_scores": int(conditioned),
    }
    assert {name: count for name, count in ran.items() if count} == {n: c for n, c in wanted.items() if c}


@interpreted
def test_a_bias_of_the_head_is_in_the_fused_scores():
    target = cases.tiny_target()
    head = target.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.randn(cases.VOCABULARY, generator=torch.Generator().manual_seed(3)) * 4)
    drafter = cases.tiny_drafter(target)
    expected = draft(drafter, target, fused=False)
    same_drafts(draft(drafter, target, fused=True), expected, FP32)
    head.bias = None
    assert not torch.equal(draft(drafter, target, fused=True).candidates, expected.candidates)


@interpreted
def test_fused_rows_given_any_predecessor_are_the_eager_ones():
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, injection_placement="mlp", rewrite_layers=1)
    expected, found = (draft(drafter, target, fused=fused) for fused in (False, True))
    for block in (expected, found):
        block._drafter.config.use_fused_kernels = block is found
    with torch.no_grad():
        for slot in (1, 3):
            rows = [block.row(slot, torch.tensor([17])) for block in (expected, found)]
            torch.testing.assert_close(*rows, **FP32)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_scores_in_half_precision_are_as_near_to_fp32_as_eager_ones(dtype):
    """Both round; the fused sums round less often, the interpreter's bf16 rounds by cutting off."""
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, rewrite_layers=1).to(dtype)
    exact = draft(drafter.float(), target, fused=False)
    half = copy.deepcopy(target).to(dtype)
    distance = {}
    for fused in (False, True):
        found = draft(drafter, half, fused=fused, dtype=dtype)
        view = found.unary.sort(-1).values - exact.unary.sort(-1).values
        distance[fused] = float(view.norm() / exact.unary.norm())
    assert distance[True] < 2.5 * distance[False] + 1e-3


@interpreted
def test_training_is_eager_and_a_gradient_reaches_every_weight(ran):
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, use_fused_kernels=True).requires_grad_(True)
    view, cache = drafter.bind_target(target), drafter.new_cache()
    embeds = drafter.block_embeds(view, torch.tensor([[3]]), 4)
    out = drafter(embeds, view.phi(torch.tensor([[3]])), torch.arange(5).view(1, 1, 5), cache)
    out.hidden.square().sum().backward()
    assert not ran
    assert all(layer.injection.P.weight.grad is not None for layer in drafter.layers)


@interpreted
def test_forced_messages_are_eager(ran):
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, use_fused_kernels=True)
    view, forced = drafter.bind_target(target), torch.zeros(1, 1, 4, 6)
    with torch.no_grad():
        embeds = drafter.block_embeds(view, torch.tensor([[3]]), 4)
        drafter(
            embeds, view.phi(torch.tensor([[3]])), torch.arange(5).view(1, 1, 5), drafter.new_cache(), None, forced
        )
    assert not ran["gated_injection"]


@interpreted
def test_a_transfer_space_too_wide_for_the_kernels_falls_back_with_one_warning():
    with pytest.warns(UserWarning, match="at most 512, not 600; the eager operations run") as seen:
        for _ in range(3):
            assert ops_dspine.fused_ops("cpu", torch.float32, 600, 16) is ops_dspine.EAGER
    assert len(seen) == 1


def test_the_switch_is_a_config_override_and_travels_with_the_checkpoint(tmp_path):
    drafter = cases.tiny_drafter(cases.tiny_target())
    drafter.save_pretrained(tmp_path / "a")
    loaded = AutoModel.from_pretrained(tmp_path / "a", use_fused_kernels=True)
    assert loaded.config.use_fused_kernels and not drafter.config.use_fused_kernels
    loaded.save_pretrained(tmp_path / "b")
    assert AutoModel.from_pretrained(tmp_path / "b").config.use_fused_kernels


def test_a_drafter_that_used_the_kernels_can_be_copied_and_saved(tmp_path):
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, use_fused_kernels=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draft(drafter, target, fused=True)
    copy.deepcopy(drafter).save_pretrained(tmp_path)


# ---- where the kernels are found, each in a process of its own ---------------------------------------------------

REMOTE = """
import importlib, json, sys, warnings
import torch

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
ops = importlib.import_module("shipped.ops_dspine")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        chosen = ops.fused_ops("cpu", torch.float32, 6, 4)
print(json.dumps([chosen is ops.EAGER, chosen.topk.__module__, [str(w.message) for w in seen]]))
"""


def remote(tmp_path, *path, absent, interpret="1", **variables):
    """What remote code finds: whether it runs eager operations, whose top-K it takes, and its warnings."""
    (tmp_path / "shipped").mkdir()
    for name, file in shipped_files().items():
        if "/" not in name:
            (tmp_path / "shipped" / name).write_text(Path(file).read_text())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *path))),
        "TRITON_INTERPRET": interpret,
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, "-c", textwrap.dedent(REMOTE.format(absent=set(absent)))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@interpreted
def test_remote_code_without_the_wheel_finds_an_installed_kernel_package(tmp_path):
    eager, module, seen = remote(tmp_path, SOURCES, absent=["dspine_hf", "kernels"])
    assert not eager and module == "dspine_kernels.topk" and not seen


@interpreted
def test_remote_code_without_the_wheel_finds_a_build_by_the_kernels_library(tmp_path):
    pytest.importorskip("kernels")
    subprocess.run([sys.executable, str(SOURCES.parent / "build.py"), tmp_path / "hub"], check=True)
    local = f"{ops_dspine.KERNELS_REPOSITORY}={tmp_path / 'hub'}"
    eager, module, seen = remote(tmp_path, absent=["dspine_hf", "dspine_kernels"], LOCAL_KERNELS=local)
    assert not eager and not seen
    assert module.startswith("_dspine_kernels_") and module.endswith(".topk")


def test_remote_code_that_finds_no_kernels_warns_once_and_is_eager(tmp_path):
    eager, module, seen = remote(tmp_path, absent=["dspine_hf", "kernels"])
    assert eager and module == "shipped.ops_dspine"
    (message,) = seen
    assert "neither dspine_hf.kernels nor dspine_kernels is installed, nor the kernels library" in message


def test_on_the_cpu_the_eager_operations_run_after_one_warning(tmp_path):
    eager, _, seen = remote(tmp_path, SOURCES, absent=["dspine_hf", "kernels"], interpret="0")
    assert eager and len(seen) == 1
    assert "the tensors are on the CPU" in seen[0] or "triton cannot be imported" in seen[0]


@interpreted
@pytest.mark.parametrize("absent", [field.name for field in fields(ops_dspine.FusedOps)])
def test_an_older_kernel_package_is_named_and_the_eager_operations_run(absent, monkeypatch):
    older = types.ModuleType("an_older_package")
    vars(older).update({name: value for name, value in vars(kernels).items() if name not in (absent, "__name__")})
    monkeypatch.setattr(ops_dspine, "find_kernels", lambda: (older, ""))
    with pytest.warns(UserWarning) as seen:
        for _ in range(2):
            assert ops_dspine.fused_ops("cpu", torch.float32, 6, 4) is ops_dspine.EAGER
    (warning,) = seen
    message = f"kernel package an_older_package is too old, it lacks {absent} (update it); the eager operations run"
    assert message in str(warning.message)


@interpreted
def test_remote_code_with_an_older_kernel_package_warns_once_and_is_eager(tmp_path):
    package = tmp_path / "old" / "dspine_kernels"
    shutil.copytree(SOURCES / "dspine_kernels", package)
    entry = package / "__init__.py"
    entry.write_text(entry.read_text() + "\ndel rms_norm, move_columns\n")
    eager, _, seen = remote(tmp_path, package.parent, absent=["dspine_hf", "kernels"])
    (message,) = seen
    assert eager and "dspine_kernels is too old, it lacks rms_norm, move_columns (update it)" in message


def test_without_triton_the_eager_operations_run_after_one_warning(tmp_path):
    eager, _, seen = remote(tmp_path, SOURCES, absent=["dspine_hf", "kernels", "triton"])
    assert eager and len(seen) == 1 and "triton cannot be imported" in seen[0]
