"""The recipe behind the figures for SmolLM2: its lists are valid, and it runs and resumes on a tiny target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspine_hf import DSpineConfig
from dspine_hf.baselines import BASELINES
from dspine_hf.lab import Variant
from dspine_hf.losses import LossWeights
from helpers.tiny_files import save_tiny_target, write_jsonl

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "recipes" / "smollm2-135m"
LISTS = sorted(path.stem for path in RECIPE.glob("*.json"))


@pytest.mark.parametrize("name", LISTS)
def test_every_variant_of_a_list_can_be_built(name):
    for fields in json.loads((RECIPE / f"{name}.json").read_text()):
        variant = Variant(**fields)
        assert variant.kind in ("dspine", *BASELINES)
        DSpineConfig(**{"hidden_size": 256, **variant.config})
        LossWeights(**variant.loss)


def test_variants_of_all_lists_have_names_of_their_own():
    names = [fields["name"] for name in LISTS for fields in json.loads((RECIPE / f"{name}.json").read_text())]
    assert len(set(names)) == len(names) > 20


def test_the_recipe_runs_and_goes_on_where_it_was(tmp_path):
    for split in ("train", "eval"):
        (tmp_path / "prompts" / split).mkdir(parents=True)
        write_jsonl(tmp_path / "prompts" / split / "some.jsonl", [{"turns": ["w1 w2"]}, {"turns": ["w9 w7 w3"]}])
    small = {"config": {"block_size": 4, "transfer_rank": 8}, "steps": 2, "sequences": 2, "anchors": 2}
    for name in ("final", "parts"):
        (tmp_path / f"{name}.json").write_text(json.dumps([{"name": name, **small}]))
    target = save_tiny_target(tmp_path / "target")
    environment = {**os.environ, "TINY": "1", "GPUS": "0 1", "LISTS": "final parts", "VARIANTS": str(tmp_path)}
    environment |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def run() -> str:
        command = ["bash", str(RECIPE / "run.sh"), str(target), str(tmp_path / "prompts"), str(tmp_path / "out")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        logs = "".join(path.read_text() for path in (tmp_path / "out").glob("*.log"))
        assert done.returncode == 0, done.stderr + logs
        return done.stdout

    assert sorted(line.split(":")[0] for line in run().splitlines() if line.startswith("==")) == [
        "== final",
        "== parts",
    ]
    results = tmp_path / "out" / "results"
    assert (results / "final" / "model.safetensors").exists()
    (results / "parts.json").unlink()
    (tmp_path / "out" / "gpu1.log").unlink()
    kept = (results / "final.json").stat().st_mtime_ns
    run()
    assert (results / "parts.json").exists()
    assert (results / "final.json").stat().st_mtime_ns == kept
