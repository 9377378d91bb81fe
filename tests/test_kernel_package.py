"""The kernel package: what it imports, how it is found, and its build for the Hub."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from dspine_hf import kernels, ops_dspine

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "kernels" / "torch-ext" / "dspine_kernels"
GENERAL = tomllib.loads((ROOT / "kernels" / "build.toml").read_text())["general"]
OPERATIONS = [field.name for field in fields(ops_dspine.Ops)]


def load(path: Path, name: str):
    """A package or module that is on no path."""
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(code: str, folder: Path, *path: Path, **environment: str):
    """What `code` printed as JSON, in a process of its own."""
    paths = os.pathsep.join(map(str, path))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def build():
    return load(ROOT / "kernels" / "build.py", "kernels_build").build


def test_the_package_imports_itself_torch_triton_and_the_standard_library_only():
    wrong = []
    for path in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                assert not isinstance(node, ast.ImportFrom) or node.level == 1, path
                continue
            known = {"torch", "triton", *sys.stdlib_module_names}
            wrong += [f"{path.name}: {name}" for name in names if name.partition(".")[0] not in known]
    assert not wrong


def test_every_fused_operation_stands_beside_an_eager_one_with_its_arguments():
    from inspect import signature

    for name in OPERATIONS:
        eager, fused = (list(signature(getattr(m, name)).parameters) for m in (ops_dspine, kernels))
        assert eager[: len(fused)] == fused, name


def test_without_triton_the_package_imports_and_says_why_nothing_can_run(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('no triton for this machine')")
    code = """
        import json, warnings
        import dspine_kernels as found
        print(json.dumps([found.available(), found.why_not("cuda"), hasattr(found, "topk")]))
    """
    able, reason, has = run(code, tmp_path, tmp_path, SOURCES.parent)
    assert not able and not has and "no triton for this machine" in reason


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"device": "mps"}, "not made for mps"),
        ({"dtype": torch.float64}, "float64"),
        ({"rank": 513}, "at most 512, not 513"),
        ({"candidates": 33}, "at most 32 candidates, not 33"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(shape, reason):
    if kernels.MISSING:
        pytest.skip(kernels.MISSING)
    assert reason in kernels.why_not(**{"device": "cuda", **shape})
    assert kernels.available("cuda")


def test_a_build_is_reproducible_and_holds_every_module_and_its_metadata(build, tmp_path):
    variants, again = build(tmp_path / "one"), build(tmp_path / "two")
    assert [v.name for v in variants] == [f"torch-{backend}" for backend in GENERAL["backends"]]
    for variant, other in zip(variants, again, strict=True):
        files = {path.name: path.read_bytes() for path in variant.iterdir()}
        assert files == {path.name: path.read_bytes() for path in other.iterdir()}
        assert files.keys() == {path.name for path in SOURCES.glob("*.py")} | {"metadata.json"}
        metadata = json.loads(files["metadata.json"])
        assert metadata["id"].isidentifier() and metadata["name"] == GENERAL["name"]
        assert metadata["backend"] == {"type": variant.name.removeprefix("torch-")}
        assert f'NAMESPACE = "{metadata["id"]}"'.encode() in files["_ops.py"]


def test_a_build_replaces_what_was_there(build, tmp_path):
    (first, *_) = build(tmp_path)
    (first / "stale.py").write_text("")
    build(tmp_path)
    assert not (first / "stale.py").exists()


def test_a_build_loads_beside_the_installed_package_and_computes_the_same(build, tmp_path):
    if not kernels.available("cpu"):
        pytest.skip(kernels.why_not("cpu"))
    variant = build(tmp_path)[GENERAL["backends"].index("cpu")]
    built = load(variant / "__init__.py", json.loads((variant / "metadata.json").read_text())["id"])
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    for package in (built, kernels):
        values, index = package.topk(x, 5)
        assert torch.equal(values, x.topk(5).values) and torch.equal(index, x.topk(5).indices)
    assert sys.modules[f"{built.__name__}._ops"].NAMESPACE != sys.modules[f"{kernels.__name__}._ops"].NAMESPACE


def test_the_kernels_library_loads_a_build_from_a_folder_and_by_its_name(build, tmp_path):
    library = pytest.importorskip("kernels")
    if not hasattr(library, "get_local_kernel"):
        pytest.skip("the kernels library is not installed")
    build(tmp_path)
    code = f"""
        import json, pathlib
        from kernels import get_kernel, get_local_kernel
        local = get_local_kernel(pathlib.Path({str(tmp_path)!r}))
        named = get_kernel({ops_dspine.KERNELS_REPOSITORY!r}, version={ops_dspine.KERNELS_VERSION})
        print(json.dumps([local.available("cpu"), named.available("cpu"), named.__name__]))
    """
    overrides = {"LOCAL_KERNELS": f"{ops_dspine.KERNELS_REPOSITORY}={tmp_path}"}
    local, named, name = run(code, tmp_path, **overrides)
    assert local and named and re.match(r"_dspine_kernels_(cpu|cuda)_", name)


def test_the_repository_and_version_that_are_looked_for_are_those_of_the_build():
    assert GENERAL["hub"]["repo-id"] == ops_dspine.KERNELS_REPOSITORY
    assert GENERAL["version"] == ops_dspine.KERNELS_VERSION
