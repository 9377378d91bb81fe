"""The serving benchmark compares engines by setting, and a run cut short keeps the rows that it measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "bench_serving.py"
# Answers depend on the engine and the temperature alone; a drafter of the name "broken" stops at its second setting.
ENGINE = """
import json, os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, temperature, max_tokens):
        self.temperature, self.max_tokens = temperature, max_tokens

class LLM:
    def __init__(self, model, speculative_config, max_num_seqs, **options):
        self.spec, self.drafts, self.calls, self.width = speculative_config, 0, 0, max_num_seqs
        print("asked:", speculative_config and speculative_config["draft_sample_method"], flush=True)

    def chat(self, chats, sampling, use_tqdm):
        assert len(chats) <= self.width
        self.calls += 1
        if self.spec and "broken" in self.spec["model"] and self.calls > 4:
            os._exit(3)
        self.drafts += len(chats)
        token = 7 if self.spec and sampling.temperature else 5
        answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token] * sampling.max_tokens)])
        return [answer for _ in chats]

    def get_metrics(self):
        if not self.spec:
            return []
        counts = {"drafts": self.drafts, "accepted_tokens": self.drafts * self.spec["num_speculative_tokens"]}
        return [SimpleNamespace(name=f"vllm:spec_decode_num_{k}", value=v) for k, v in counts.items()]
"""


@pytest.fixture
def bench(tmp_path):
    """Run the benchmark on an engine made for the test: three prompts, as drafters the given folders."""
    (tmp_path / "vllm.py").write_text(ENGINE)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(3)))

    def run(
        *drafters: str, dflash: str | None = None, temperatures=("0", "1"), more=()
    ) -> subprocess.CompletedProcess:
        for block, name in enumerate([*drafters, *([dflash] if dflash else [])], start=3):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen3", "block_size": block}))
        command = [sys.executable, str(EXAMPLE), "--target", "target", "--prompts", "prompts.jsonl"]
        command += ["--concurrency", "1", "2", "--max-tokens", "4", "--output", "serving.json"]
        command += ["--temperature", *temperatures, *(["--drafter", *drafters] if drafters else [])]
        command += [*(["--dflash", dflash] if dflash else []), *more]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250)

    return run


def test_every_engine_has_a_row_for_every_setting(bench, tmp_path):
    done = bench("first", "second", dflash="third")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "serving.json").read_text())
    settings = [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]
    for engine, accepted in (("plain", 1.0), ("dspine", 3.0), ("dspine1", 4.0), ("dflash", 5.0)):
        found = [row for row in rows if row["engine"] == engine]
        assert [(row["temperature"], row["concurrency"]) for row in found] == settings
        assert all(row["acceptance_length"] == accepted and row["tokens"] == 12 for row in found)
        assert [row.get("same_text") for row in found] == [1.0, 1.0, None, None]  # no promise above T = 0
        assert all(row["speed_up"] > 0 for row in found)
    assert len(done.stdout.split("\nengine ")[-1].splitlines()) == 1 + 4 * 4


def test_an_engine_that_dies_loses_neither_its_rows_nor_those_of_the_others(bench, tmp_path):
    done = bench("broken", dflash="third", temperatures=("0",))
    assert done.returncode != 0
    assert "these engines failed, see the log above: dspine" in done.stderr
    rows = json.loads((tmp_path / "serving.json").read_text())
    assert [(row["engine"], row["concurrency"]) for row in rows] == [
        ("plain", 1), ("plain", 2), ("dspine", 1), ("dflash", 1), ("dflash", 2)
    ]  # fmt: skip
    assert "dspine: {'engine': 'dspine'" in done.stdout


@pytest.mark.parametrize(
    ("more", "asked"), [((), "greedy"), (("--draft-sample-method", "probabilistic"), "probabilistic")]
)
def test_every_drafters_engine_is_asked_for_the_same_sample_method(bench, more, asked):
    done = bench("first", dflash="second", temperatures=("1",), more=more)
    assert done.returncode == 0, done.stderr
    found = [line.removeprefix("asked: ") for line in done.stdout.splitlines() if line.startswith("asked: ")]
    assert found == ["None", asked, asked]
