"""The README's commands for training, run by a shell as they stand, with a tiny model as the embedded target."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DSPINE = """#!{python}
import sys
sys.path.insert(0, "{tests}")
import dspine_hf.embedded
from helpers.tiny_files import tiny_chat_target, tiny_tokenizer
dspine_hf.embedded.load_embedded_target = lambda dtype: (tiny_chat_target().to(dtype), tiny_tokenizer())
from dspine_hf.cli import main
main()
"""


@pytest.fixture(scope="module")
def blocks():
    """The README's shell blocks that call dspine."""
    found = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block for block in found if re.search(r"^dspine ", block, re.MULTILINE)]


@pytest.mark.timeout(900)
def test_the_commands_for_training_run_as_they_stand(blocks, tmp_path):
    command = tmp_path / "bin" / "dspine"
    command.parent.mkdir()
    command.write_text(DSPINE.format(python=sys.executable, tests=ROOT / "tests"))
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    assert blocks
    for block in blocks:
        done = subprocess.run(
            ["bash", "-eu", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=880
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "drafter" / "model.safetensors").is_file()
    assert (tmp_path / "drafter" / "modeling_dspine.py").is_file(), "the finished drafter carries its code"
    assert (tmp_path / "results" / "results.json").is_file()
