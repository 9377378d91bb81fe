"""Evaluation: offline figures are those of the real loop, statistics are right, and a killed evaluation goes on."""

import json

import numpy as np
import pytest
import torch

from dspine_hf import DSpineConfig, DSpineDraftModel
from dspine_hf.benchmarks import SLACK, encode_chat, load_benchmarks, user, within_positions
from dspine_hf.bootstrap import compare, interval
from dspine_hf.evaluation import Evaluator, summarise
from dspine_hf.offline import loop_tail_start, walk_rounds
from dspine_hf.plots import training_curve
from helpers.tiny_files import save_tiny_target, tiny_chat_target, tiny_tokenizer, write_jsonl
from helpers.training_runs import command, kill_when, run_here, trained_pair

LIMIT = 40


def paths(name: str, count: int = 5, words: int = 4) -> list[dict]:
    return [
        {"turns": [" ".join(f"w{(i * 7 + j * 3 + len(name)) % 58}" for j in range(words + i))]} for i in range(count)
    ]


def test_offline_figures_are_those_of_the_real_loop():
    target, drafter, prompts, _ = trained_pair()
    evaluator = Evaluator(target, drafter, LIMIT)
    rounds = 0
    for prompt in prompts:
        loop = evaluator.loop(prompt, 0.0)
        plain = evaluator.timed(prompt, 0.0, drafted=False).tokens
        offline = evaluator.offline(prompt, plain)
        assert loop["identical"]
        for name in offline:
            assert loop[name] == offline[name], name
        rounds += loop["rounds"]
    assert len(prompts) * (LIMIT - 1) / rounds > 1.3


@pytest.mark.parametrize("stop", [3, 9, 17])
def test_offline_figures_are_those_of_the_real_loop_when_the_text_ends_early(stop):
    target, drafter, prompts, texts = trained_pair()
    for prompt, text in zip(prompts[:6], texts, strict=False):
        target.generation_config.eos_token_id = text[stop]
        try:
            evaluator = Evaluator(target, drafter, LIMIT)
            loop = evaluator.loop(prompt, 0.0)
            plain = evaluator.timed(prompt, 0.0, drafted=False).tokens
            offline = evaluator.offline(prompt, plain)
        finally:
            target.generation_config.eos_token_id = 3
        assert loop["identical"] and len(plain) <= stop + 1
        for name in ("rounds", "trials", "hits"):
            assert loop[name] == offline[name], name


def test_teacher_forced_hits_count_every_anchor_and_the_first_slot_is_the_draft():
    target, drafter, prompts, texts = trained_pair()
    evaluator = Evaluator(target, drafter, LIMIT)
    record = evaluator.offline(prompts[0], texts[0])
    slots = drafter.config.num_draft_slots
    assert record["forced_trials"] == [LIMIT - 1 - slot for slot in range(slots)]
    hits = 0
    view = drafter.bind_target(target)
    tokens, features, _ = evaluator._read(prompts[0], texts[0])
    for place in range(LIMIT - 1):
        cache = drafter.new_cache()
        anchor = len(prompts[0]) + place
        drafter.extend_context(cache, features[:, :anchor], torch.arange(anchor)[None])
        block = drafter.draft_block(view, cache, tokens[anchor : anchor + 1], torch.tensor([anchor]))
        hits += int(block.row(1, tokens[anchor : anchor + 1]).argmax()) == texts[0][place + 1]
    assert record["forced_hits"][0] == hits


def test_sampled_drafts_are_measured_too():
    target, drafter, prompts, _ = trained_pair()
    record = Evaluator(target, drafter, LIMIT, seed=3).loop(prompts[0], 1.0, seed=5)
    again = Evaluator(target, drafter, LIMIT, seed=3).loop(prompts[0], 1.0, seed=5, drafted_first=True)
    assert "identical" not in record and record["new_tokens"] > 1
    assert (record["rounds"], record["hits"]) == (again["rounds"], again["hits"])


def test_loop_tail_is_cut_from_the_clean_figures():
    text = [5, 9, 2, 8, *([7, 6, 4] * 12)]
    assert loop_tail_start(text) == 4
    drafts = torch.zeros(len(text) - 1, 4, dtype=torch.long)
    for place in range(8, len(text) - 1):
        known = text[place + 1 : place + 5]
        drafts[place, : len(known)] = torch.tensor(known)
    whole, clean = walk_rounds(drafts, torch.tensor(text)), walk_rounds(drafts, torch.tensor(text[:4]))
    assert (clean.new_tokens, clean.rounds) == (4, 3)
    assert whole.acceptance_length > 2 > clean.acceptance_length


def record(name, index, tokens, rounds, **more):
    base = {"benchmark": name, "index": index, "temperature": 0.0, "new_tokens": tokens, "rounds": rounds}
    base |= {"clean_tokens": tokens, "clean_rounds": rounds, "loop_start": None, "trials": [rounds], "hits": [1]}
    return base | more


def test_summary_weighs_tokens_within_a_set_and_sets_alike():
    rows = [record("a", 0, 11, 5), record("a", 1, 31, 5), record("b", 0, 13, 3, trials=[3, 1], hits=[1, 1])]
    figures = summarise(rows)
    assert figures["benchmarks"]["a"]["acceptance_length"] == pytest.approx(4.0)
    assert figures["mean_acceptance_length"] == pytest.approx(4.0)
    assert figures["slot_acceptance"] == [pytest.approx(3 / 13, abs=1e-4), 1.0]
    timed = [record("a", i, 11, 5, plain_tokens=10, plain_seconds=2.0, drafted_seconds=1.0) for i in range(2)]
    assert summarise(timed)["benchmarks"]["a"]["speedup"] == pytest.approx(2.2)


def test_bootstrap_interval_covers_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        rounds = rng.integers(20, 60, size=40)
        pairs = [(int(3 * n + rng.normal(0, 10)), int(n)) for n in rounds]
        low, high = interval(pairs, resamples=300, seed=trial)
        covered += low <= 3.0 <= high
    assert 178 <= covered <= 198


def test_paired_comparison_sees_a_small_gain_that_unpaired_intervals_cannot():
    rng = np.random.default_rng(1)
    theirs, ours = [], []
    for name in ("a", "b"):
        for i in range(60):
            rounds, tau = int(rng.integers(20, 60)), rng.uniform(1.5, 6)
            theirs.append(record(name, i, int(tau * rounds) + 1, rounds))
            ours.append(record(name, i, int(tau * 1.05 * rounds) + 1, rounds))
    found = compare(ours, theirs[::-1], resamples=2000)
    assert found["ratio"] == pytest.approx(1.05, abs=0.01)
    low, high = found["interval"]
    assert 1.03 < low < high < 1.07
    assert compare(ours[:90], theirs)["prompts"] == 90
    assert compare(theirs, theirs)["interval"] == [1.0, 1.0]
    with pytest.raises(ValueError, match="share none"):
        compare(ours, [record("c", 0, 5, 2)])


@pytest.mark.parametrize("tokens", [64, 256])
def test_long_context_prompts_have_the_length_asked_for(tmp_path, tokens):
    file = write_jsonl(tmp_path / "a.jsonl", paths("a"))
    tokenizer = tiny_tokenizer()
    (found,) = load_benchmarks([str(file)], tokenizer, context_tokens=tokens)
    assert found.name == f"a@{tokens}"
    for prompt, row in zip(found.prompts, paths("a"), strict=True):
        assert abs(len(prompt) - tokens) <= 2
        question = tokenizer(row["turns"][0])["input_ids"]
        assert prompt[-2 - len(question) : -2] == question


def test_context_lengths_are_cut_to_the_targets_positions():
    config = tiny_chat_target().config  # 512 positions
    assert within_positions([64, 1024, 4096, 256], config, 40) == [64, 512 - 40 - SLACK, 256]
    with pytest.raises(ValueError, match="below the target's 512 positions; found 512"):
        within_positions([64], config, 512)


def test_known_continuations_take_no_context(tmp_path):
    known = [{"benchmark": "x", "prompt_ids": [1, 5], "greedy_ids": [6, 7]}]
    with pytest.raises(ValueError, match="expected text prompts with a context length"):
        load_benchmarks([str(write_jsonl(tmp_path / "known.jsonl", known))], None, context_tokens=64)


def test_acceptance_is_reported_behind_every_length_of_context(tmp_path):
    save_tiny_target(tmp_path / "target")
    trained = trained_pair()[1]
    windowed = DSpineDraftModel(DSpineConfig(**{**trained.config.to_dict(), "context_window": 24}))
    windowed.load_state_dict(trained.state_dict())
    windowed.save_pretrained(tmp_path / "drafter")
    questions = write_jsonl(tmp_path / "asked.jsonl", paths("asked", 3))
    words = ["--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--dtype", "float32"]
    words += ["--prompts", questions, "--max-new-tokens", 16, "--temperature", 0, "--json"]
    words += [word for length in (48, 160, 4096) for word in ("--context-length", length)]
    loop, offline = (
        json.loads(run_here(command("eval", *words, *more, "--output-dir", tmp_path / name)))
        for name, more in (("loop", []), ("offline", ["--offline"]))
    )
    cut = 512 - 16 - SLACK
    assert loop["settings"]["context_length"] == [48, 160, cut]
    by_context = loop["acceptance_length_by_context"]
    assert by_context == {str(n): loop["benchmarks"][f"asked@{n}"]["acceptance_length"] for n in (48, 160, cut)}
    assert by_context == offline["acceptance_length_by_context"]
    lengths = [json.loads(line)["prompt_tokens"] for line in list((tmp_path / "loop" / "prompts.jsonl").open())[1:]]
    assert lengths == pytest.approx([48] * 3 + [160] * 3 + [cut] * 3, abs=2)


def test_benchmarks_come_from_folders_and_from_known_continuations(tmp_path):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", paths(name))
    found = load_benchmarks([str(tmp_path)], tiny_tokenizer(), limit=3, max_prompt_tokens=8)
    assert [(b.name, len(b.prompts)) for b in found] == [("a", 2), ("b", 2)]
    known = [{"benchmark": n, "prompt_ids": [1, 5], "greedy_ids": [6, i]} for n in "xy" for i in range(2)]
    x, y = load_benchmarks([str(write_jsonl(tmp_path / "known.jsonl", known))], None)
    assert (x.name, x.prompts, y.continuations) == ("x", [[1, 5], [1, 5]], [[6, 0], [6, 1]])
    assert encode_chat(tiny_tokenizer(), [user("w1")], True) != encode_chat(tiny_tokenizer(), [user("w1")])
    with pytest.raises(ValueError, match="'turns', 'messages' or 'prompt'"):
        load_benchmarks([str(write_jsonl(tmp_path / "bad.jsonl", [{"text": "x"}]))], tiny_tokenizer())


def test_training_curve_is_read_from_the_trainer_state(tmp_path):
    history = [{"step": 5, "loss": 1.0}, {"step": 5, "eval_acceptance_length": 1.5}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert training_curve(tmp_path / "trainer_state.json") == [(5, 1.5)]


def untimed(folder) -> list[dict]:
    """Every record of an evaluation, without its times."""
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()[1:]]
    return [{name: value for name, value in line.items() if not name.endswith("_seconds")} for line in lines]


def test_killed_evaluation_goes_on_and_writes_the_same_results(tmp_path):
    save_tiny_target(tmp_path / "target")
    _, drafter, *_ = trained_pair()
    drafter.save_pretrained(tmp_path / "drafter")
    for name in ("first", "second"):
        write_jsonl(tmp_path / "sets" / f"{name}.jsonl", paths(name, 8))
    pair = ["--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--dtype", "float32"]

    def words(folder, *more):
        return command(
            "eval", *pair, "--prompts", tmp_path / "sets", "--max-new-tokens", 16, "--output-dir", folder, *more
        )

    journal = tmp_path / "killed" / "prompts.jsonl"
    kill_when(words(tmp_path / "killed"), lambda: journal.exists() and journal.read_bytes().count(b"\n") > 6)
    with open(journal, "ab") as file:
        file.write(b'{"benchmark": "first", "ind')
    printed = json.loads(run_here(words(tmp_path / "killed", "--json")))
    run_here(words(tmp_path / "whole"))
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
    run_here(words(tmp_path / "offline", "--offline", "--against", tmp_path / "killed"))
    results = json.loads((tmp_path / "killed" / "results.json").read_text())
    assert printed == results
    offline = json.loads((tmp_path / "offline" / "results.json").read_text())
    assert set(results["temperatures"]) == {"0", "1"} and set(offline["temperatures"]) == {"0"}
    assert results["mean_acceptance_length"] == offline["mean_acceptance_length"] > 1
    assert offline["comparison"]["0"]["all"]["interval"] == [1.0, 1.0]
    for figures in results["temperatures"].values():
        for name in ("first", "second"):
            row = figures["benchmarks"][name]
            assert row["prompts"] == 8 and row["speedup"] > 0 and len(row["slot_acceptance"]) == 4
    assert all(row["identical"] == 1.0 for row in results["benchmarks"].values())
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert len({(e["benchmark"], e["index"], e["temperature"]) for e in lines}) == len(lines) == 32
    for name in ("acceptance_length.png", "slots.png"):
        assert (tmp_path / "killed" / name).read_bytes().startswith(b"\x89PNG")
