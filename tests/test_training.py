"""Training: the loss curve depends on the global batch alone, resumes exactly, and touches nothing but the drafter."""

import copy
import itertools
import json
import math
import os
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel

from dspine_hf import training
from dspine_hf.blocks import cut_blocks, sample_anchors
from dspine_hf.commands import train as train_command
from dspine_hf.commands.train import parse_arguments
from dspine_hf.flops import step_flops
from dspine_hf.lora import add_lora, merged_copy
from dspine_hf.seeds import hashed_uniform
from dspine_hf.sequences import SequenceCollator, TokenSequences, chat_sequences, load_sequences, split_prompts
from dspine_hf.training import last_complete_checkpoint
from helpers.tiny_files import random_sequences, save_tiny_target, tiny_chat_target, tiny_tokenizer, write_jsonl
from helpers.training_runs import (
    MAX_LENGTH,
    SHAPES,
    command,
    fresh_drafter,
    kill_when,
    losses,
    run_here,
    saved_losses,
    trained_pair,
    trainer_for,
)

CURVE = 1e-3


def curve(trainer, resume=None) -> list[float]:
    trainer.train(resume_from_checkpoint=resume)
    return losses(trainer.state.log_history)


def test_accumulated_batches_give_the_loss_curve_of_whole_ones(tmp_path):
    whole = curve(trainer_for(tmp_path / "a", per_device_train_batch_size=4, weight_decay=0.1))
    parts = curve(
        trainer_for(tmp_path / "b", per_device_train_batch_size=1, gradient_accumulation_steps=4, weight_decay=0.1)
    )
    assert len(whole) == 6 and len(set(whole)) == 6
    assert parts == pytest.approx(whole, abs=CURVE)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_has_the_loss_curve_of_an_uninterrupted_one(tmp_path, optimizer):
    options = {"forcing": 0.5, "layer_loss": "contrast", "optim_drafter": optimizer, "distill": 0.3}
    whole = trainer_for(tmp_path / "a", **options)
    expected = curve(whole)
    again = trainer_for(tmp_path / "a", drafter=fresh_drafter(tiny_chat_target(), seed=9), **options)
    resumed = curve(again, resume=str(tmp_path / "a" / "checkpoint-2"))
    assert resumed == pytest.approx(expected, abs=CURVE)
    assert resumed[:2] == expected[:2]
    for name, weight in again.drafter.state_dict().items():
        torch.testing.assert_close(weight, whole.drafter.state_dict()[name], msg=name)


@pytest.fixture
def determinism():
    """What `full_determinism` sets in this process is undone afterwards."""
    before = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    os.environ.clear()
    os.environ.update(before)


OPTIONS = [
    {},
    {"forcing": 0.5, "layer_loss": "contrast", "optim_drafter": "muon", "distill": 0.3, "total_variation": 0.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["adamw", "muon"])
def test_full_determinism_fills_no_memory_that_training_reads(tmp_path, options, determinism):
    """It fills fresh memory with NaN, in evaluation and in a resumed run too."""
    options = {**options, "held_out": random_sequences(3), "eval_strategy": "steps", "eval_steps": 2}
    plain = trainer_for(tmp_path / "a", **options)
    expected = curve(plain)
    assert math.isfinite(sum(expected)) and not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    drafter = fresh_drafter(tiny_chat_target())
    checked = []
    drafter.check_target = lambda target: checked.append(torch.are_deterministic_algorithms_enabled())
    trainer = trainer_for(tmp_path / "b", drafter=drafter, full_determinism=True, **options)
    assert checked == [True] and torch.empty(2).isnan().all()
    assert curve(trainer) == expected
    resumed = trainer_for(tmp_path / "b", full_determinism=True, **options)
    assert curve(resumed, resume=str(tmp_path / "b" / "checkpoint-2")) == expected
    for name, weight in plain.drafter.state_dict().items():
        for other in (trainer, resumed):
            assert torch.equal(other.drafter.state_dict()[name], weight), name
    key = "eval_acceptance_length"
    found = [[entry[key] for entry in t.state.log_history if key in entry] for t in (plain, trainer, resumed)]
    assert found[0] == found[1] == found[2] and len(found[0]) == 3


def test_full_determinism_is_on_before_the_target_is_loaded(tmp_path, monkeypatch, determinism):
    """On a GPU, the first product decides whether the ones after it may be repeatable."""
    seen = []

    def load(*args):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        raise SystemExit(7)

    monkeypatch.setattr(train_command, "load_quietly", load)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    rows = write_jsonl(tmp_path / "rows.jsonl", random_sequences(2))
    words = ["train", "--data", rows, "--use-cpu", "--output-dir", tmp_path / "out"]
    for more in ([], ["--full-determinism"]):
        with pytest.raises(SystemExit):
            run_here(command(*words, *more))
    assert seen[0] == (False, None)
    assert seen[1][0] and seen[1][1] in (":16:8", ":4096:8")


UNREPEATABLE = (
    "(_|^)(avg_pool3d|adaptive_(avg|max)_pool|fractional_max_pool|max_unpool|upsample|reflection_pad|grid_sampler|ctc_loss"
    "|nll_loss2d|embedding_bag|histc|bincount|median|nanmedian|kthvalue|put|scatter_reduce|cumsum|cumprod)"
)


class Operations(TorchDispatchMode):
    """Collects the names of the operations that run, sums along integers apart."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if not (isinstance(found, torch.Tensor) and "cumsum" in str(function) and not found.is_floating_point()):
            self.names.add(str(function).removeprefix("aten."))
        return found


@pytest.mark.parametrize(
    "config", [{}, {"injection_placement": "mlp", "rewrite_layers": 1, "chain_passes": 1}], ids=len
)
@pytest.mark.parametrize("options", OPTIONS, ids=["adamw", "muon"])
def test_every_operation_of_training_can_be_repeated_on_a_gpu(tmp_path, config, options):
    """None of those that torch.use_deterministic_algorithms refuses there."""
    target = tiny_chat_target()
    trainer = trainer_for(
        tmp_path,
        target,
        fresh_drafter(target, **config),
        held_out=random_sequences(2),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        **options,
    )
    with Operations() as operations:
        trainer.train()
    assert {"mm.default", "embedding.default", "silu_backward.default", "topk.default"} <= operations.names
    assert [name for name in operations.names if re.match(UNREPEATABLE, name)] == []


def test_killed_training_resumes_to_the_same_loss_curve(tmp_path):
    target = save_tiny_target(tmp_path / "target")
    rows = write_jsonl(tmp_path / "rows.jsonl", random_sequences(24))
    shapes = [word for name, value in SHAPES.items() for word in ("--config", f"{name}={value}")]

    def words(folder):
        options = ["--target", target, "--target-dtype", "float32", "--data", rows, *shapes, "--use-cpu"]
        options += ["--max-steps", 60, "--save-steps", 10, "--logging-steps", 1, "--anchors-per-sequence", 4]
        return command("train", *options, "--per-device-train-batch-size", 4, "--output-dir", folder)

    run_here(words(tmp_path / "whole"))
    killed = tmp_path / "killed"
    kill_when(words(killed), lambda: last_complete_checkpoint(killed) is not None)
    assert not (killed / "model.safetensors").exists()
    run_here(words(killed))
    expected = saved_losses(tmp_path / "whole")
    assert len(expected) == 60
    assert saved_losses(killed) == pytest.approx(expected, abs=CURVE)
    for name, weight in load_file(tmp_path / "whole" / "model.safetensors").items():
        torch.testing.assert_close(load_file(killed / "model.safetensors")[name], weight, msg=name)


def test_a_log_says_how_fast_the_steps_since_the_last_one_were(tmp_path, monkeypatch):
    clock = itertools.count(0, 8)  # asked when the first batch since a log is fetched, and at the next log
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    trainer = trainer_for(tmp_path, max_steps=4, logging_steps=2, peak_tflops=1e-6, pad_multiple=MAX_LENGTH)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    flops = step_flops(tiny_chat_target(), trainer.drafter.config, trainer.args.loss_weights, 4, MAX_LENGTH, 4).total
    assert len(logs) == 2
    for entry in logs:
        assert (entry["tokens_per_second"], entry["blocks_per_second"]) == (2 * 4 * MAX_LENGTH / 8, 2 * 4 * 4 / 8)
        assert entry["mfu"] == round(2 * flops / 8 / 1e6, 4)


CONFIGS = [
    {"injection": injection, "selection": selection, "injection_placement": placement, "rewrite_layers": m}
    for injection, selection, placement, m in itertools.product(
        ("all", "last", "none"), ("transition", "independent"), ("layer", "mlp"), (0, 1)
    )
    if (m == 0 or injection == "all") and (selection == "independent" or injection != "none")
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: " ".join(map(str, config.values())))
def test_every_weight_gets_a_gradient_where_no_process_looks_for_those_that_do_not(tmp_path, config):
    target = tiny_chat_target()
    trainer = trainer_for(tmp_path, target, fresh_drafter(target, **config))
    assert trainer.args.ddp_find_unused_parameters is False
    batch = next(iter(trainer.get_train_dataloader()))
    batch.pop("index")
    batch["anchors"] = sample_anchors(batch["prompt_lengths"], batch["lengths"], 4)
    trainer.model(**batch)["loss"].backward()
    assert [name for name, p in trainer.drafter.named_parameters() if p.requires_grad and p.grad is None] == []


def test_without_supervision_of_layers_processes_look_for_unused_weights(tmp_path):
    assert trainer_for(tmp_path, loss_layer=0.0).args.ddp_find_unused_parameters is True


def test_checkpoint_that_was_cut_short_is_passed_over(tmp_path):
    for step, content in ((2, '{"global_step": 2}'), (10, '{"global_step": 10}'), (12, '{"global_st'), (14, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if content:
            (folder / "trainer_state.json").write_text(content)
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert last_complete_checkpoint(tmp_path / "nothing") is None


def test_only_the_drafter_is_trained_and_saved(tmp_path):
    target = tiny_chat_target()
    before = copy.deepcopy(target.state_dict())
    trainer = trainer_for(tmp_path, target, max_steps=4)
    frozen = copy.deepcopy(
        {k: v for k, v in trainer.drafter.state_dict().items() if k.startswith(("transfer.", "fin"))}
    )
    trainable = {name for name, _ in trainer.drafter.named_parameters()}
    start = copy.deepcopy(trainer.drafter.state_dict())
    trainer.train()
    for name, weight in target.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    for name, weight in frozen.items():
        torch.testing.assert_close(trainer.drafter.state_dict()[name], weight, rtol=0, atol=0)
    still = {name for name in trainable if torch.equal(trainer.drafter.state_dict()[name], start[name])}
    assert not still
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert set(saved) == set(trainer.drafter.state_dict())
    assert not any(weight.shape[0] == target.config.vocab_size for weight in saved.values())
    loaded = AutoModel.from_pretrained(tmp_path / "checkpoint-4")
    torch.testing.assert_close(loaded.state_dict(), dict(trainer.drafter.state_dict()))


def test_bf16_training_keeps_fp32_weights_and_saves_what_is_asked_for(tmp_path):
    trainer = trainer_for(tmp_path, bf16=True, max_steps=2)
    values = curve(trainer)
    assert all(weight.dtype == torch.float32 for weight in trainer.drafter.parameters())
    assert values == pytest.approx(curve(trainer_for(tmp_path / "b", max_steps=2)), rel=0.05)
    trainer.save_drafter(tmp_path / "final", torch.bfloat16)
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert saved["fc.weight"].dtype == torch.bfloat16 and saved["transfer.W"].dtype == torch.float32


def test_training_raises_acceptance_and_the_best_checkpoint_is_kept(tmp_path):
    target, _, prompts, texts = trained_pair()
    rows = [{"tokens": p + t, "prompt_length": len(p)} for p, t in zip(prompts, texts, strict=True)][:6]
    trainer = trainer_for(
        tmp_path,
        target,
        rows=rows,
        held_out=rows[:3],
        max_steps=60,
        learning_rate=5e-3,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        load_best_model_at_end=True,
    )
    trainer.train()
    history = [e["eval_acceptance_length"] for e in trainer.state.log_history if "eval_acceptance_length" in e]
    assert len(history) == 3 and history[-1] > 1.3
    assert trainer.state.best_metric == max(history)
    assert trainer.evaluate()["eval_acceptance_length"] == pytest.approx(max(history))


def test_anchors_lie_in_responses_and_change_from_step_to_step():
    rows = random_sequences(8)
    batch = SequenceCollator()([{"index": i, **row} for i, row in enumerate(rows)])
    drawn = []
    for step in range(3):
        offsets = hashed_uniform(7, step, batch["index"], 6)
        anchors = sample_anchors(batch["prompt_lengths"], batch["lengths"], 6, offsets=offsets)
        assert (anchors >= batch["prompt_lengths"][:, None]).all()
        assert (anchors < batch["lengths"][:, None] - 1).all()
        assert cut_blocks(batch["tokens"], batch["prompt_lengths"], batch["lengths"], anchors, 5).valid[..., 0].all()
        drawn.append(anchors)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])


def test_hashed_numbers_are_uniform_and_independent_of_the_batch():
    index = torch.arange(500)
    values = hashed_uniform(3, 11, index, 40)
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom, p < 0.001
    assert torch.corrcoef(torch.stack([values[:, 0], values[:, 1]]))[0, 1].abs() < 0.2
    torch.testing.assert_close(hashed_uniform(3, 11, index[123:125], 40), values[123:125], rtol=0, atol=0)
    assert not torch.equal(hashed_uniform(4, 11, index, 40), values)


def test_lora_adapts_merges_and_resumes(tmp_path):
    target, trained, *_ = trained_pair()
    base = copy.deepcopy(trained)

    def adapted():
        torch.manual_seed(4)
        drafter = copy.deepcopy(base)
        add_lora(drafter, rank=2)
        return drafter

    trainer = trainer_for(tmp_path, target, drafter=adapted(), learning_rate=1e-2)
    expected = curve(trainer)
    for name, weight in trainer.drafter.named_parameters():
        if "lora_" not in name:
            torch.testing.assert_close(weight, base.state_dict()[name.replace(".base_layer", "")], rtol=0, atol=0)
    resumed = trainer_for(tmp_path, target, drafter=adapted(), learning_rate=1e-2)
    assert curve(resumed, resume=str(tmp_path / "checkpoint-4")) == pytest.approx(expected, abs=CURVE)
    merged = merged_copy(trainer.drafter)
    assert set(merged.state_dict()) == set(base.state_dict())
    assert not torch.equal(merged.fc.weight, base.fc.weight)
    x = torch.randn(3, base.fc.in_features)
    torch.testing.assert_close(merged.fc(x), trainer.drafter.fc(x), rtol=1e-4, atol=1e-5)
    loaded = AutoModel.from_pretrained(tmp_path / "checkpoint-6")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(merged.state_dict()))


def test_chat_messages_become_one_sequence_per_answer(tmp_path):
    tokenizer = tiny_tokenizer()
    chat = [("user", "w1 w2"), ("assistant", "w3 w4 w5"), ("user", "w6"), ("assistant", "w7 w8")]
    messages = [{"role": role, "content": text} for role, text in chat]
    first, second = chat_sequences(messages, tokenizer)
    assert tokenizer.decode(first["tokens"]) == "<user> w1 w2 <end> <assistant> w3 w4 w5 <end>"
    assert tokenizer.decode(second["tokens"][second["prompt_length"] :]) == "w7 w8 <end>"
    assert chat_sequences(messages, tokenizer, thinking=True)[0]["prompt_length"] == first["prompt_length"] + 1
    source = write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages}, {"messages": messages[:1]}])
    assert load_sequences(str(source), tokenizer) == [first, second]
    with pytest.raises(ValueError, match="tokenizer; found none"):
        load_sequences(str(source))
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": "w1"}])
    with pytest.raises(ValueError, match=r"found the columns \['text'\]"):
        load_sequences(str(other), tokenizer)


def test_prompts_are_held_out_whole_and_evaluated_greedily():
    rows = [{"id": i // 2, "tokens": [1, 2, 3, 4], "prompt_length": 1, "temperature": float(i % 2)} for i in range(12)]
    train, held_out = split_prompts(rows, 2)
    assert {row["id"] for row in train} == {0, 1, 2, 3}
    assert [(row["id"], row["temperature"]) for row in held_out] == [(4, 0.0), (5, 0.0)]
    with pytest.raises(ValueError, match="between 1 and 5 of 6 prompts"):
        split_prompts(rows, 6)


def test_long_sequences_are_cut_and_padding_is_no_label():
    dataset = TokenSequences(
        [{"tokens": list(range(1, 41)), "prompt_length": 3}, {"tokens": [5, 6, 7], "prompt_length": 1}], 10
    )
    batch = SequenceCollator(multiple=8)([dataset[0], dataset[1]])
    assert batch["tokens"].shape == (2, 16) and batch["lengths"].tolist() == [10, 3]
    blocks = cut_blocks(batch["tokens"], batch["prompt_lengths"], batch["lengths"], torch.tensor([[8], [1]]), 5)
    assert blocks.valid[:, 0].tolist() == [[True, False, False, False]] * 2


def test_unknown_option_is_named(tmp_path):
    with pytest.raises(ValueError, match="--learning-rat"):
        parse_arguments(["--learning-rat", "1"], str(tmp_path), False)
    args = parse_arguments(["--max-steps", "7", "--eval-steps=3", "--loss-layer", "0.1"], str(tmp_path), True)
    assert (args.max_steps, args.eval_steps, args.save_steps, args.loss_layer) == (7, 3, 3, 0.1)
    assert args.load_best_model_at_end and args.metric_for_best_model == "acceptance_length"
    assert json.loads(args.to_json_string())["max_steps"] == 7
