"""A target whose weights two processes share out (tp_plan="auto") drafts and decodes as the whole target does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspine_hf import DSpineDraftModel
from helpers.launch import launcher

RUN = Path(__file__).parent / "helpers" / "tensor_parallel_run.py"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "head of its own"])
def results(request, tmp_path_factory):
    """What one whole target and each of two processes gave."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    torch.manual_seed(0)
    shape = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": request.param}
    target = LlamaForCausalLM(LlamaConfig(**shape, **heads, eos_token_id=None, bos_token_id=None)).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.5 * weight.shape[1] ** -0.5)
    target.save_pretrained(folder / "target")
    small = {"block_size": 4, "num_hidden_layers": 2, "transfer_rank": 8, "num_candidates": 4}
    DSpineDraftModel.for_target(target, **small).save_pretrained(folder / "drafter")
    (folder / "prompts.json").write_text(json.dumps(torch.randint(12, (4, 9)).tolist()))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for command, name in (([sys.executable], "whole"), (launcher(2), "shared")):
        words = [*command, str(RUN), str(folder), str(folder / name), *(["whole"] if name == "whole" else [])]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / name).read_text()) for name in ("whole.0", "shared.0", "shared.1")]


def test_the_weights_are_shared_out(results):
    assert [result["shared_out"] for result in results] == [False, True, True]


def test_a_head_that_was_gathered_in_inference_mode_serves_training_too(results):
    assert all(result["may train"] for result in results)


def test_every_process_gives_the_text_of_the_whole_target(results):
    whole, *shared = results
    for result in shared:
        assert result["texts"] == whole["texts"]
    for row in whole["texts"]:
        assert row["drafted"] == row["in inference mode"] == row["loop"] == row["plain"]
    assert sum(row["accepted"] for row in whole["texts"]) > 0
