"""The benchmark of whole decoding runs in small and writes every figure that it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "bench_decode.py"


def test_the_tiny_benchmark_writes_ratios_pass_costs_and_the_floor(tmp_path):
    out = tmp_path / "decode.json"
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "--tiny", "--temperatures", "1.0", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert set(found["decode"]) == {"batch 1, T=1.0", "batch 2, T=1.0"}
    ways = found["decode"]["batch 1, T=1.0"]
    assert set(ways) == {
        "plain generate()", "loop, no drafter", "drafted generate()", "loop, drafted", "loop, adaptive"
    }  # fmt: skip
    assert ways["plain generate()"]["ratio"] == 1.0 and ways["loop, drafted"]["acceptance_length"] >= 1.0
    assert all(way["tokens_per_second"] > 0 for way in ways.values())
    passes = found["passes"]["2"]
    assert passes["draft"] > 0 and set(passes["verify"]) == set(passes["round"]) == {"1", "2", "3", "4"}
    assert found["floor"]["target"] > 0 and found["floor"]["drafter"] > 0
    assert "loop, adaptive" in run.stdout
