"""A training run goes on with the options that it was begun with; its folder holds what a model card needs of it."""

import json
import shutil

import pytest

from dspine_hf import DSpineDraftModel
from dspine_hf.cards import TRAINING_FIELDS
from dspine_hf.hub import write_card
from dspine_hf.run_record import RECORD, RunRecord
from dspine_hf.training import last_complete_checkpoint
from helpers.tiny_files import random_sequences, save_tiny_target, write_jsonl
from helpers.training_runs import SHAPES, command, run_here, saved_losses

OPTIONS = {
    "--target-dtype": "float32",
    "--max-steps": 4,
    "--save-steps": 2,
    "--logging-steps": 1,
    "--anchors-per-sequence": 4,
    "--per-device-train-batch-size": 4,
    "--eval-size": 2,
    "--max-length": 64,
    "--disable-tqdm": "true",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a tiny target, data, and a drafter that was trained for four steps."""
    home = tmp_path_factory.mktemp("begun")
    save_tiny_target(home / "target")
    write_jsonl(home / "rows.jsonl", random_sequences(14))
    write_jsonl(home / "others.jsonl", random_sequences(15))
    train(home)
    return home


@pytest.fixture
def home(begun, tmp_path):
    """A copy of it: whole folders may be moved."""
    shutil.copytree(begun, tmp_path / "home")
    return tmp_path / "home"


def train(home, *more, config=SHAPES, **changed) -> str:
    """`dspine train` in that folder, with some options changed (None: left out) and further ones."""
    options = {"--target": home / "target", "--data": home / "rows.jsonl", "--output-dir": home / "drafter", **OPTIONS}
    options |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    words = [word for option in options.items() if option[1] is not None for word in option]
    words += [word for name, value in config.items() for word in ("--config", f"{name}={value}")]
    return run_here(command("train", *words, "--use-cpu", *more))


def files(folder) -> dict:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def training_json(home) -> dict:
    return json.loads((home / "drafter" / "training.json").read_text())


REFUSED = [
    (
        {"learning_rate": 0.5, "anchors_per_sequence": 2},
        r"--anchors-per-sequence: 4 \(now 2\), --learning-rate: 0.0006",
    ),
    ({"per_device_train_batch_size": 2}, r"x processes: 4 \(now 2\)"),
    ({"gradient_accumulation_steps": 2}, r"x processes: 4 \(now 8\)"),
    ({"loss_layer": 0.1}, "--loss-layer: 0.3"),
    ({"loss_gamma": 2}, r"--loss-gamma: None \(now 2.0\)"),
    ({"seed": 5}, r"--seed: 42 \(now 5\)"),
    ({"optim_drafter": "muon"}, r"--optim-drafter: 'adamw' \(now 'muon'\)"),
    ({"lr_scheduler_type": "linear"}, r"--lr-scheduler-type: 'cosine' \(now 'linear'\)"),
    ({"eval_size": 3}, r"--eval-size: 2 \(now 3\)"),
    ({"target_dtype": "bfloat16"}, "--target-dtype: 'float32'"),
    ({"config": {**SHAPES, "block_size": 4}}, r"--config block_size: 5 \(now 4\)"),
    ({"config": {k: v for k, v in SHAPES.items() if k != "block_size"}}, r"--config block_size: 5 \(now 16\)"),
]


@pytest.mark.parametrize("changed, message", REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_another_run_in_the_same_folder_is_refused(begun, changed, message):
    before = files(begun / "drafter")
    with pytest.raises(ValueError, match=f"was begun with .*{message}.* Use the same options .*another --output-dir"):
        train(begun, **changed)
    assert files(begun / "drafter") == before


def test_other_data_another_target_or_another_start_is_refused(home):
    before = files(home / "drafter")
    with pytest.raises(ValueError, match=r"--data: '14 sequences \(\w+\)' \(now '15 sequences"):
        train(home, data=home / "others.jsonl")
    same_number = write_jsonl(home / "same.jsonl", random_sequences(14, seed=4))
    with pytest.raises(ValueError, match=r"--data: '14 sequences \(\w+\)' \(now '14 sequences"):
        train(home, data=same_number)
    with pytest.raises(ValueError, match=r"--frequency-space: False \(now True\)"):
        train(home, "--frequency-space")
    shutil.copytree(home / "target", home / "other")
    with pytest.raises(ValueError, match=r"--target: 'target \((\w+)\)' \(now 'other \(\1\)'\)"):
        train(home, target=home / "other")
    with pytest.raises(ValueError, match=r"--drafter: None \(now 'checkpoint-2 \(\w+\)'\)"):
        train(home, drafter=last_complete_checkpoint(home / "drafter").replace("-4", "-2"), config={})
    with pytest.raises(ValueError, match=r"--config block_size"):
        train(home, "--no-resume", config={**SHAPES, "block_size": 4})  # its checkpoints would be taken later
    assert files(home / "drafter") == before


def test_a_run_goes_on_with_more_steps_another_share_of_the_batch_and_other_logs(home):
    expected = saved_losses(home / "drafter")
    moved = home.with_name("moved")
    home.rename(moved)
    other = {"save_steps": 3, "eval_steps": 3, "dataloader_num_workers": 1, "report_to": "none", "save_total_limit": 3}
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    train(moved, max_steps=6, **other, **parts)
    assert saved_losses(moved / "drafter")[:4] == expected and len(saved_losses(moved / "drafter")) == 6
    assert training_json(moved)["procedure"]["steps"] == "6 of 4 sequences x 4 blocks"
    train(moved, max_steps=7, save_steps=7)
    with pytest.raises(ValueError, match="--eval-size"):
        train(moved, max_steps=8, eval_data=moved / "others.jsonl")


def test_a_finished_run_is_left_as_it_is(home):
    """Also in the middle of an epoch: four steps of three a pass."""
    before = files(home / "drafter")
    train(home)
    for name, content in files(home / "drafter").items():
        if name not in ("trainer_state.json", RECORD) and not name.startswith("checkpoint-"):
            assert content == before[name], name
    assert saved_losses(home / "drafter") == saved_losses(home / "drafter" / "checkpoint-4")
    assert not (home / "drafter" / "checkpoint-5").exists()


def test_a_folder_without_a_record_resumes_as_it_is(home):
    for name in (RECORD, "training.json"):
        (home / "drafter" / name).unlink()
    train(home, max_steps=5, learning_rate=0.5)
    assert len(saved_losses(home / "drafter")) == 5
    assert not any((home / "drafter" / name).exists() for name in (RECORD, "training.json"))


def test_options_may_change_as_long_as_there_is_nothing_to_lose(home):
    record = (home / "drafter" / RECORD).read_text()
    shutil.rmtree(home / "drafter")
    (home / "drafter").mkdir()
    (home / "drafter" / RECORD).write_text(record)
    train(home, config={**SHAPES, "block_size": 4})
    assert DSpineDraftModel.from_pretrained(home / "drafter").config.block_size == 4
    assert json.loads((home / "drafter" / RECORD).read_text())["options"]["--config block_size"] == 4


def test_a_drafter_whose_checkpoints_are_gone_is_not_replaced_by_another(home):
    for folder in (home / "drafter").glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="--config block_size"):
        train(home, config={**SHAPES, "block_size": 4})
    train(home, "--no-resume", config={**SHAPES, "block_size": 4})
    assert DSpineDraftModel.from_pretrained(home / "drafter").config.block_size == 4


def test_an_adapted_drafter_goes_on_and_its_start_and_rank_are_kept_to(home):
    start = (home / "drafter").rename(home / "start")
    options = {"drafter": start, "config": {}, "eval_size": None}
    train(home, lora=2, **options)
    train(home, lora=2, **{**options, "max_steps": 5})
    assert training_json(home)["procedure"]["start"] == "start, with LoRA of rank 2"
    with pytest.raises(ValueError, match=r"--lora: 2 \(now 3\)"):
        train(home, lora=3, **options)
    for folder in start.glob("checkpoint-*"):
        shutil.rmtree(folder)
    (start / RECORD).unlink()
    for steps in (4, 4, 5):  # in its own folder, which the end of the run replaces
        train(home, output_dir=start, **{**options, "max_steps": steps})
    assert len(saved_losses(start)) == 5


def test_training_evaluation_and_card_follow_each_other(home):
    folder, found = home / "drafter", training_json(home)
    assert found.keys() == TRAINING_FIELDS.keys()
    assert found["data"] == "12 sequences of a prompt and a response from `rows.jsonl`, cut to 64 tokens each."
    assert found["procedure"]["steps"] == "4 of 4 sequences x 4 blocks"
    assert (found["procedure"]["hardware"], found["procedure"]["seed"]) == ("CPU", "42")
    assert found["base_model"] is None  # a folder's name says nothing of the Hub
    with pytest.raises(FileNotFoundError, match=f"dspine eval --drafter {folder} --output-dir {folder}', or copy"):
        write_card(folder, "someone/tiny")
    prompts = write_jsonl(home / "prompts.jsonl", [{"turns": ["w1 w2"]}, {"turns": ["w9 w7 w3"]}])
    words = ["--target", home / "target", "--drafter", folder, "--prompts", prompts, "--output-dir", folder]
    run_here(command("eval", *words, "--max-new-tokens", 8, "--dtype", "float32", "--device", "cpu"))
    missing = r"missing: base_model \(.*license \(.*language \(.*datasets \(.*evaluated_on \("
    with pytest.raises(ValueError, match=missing) as caught:
        run_here(command("card", folder, "someone/tiny"))
    assert "procedure (" not in str(caught.value)
    by_hand = {"base_model": "org/target", "license": "mit", "language": ["en"], "datasets": ["org/data"]}
    by_hand |= {"evaluated_on": "one core", "data": "My rows.", "limits": ["Tiny."]}
    (folder / "training.json").write_text(json.dumps({**found, **by_hand}))
    run_here(command("card", folder, "someone/tiny"))
    text = (folder / "README.md").read_text()
    assert "- **steps**: 4 of 4 sequences x 4 blocks" in text and "My rows." in text and "Tiny." in text
    train(home, max_steps=5)  # what was written by hand stays, what the run knows follows it
    again = training_json(home)
    assert {name: again[name] for name in by_hand} == by_hand
    assert again["procedure"]["steps"] == "5 of 4 sequences x 4 blocks"


def test_a_training_json_that_was_there_before_the_run_is_kept(begun, tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "training.json").write_text('{"data": "mine"}')
    train(begun, output_dir=folder)
    assert (folder / "training.json").read_text() == '{"data": "mine"}'
    with pytest.raises(FileNotFoundError, match=r"training.json .*write it with base_model \(.*evaluated_on \("):
        (folder / "training.json").unlink()
        (folder / "results.json").write_text("{}")
        write_card(folder, "someone/tiny")


def test_facts_that_a_kill_left_unwritten_are_not_taken_for_written_by_hand(tmp_path):
    def run(facts):
        record = RunRecord(tmp_path)
        record.begin({}, 0, "CPU")
        record.publish("training.json", facts)

    run({"steps": 1, "mine": None})
    (tmp_path / "training.json").write_text(json.dumps({"steps": 1, "mine": "x"}))
    before = (tmp_path / "training.json").read_text()
    run({"steps": 2, "mine": None})
    (tmp_path / "training.json").write_text(before)  # as if the run had ended between its two files
    run({"steps": 3, "mine": None})
    assert json.loads((tmp_path / "training.json").read_text()) == {"steps": 3, "mine": "x"}


def test_hardware_is_told_by_the_steps_that_it_did(tmp_path):
    for step, hardware, steps, text in (
        (0, "A", 4, "A"),
        (4, "B", 4, "A"),
        (4, "B", 9, "A; from step 4 on: B"),
        (6, "B", 9, "A; from step 4 on: B"),
        (3, "A", 9, "A"),
        (8, "2 x C", 9, "A; from step 8 on: 2 x C"),
        (0, "B", 9, "B"),
    ):
        record = RunRecord(tmp_path)
        record.begin({}, step, hardware)
        assert record.hardware(steps) == text
