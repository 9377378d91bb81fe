"""The project as a whole: what the wheel holds, what the README lists, what the tree must not contain."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "src" / "dspine_hf"
KERNELS = ROOT / "kernels" / "torch-ext" / "dspine_kernels"


def project_files():
    """Every file that belongs to the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_files():
    for path in project_files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    """The names inside a wheel built from a copy of the project's files."""
    folder = tmp_path_factory.mktemp("build")
    for path in project_files():
        if path.relative_to(ROOT).parts[0] != "tests":
            copy = folder / "source" / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, folder / "source"], check=True)
    (wheel,) = folder.glob("dspine_hf-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_of_the_package_and_the_kernels(wheel_names):
    expected = {f"dspine_hf/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    expected |= {f"dspine_hf/kernels/{path.relative_to(KERNELS)}" for path in KERNELS.rglob("*.py")}
    modules = {name for name in wheel_names if name.endswith(".py")}
    assert modules == expected
    assert "dspine_hf/py.typed" in wheel_names
    assert "dspine_hf/model_cards/template.md" in wheel_names


def test_wheel_carries_no_weights(wheel_names):
    assert not [name for name in wheel_names if name.endswith((".safetensors", ".json"))]


def test_wheel_carries_the_licence_and_the_command(wheel_names):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel_names)
    assert PYPROJECT["project"]["scripts"] == {"dspine": "dspine_hf.cli:main"}


def test_kernels_folder_does_not_shadow_the_kernels_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_file_names_a_folder_of_some_machine():
    pattern = re.compile(r"/(?:home|root|work|Users)/\w")
    found = [f"{path.relative_to(ROOT)}: {m.group()}" for path, text in text_files() for m in pattern.finditer(text)]
    assert not found


def test_no_file_names_a_package_index():
    pattern = re.compile(r"--(?:extra-)?index-url|--find-links|pypi\.org/simple|files\.pythonhosted")
    found = [path for path, text in text_files() if path != Path(__file__).resolve() and pattern.search(text)]
    assert not found


def test_versions_of_transformers_are_told_apart_in_compat_only():
    found = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if path.name != "compat_dspine.py"
        and re.search(r"transformers\.__version__|is_transformers_version|version\(.transformers", path.read_text())
    ]
    assert not found


def test_every_module_opens_with_a_sentence_that_says_what_it_is():
    missing = []
    for folder in ("src", "tests", "kernels", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            if len(docstring.split("\n")[0].split()) < 3:
                missing.append(str(path.relative_to(ROOT)))
    assert not missing


def test_files_stay_under_400_lines():
    sources = [path for path in project_files() if path.suffix == ".py"]
    long = {str(path.relative_to(ROOT)): n for path in sources if (n := len(path.read_text().splitlines())) >= 400}
    assert not long


def test_files_shipped_with_checkpoints_import_only_their_flat_neighbours():
    """Remote code is copied file by file: only `from .x_dspine import ...` is followed."""
    wrong = []
    for path in PACKAGE.glob("*_dspine.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wrong += [f"{path.name}: import {a.name}" for a in node.names if a.name.startswith("dspine_hf")]
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                flat = node.level == 1 and module.endswith("_dspine") and "." not in module
                if (node.level and not flat) or module.startswith("dspine_hf"):
                    wrong.append(f"{path.name}: from {'.' * node.level}{module}")
    assert not wrong


def test_readme_tree_lists_every_module_of_the_package():
    readme = (ROOT / "README.md").read_text()
    modules = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert not [name for name in modules if not re.search(rf"\b{re.escape(name)}\b", readme)]


def test_python_files_that_the_readme_tree_names_exist():
    named = re.findall(r"[\w/]+\.py\b", (ROOT / "README.md").read_text())
    existing = {path.name for path in project_files()}
    assert named and not [name for name in named if name.rsplit("/", 1)[-1] not in existing]


def test_ci_tests_the_oldest_and_the_newest_supported_transformers():
    """The oldest version is read from pyproject.toml, which must say it in the form that the script looks for."""
    (requirement,) = [d for d in PYPROJECT["project"]["dependencies"] if d.startswith("transformers")]
    assert re.fullmatch(r"transformers>=[0-9.]+,<[0-9.]+", requirement)
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "git must keep .ci/run executable"
    lines = script.read_text().splitlines()
    assert "make test" in lines and 'make test TRANSFORMERS="$oldest.0"' in lines
    assert "set -euo pipefail" in lines


def test_every_document_that_is_named_is_in_the_project():
    files = list(project_files())
    named = {name for path, text in text_files() for name in re.findall(r"\b[A-Z][A-Z_]+\.md\b", text)}
    assert "README.md" in named and named <= {path.name for path in files}
