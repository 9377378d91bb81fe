"""A published drafter in fresh processes: with the package, without it, and with both; the drafts are the same."""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from dspine_hf import DSpineDraftModel, hub
from dspine_hf.remote_code import RECIPE, shipped_files
from helpers.hub_server import HubServer
from helpers.published import TARGET, tiny_published
from helpers.tiny_files import save_tiny_target

NAME = "someone/tiny-drafter"
SHARED = """
import json, sys, warnings
import torch

def without_package():
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "dspine_hf":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Absent())

def drafts(model, drafter, **options):
    "Every draft of one call of generate(), and what it returned."
    seen, original = [], type(drafter).draft_block
    def spy(self, *args, **kwargs):
        block = original(self, *args, **kwargs)
        seen.append([block.candidates.tolist(), block.unary.tolist(), block.transitions.pairs.flatten().tolist()])
        return block
    type(drafter).draft_block = spy
    ids = torch.tensor([[5, 9, 12, 7, 30]])
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                             assistant_model=drafter, **options)
    finally:
        type(drafter).draft_block = original
    return {"ids": out.tolist(), "drafts": seen, "stats": drafter.generation_stats.to_dict()}

def hooks():
    from transformers.generation.utils import GenerationMixin
    depths = []
    for name in ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator"):
        method, depth = getattr(GenerationMixin, name), 0
        while hasattr(method, "dspine_protocol"):
            method, depth = method.__wrapped__, depth + 1
        depths.append(depth)
    return depths
"""
WITH_PACKAGE = """
import dspine_hf
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
drafter = AutoModel.from_pretrained("{name}", dtype=model.dtype)
print(json.dumps(drafts(model, drafter) | {{"module": type(drafter).__module__, "hooks": hooks()}}))
"""
WITHOUT_PACKAGE = """
without_package()
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
drafter = AutoModel.from_pretrained("{name}", dtype=model.dtype, trust_remote_code=True)
found = drafts(model, drafter) | {{"module": type(drafter).__module__, "hooks": hooks()}}
from transformers.generation.utils import GenerationMixin
for name in ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator"):
    setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)
found["recipe"] = drafts(model, drafter, custom_generate="{name}", trust_remote_code=True)
found["unhooked"] = hooks()
try:
    model.generate(torch.tensor([[5, 9]]), max_new_tokens=2, custom_generate="{name}", trust_remote_code=True)
except ValueError as error:
    found["refusal"] = str(error)
drafter.save_pretrained("{home}/saved-again")
assert "dspine_hf" not in sys.modules
print(json.dumps(found))
"""
BOTH = """
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
remote = AutoModel.from_pretrained("{name}", dtype=model.dtype, trust_remote_code=True)
import dspine_hf
local = dspine_hf.DSpineDraftModel.from_pretrained("{name}", dtype=model.dtype)
found = {{"modules": [type(remote).__module__, type(local).__module__], "hooks": hooks()}}
found["remote"], found["local"] = drafts(model, remote), drafts(model, local)
print(json.dumps(found))
"""
NO_TRUST = """
without_package()
from transformers import AutoConfig, AutoModel
errors = []
for load in (AutoModel, AutoConfig):
    try:
        load.from_pretrained("{name}")
    except ValueError as error:
        errors.append(str(error))
code = [name for name in sys.modules if name.startswith("transformers_modules") or name.endswith("_dspine")]
print("\\n" + json.dumps({{"errors": errors, "code": code}}))
"""


@pytest.fixture(scope="module")
def server():
    server = HubServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_published(tmp_path_factory.mktemp("published") / "tiny")


@pytest.fixture(scope="module")
def runs(server, folder, tmp_path_factory):
    """What each process printed, by name; the drafter is published by a process too."""
    home = tmp_path_factory.mktemp("home")
    server.add_folder(TARGET, save_tiny_target(home / "target"))
    command = [sys.executable, "-m", "dspine_hf.cli", "push", str(folder), NAME]
    done = subprocess.run(command, env=environment(server, home / "push"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    scripts = {"with": WITH_PACKAGE, "without": WITHOUT_PACKAGE, "both": BOTH, "no trust": NO_TRUST}
    with ThreadPoolExecutor(2) as pool:
        jobs = {k: pool.submit(run, server, home / k.replace(" ", "-"), script) for k, script in scripts.items()}
        return {k: job.result() for k, job in jobs.items()} | {"home": home}


def environment(server, home):
    return {**os.environ, **server.environment(home), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def run(server, home, script):
    home.mkdir()
    text = SHARED + textwrap.dedent(script.format(target=TARGET, name=NAME, home=home))
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment(server, home),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """The drafts of the drafter in this process."""
    space: dict = {}
    exec(SHARED, space)
    target = AutoModelForCausalLM.from_pretrained(save_tiny_target(tmp_path_factory.mktemp("target")), dtype="auto")
    return space["drafts"](target, DSpineDraftModel.from_pretrained(folder, dtype=target.dtype))


def assert_same(found, wanted):
    """Tokens and figures are equal; scores up to the last bit, which hangs on where a file's weights lie in memory."""
    assert found["ids"] == wanted["ids"]
    assert found["stats"] == json.loads(json.dumps(wanted["stats"])) and len(wanted["drafts"]) > 3
    assert len(found["drafts"]) == len(wanted["drafts"])
    for ours, theirs in zip(found["drafts"], wanted["drafts"], strict=True):
        assert ours[0] == theirs[0]
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-5)


def test_drafts_are_identical_with_the_package(runs, expected):
    assert runs["with"]["module"] == "dspine_hf.modeling_dspine"
    assert_same(runs["with"], expected)


def test_drafts_are_identical_without_the_package(runs, expected):
    assert runs["without"]["module"].startswith("transformers_modules.")
    assert runs["without"]["hooks"] == [1, 1, 1]
    assert_same(runs["without"], expected)


def test_the_recipe_drafts_the_same_with_no_class_patched(runs, expected):
    assert_same(runs["without"]["recipe"], expected)
    assert runs["without"]["unhooked"] == [0, 0, 0]
    assert "expected assistant_model=<DSpine drafter>; found none" in runs["without"]["refusal"]


def test_both_present_share_one_hook(runs, expected):
    remote, local = runs["both"]["modules"]
    assert remote.startswith("transformers_modules.") and local == "dspine_hf.modeling_dspine"
    assert runs["both"]["hooks"] == [1, 1, 1]
    assert_same(runs["both"]["remote"], expected)
    assert_same(runs["both"]["local"], expected)


def test_without_trust_and_package_it_is_the_ordinary_error_and_no_code_runs(runs):
    errors = runs["no trust"]["errors"]
    assert len(errors) == 2 and all("trust_remote_code=True" in error for error in errors)
    assert runs["no trust"]["code"] == []


def test_remote_code_saves_itself_whole(runs, folder):
    """A drafter that was loaded as remote code and is saved again carries the same files."""
    again = runs["home"] / "without" / "saved-again"
    for name, path in shipped_files().items():
        assert (again / name).read_bytes() == path.read_bytes(), name
    assert json.loads((again / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_dspine.DSpineConfig",
        "AutoModel": "modeling_dspine.DSpineDraftModel",
    }
    assert (
        AutoModel.from_pretrained(again).config.to_diff_dict()
        == AutoModel.from_pretrained(folder).config.to_diff_dict()
    )


def test_a_saved_drafter_is_complete_on_its_own(folder):
    for name, path in shipped_files().items():
        assert (folder / name).read_bytes() == path.read_bytes(), name
    assert (folder / RECIPE).is_file()
    staged = hub.stage(folder, NAME).files
    assert json.loads((folder / "config.json").read_text()) == json.loads(staged["config.json"])


def test_a_field_that_this_version_does_not_know_is_kept_and_harmless(folder, tmp_path):
    """As in a checkpoint of a later version, and in one of an earlier version that lacks a field."""
    drafter = DSpineDraftModel.from_pretrained(folder)
    drafter.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["of_a_later_version"] = 3
    for name in ("rewrite_layers", "injection_placement", "context_window", "auto_map"):
        content.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(content))
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.config.of_a_later_version == 3
    assert (loaded.config.rewrite_layers, loaded.config.injection_placement) == (0, "layer")
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_pickled_weights_are_refused(folder, tmp_path):
    drafter = DSpineDraftModel.from_pretrained(folder)
    drafter.config.save_pretrained(tmp_path)
    torch.save(drafter.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModel.from_pretrained(tmp_path)
    for option in (False, None):
        with pytest.raises(ValueError, match="Pickled weights may run code"):
            DSpineDraftModel.from_pretrained(tmp_path, use_safetensors=option)
    with pytest.raises(ValueError, match="pickled"):
        hub.stage(tmp_path, NAME)
