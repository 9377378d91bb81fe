"""A tiny drafter folder that is ready to be published: trained a little less than a real one, measured not at all."""

import json
from pathlib import Path

import torch

from dspine_hf import DSpineDraftModel
from dspine_hf.commands.eval import weights_digest
from helpers.tiny_files import tiny_chat_target

TARGET = "HuggingFaceTB/tiny-chat"
TRAINING = {
    "base_model": TARGET,
    "base_model_relation": "adapter",
    "license": "apache-2.0",
    "language": ["en"],
    "datasets": ["openai/gsm8k"],
    "data": "Twelve sequences of random words.",
    "procedure": {"optimizer": "AdamW", "steps": 1},
    "evaluated_on": "one CPU core",
}


def made_up_results(drafter, dtype: str = "float32") -> dict:
    """What `dspine eval` would write, with figures that nobody measured."""

    def row(length: float) -> dict:
        return {
            "acceptance_length": length,
            "acceptance_length_interval": [length - 0.1, length + 0.125],
            "acceptance_length_without_loops": length - 0.05,
            "slot_acceptance": [0.8, 0.7, 0.6],
            "prompts": 16,
            "loops": 2,
            "new_tokens": 900,
            "rounds": 300,
            "speedup": round(length / 1.7, 4),
            "tokens_per_second_plain": 20.5,
            "tokens_per_second_drafted": 31.25,
            "identical": 0.9375,
        }

    def figures(start: float) -> dict:
        rows = {"gsm8k": row(start), "mt-bench": row(start - 0.5)}
        means = {
            f"mean_{name}": round(sum(r[name] for r in rows.values()) / 2, 4)
            for name in ("acceptance_length", "acceptance_length_without_loops", "speedup")
        }
        return {"benchmarks": rows, **means, "slot_acceptance": [0.8, 0.7, 0.6]}

    settings = {
        "target": TARGET,
        "drafter": "tiny",
        "drafter_fingerprint": weights_digest(drafter),
        "offline": False,
        "max_new_tokens": 64,
        "seed": 0,
        "dtype": dtype,
        "device": "cpu",
    }
    temperatures = {"0": figures(3.25), "1": figures(2.5)}
    return {**temperatures["0"], "temperatures": temperatures, "settings": settings}


def tiny_published(folder: Path, seed: int = 1, **overrides) -> Path:
    """Write a drafter of the tiny chat target with its results and training facts; returns the folder."""
    torch.manual_seed(seed)
    drafter = DSpineDraftModel.for_target(tiny_chat_target(), **{"block_size": 4, "num_hidden_layers": 2, **overrides})
    with torch.no_grad():
        for layer in drafter.layers:
            if layer.injection is not None:
                layer.injection.U.weight.normal_(0, 0.3)
    drafter.eval().save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps(made_up_results(drafter)))
    (folder / "training.json").write_text(json.dumps(TRAINING))
    return folder
