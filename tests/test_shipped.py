"""The checkpoint of the embedded target, as users meet it: in the demo and in the README's snippet."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dspine_hf
from dspine_hf.cli import app
from dspine_hf.commands import demo
from dspine_hf.commands.common import Pair
from dspine_hf.embedded import embedded_drafter_folder
from dspine_hf.loading import load_drafter

README = Path(__file__).resolve().parents[1] / "README.md"


def test_demo_of_the_shipped_drafter_gives_identical_text_in_fewer_passes(embedded_target, monkeypatch):
    def load_pair(target, drafter, dtype, device):
        model, tokenizer = embedded_target
        return Pair(model, tokenizer, load_drafter(embedded_drafter_folder(), model), "target", "drafter")

    monkeypatch.setattr(demo, "load_pair", load_pair)
    arguments = ["demo", "--json", "--dtype", "float32", "--prompts", "2", "--max-new-tokens", "32"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["identical"] is True
    assert found["acceptance_length"] > 1.5


def test_readme_snippets_run_and_answer(embedded_target, monkeypatch, capsys):
    first, _, batch = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.setattr(dspine_hf, "load_embedded_target", lambda: embedded_target)
    monkeypatch.chdir(README.parent)
    monkeypatch.setattr(embedded_target[1], "padding_side", "right")
    names = {}
    for snippet in (first, batch):
        exec(compile(snippet, "README.md", "exec"), names)
    *text, acceptance_length = capsys.readouterr().out.strip().splitlines()
    assert "sky" in " ".join(text)
    assert float(acceptance_length) > 1.5
    assert len(names["out"]) == 2 and names["drafter"].generation_stats.accepted > 0


def test_shards_are_small_enough_to_be_kept_in_git():
    shards = list(embedded_drafter_folder().glob("*.safetensors"))
    assert shards and all(shard.stat().st_size <= 15_000_000 for shard in shards)


@pytest.mark.parametrize("name", ["config.json", "README.md"])
def test_checkpoint_is_a_hub_repository_that_names_no_folder_of_some_machine(name):
    text = (embedded_drafter_folder() / name).read_text()
    assert "site-packages" not in text and "/tmp/" not in text
