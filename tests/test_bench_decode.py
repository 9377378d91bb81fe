"""The benchmark of whole decoding runs in small and writes every figure that it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from dspine_hf.embedded import load_embedded_target

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "bench_decode.py"


def test_the_tiny_benchmark_writes_ratios_pass_costs_and_the_floor(tmp_path):
    out = tmp_path / "decode.json"
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "--tiny", "--temperatures", "0", "1.0", "--out", str(out)]
        + ["--trees", "3", "--candidates", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert set(found["decode"]) == {f"batch {n}, T={t}" for n in (1, 2) for t in (0.0, 1.0)}
    for way in found["decode"]["batch 2, T=0.0"].values():  # fp32: every way writes the same text
        assert all(same == [2, 2] for name, same in way.items() if name.startswith("same_text_as"))
    ways = found["decode"]["batch 1, T=1.0"]
    assert set(ways) == {
        "plain generate()", "loop, no drafter", "drafted generate()", "loop, drafted", "loop, adaptive"
    }  # fmt: skip
    assert ways["plain generate()"]["ratio"] == 1.0 and ways["loop, drafted"]["acceptance_length"] >= 1.0
    assert all(way["tokens_per_second"] > 0 for way in ways.values())
    greedy = found["decode"]["batch 1, T=0.0"]
    assert set(greedy) - set(ways) == {"loop, tree of 3", "loop, tree of 3, 2 candidates"}
    assert greedy["plain generate()"]["cache_bytes"] == greedy["drafted generate()"]["cache_bytes"] > 0
    passes = found["passes"]["2"]
    assert passes["draft"] > 0 and set(passes["verify"]) == set(passes["round"]) == {"1", "2", "3", "4"}
    assert found["floor"]["target"] > 0 and found["floor"]["drafter"] > 0
    assert "loop, adaptive" in run.stdout and not found["stopped"]


def test_it_stops_in_time_and_says_so(tmp_path):
    out = tmp_path / "decode.json"
    command = [sys.executable, str(EXAMPLE), "--tiny", "--only", "decode", "--seconds", "0", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert found["stopped"] and not found["decode"] and not found["passes"]


def test_prompts_come_from_every_file_in_turn_and_fill_their_batches(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import decode_cases

    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, count in zip(files, (3, 1), strict=True):
        file.write_text("".join(json.dumps({"turns": [f"{file.stem}{i}"]}) + "\n" for i in range(count)))
    args = SimpleNamespace(prompts=files, per_set=2, device="cpu")
    assert decode_cases.questions(args) == ["a0", "b0", "a1"]
    _, tokenizer = load_embedded_target()
    shapes = [b["input_ids"].shape[0] for b in decode_cases.batches_of(args, tokenizer, 2, 0)]
    assert shapes == [2] and len(decode_cases.batches_of(args, tokenizer, 1, 0)) == 3
    assert [b["input_ids"].shape[0] for b in decode_cases.batches_of(args, tokenizer, 4, 0)] == [4]
