"""The `dspine` command: what it prints where, its exit codes, and what demo and generate measure."""

import json
import subprocess
import sys
import warnings

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from dspine_hf.cli import COMMANDS, app, main
from dspine_hf.commands import common, demo, demo_view, regenerate
from dspine_hf.commands.common import Answer, Pair
from dspine_hf.embedded import embedded_target_file
from dspine_hf.stats_dspine import GenerationStats
from helpers.tiny_files import save_tiny_target, tiny_chat_target, tiny_tokenizer
from helpers.tiny_pair import load_tiny_pair, tiny_drafter

RUNNER = CliRunner()
HEADLINE = ("identical", "speedup", "acceptance_length", "tokens_per_second_plain", "tokens_per_second_drafted")


@pytest.fixture
def folders(tmp_path):
    """(target folder, drafter folder) of the tiny chat model."""
    target = save_tiny_target(tmp_path / "target")
    tiny_drafter(tiny_chat_target()).save_pretrained(tmp_path / "drafter")
    return str(target), str(tmp_path / "drafter")


@pytest.fixture
def tiny_pair(monkeypatch):
    """Puts a tiny pair in the place of the embedded one, in the dtype that the command asks for."""

    monkeypatch.setattr(demo, "load_pair", load_tiny_pair)


def fake_answer(ids, seconds, rounds=None):
    stats = None
    if rounds is not None:
        stats = GenerationStats(rounds, 7 * rounds, 3, len(ids), (len(ids) - 1) / rounds, (0.5,), (rounds,))
    return Answer("", list(ids), seconds, stats)


def fake_trial(plain_seconds, drafted_seconds, rounds, drafted_ids=range(10)):
    plain = fake_answer(range(10), plain_seconds)
    timed = demo.Comparison(plain, fake_answer(range(10), drafted_seconds, rounds))
    return demo.Trial("prompt", timed, demo.Comparison(plain, fake_answer(drafted_ids, drafted_seconds, rounds)))


def test_help_names_every_command():
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f" {name} " in result.stdout
        assert RUNNER.invoke(app, [name, "--help"]).exit_code == 0


def test_demo_json_is_one_object_with_the_headline_figures(tiny_pair):
    result = RUNNER.invoke(app, ["demo", "--json", "--prompts", "2", "--max-new-tokens", "12"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert all(name in found for name in HEADLINE)
    assert found["identical"] is True
    assert found["timed_in"] == "bfloat16" and found["text_compared_in"] == "float32"
    assert [row["prompt"] for row in found["prompts"]] == list(demo.PROMPTS[:2])
    assert all(0 < row["new_tokens"] <= 12 for row in found["prompts"])


def test_demo_shows_both_answers_and_a_table(tiny_pair):
    result = RUNNER.invoke(app, ["demo", "--prompts", "2", "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output
    assert "generate()" in result.stdout and "generate(assistant_model=drafter)" in result.stdout
    assert "overall" in result.stdout and result.stdout.count("identical") == 3


def test_demo_streams_the_same_text_into_both_columns():
    target = tiny_chat_target()
    pair = Pair(target, tiny_tokenizer(), tiny_drafter(target), "tiny", "tiny-drafter")
    inputs = common.encode(pair.tokenizer, "w1 w2", target.device)
    for drafted in (False, True):
        pieces = []
        done = common.answer(pair, inputs, drafted=drafted, max_new_tokens=12, on_text=pieces.append)
        assert "".join(pieces).split() == done.text.split() and len(pieces) > 1
        assert (done.stats is None) is not drafted


def test_demo_sums_up_medians_and_the_acceptance_length_of_all_rounds():
    target = tiny_chat_target()
    pair = Pair(target, None, None, "tiny", "tiny-drafter")
    trials = [fake_trial(10, 10, 9), fake_trial(10, 5, 3), fake_trial(10, 2, 2)]
    found = demo.summarise(pair, trials, 10)
    assert found["speedup"] == 2.0
    assert found["tokens_per_second_plain"] == 1.0 and found["tokens_per_second_drafted"] == 2.0
    assert found["acceptance_length"] == round(27 / 14, 4)
    assert found["identical"] is True


def test_demo_reports_a_text_that_differs():
    pair = Pair(tiny_chat_target(), None, None, "tiny", "tiny-drafter")
    trials = [fake_trial(1, 1, 3), fake_trial(1, 1, 3, drafted_ids=[0, 1, 2, 9])]
    found = demo.summarise(pair, trials, 10)
    assert found["identical"] is False
    assert [row["first_difference"] for row in found["prompts"]] == [None, 3]
    console = Console(width=100)
    with console.capture() as shown:
        demo_view.show(console, found)
    assert "differs at 3" in shown.get()


@pytest.mark.parametrize(("ours", "theirs", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)])
def test_first_difference_is_the_first_token_that_differs(ours, theirs, index):
    assert demo.Comparison(fake_answer(theirs, 1), fake_answer(ours, 1)).first_difference == index


def test_demo_answers_drafted_first_on_every_other_prompt(tiny_pair, monkeypatch):
    order = []
    original = demo.answer

    def spy(pair, inputs, *, drafted, **options):
        order.append((str(pair.target.dtype), drafted))
        return original(pair, inputs, drafted=drafted, **options)

    monkeypatch.setattr(demo, "answer", spy)
    result = RUNNER.invoke(app, ["demo", "--json", "--prompts", "2", "--max-new-tokens", "4"])
    assert result.exit_code == 0, result.output
    timed = [drafted for dtype, drafted in order[2:] if dtype == "torch.bfloat16"]
    assert timed == [False, True, True, False]


@pytest.mark.parametrize("loop", [[], ["--fast"]], ids=["generate()", "fast loop"])
def test_generate_json_holds_the_text_of_plain_generate(folders, loop):
    target, drafter = folders
    arguments = ["generate", "--target", target, "--drafter", drafter, "--prompt", "w1 w2 w3", "--dtype", "float32"]
    result = RUNNER.invoke(app, [*arguments, "--max-new-tokens", "20", "--json", *loop])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    inputs = common.encode(tiny_tokenizer(), "w1 w2 w3", torch.device("cpu"))
    plain = tiny_chat_target().generate(**inputs, do_sample=False, max_new_tokens=20)
    assert found["token_ids"] == plain[0, inputs["input_ids"].shape[1] :].tolist()
    assert found["new_tokens"] == len(found["token_ids"])
    assert found["acceptance_length"] == pytest.approx((found["new_tokens"] - 1) / found["rounds"], abs=1e-4)


def test_generate_prints_the_text_to_stdout_and_the_figures_to_stderr(folders):
    target, drafter = folders
    arguments = ["generate", "--target", target, "--drafter", drafter, "--prompt", "w1 w2 w3", "--dtype", "float32"]
    streamed = RUNNER.invoke(app, [*arguments, "--max-new-tokens", "20"])
    text = json.loads(RUNNER.invoke(app, [*arguments, "--max-new-tokens", "20", "--json"]).stdout)["text"]
    assert streamed.exit_code == 0, streamed.output
    assert streamed.stdout.split() == text.split()
    assert "target passes" in streamed.stderr


def test_generate_samples_by_seed(folders):
    target, drafter = folders
    arguments = ["generate", "--target", target, "--drafter", drafter, "--prompt", "w1", "--json"]

    def ids(seed):
        result = RUNNER.invoke(app, [*arguments, "--temperature", "1.5", "--max-new-tokens", "20", "--seed", seed])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["token_ids"]

    assert ids("1") == ids("1") != ids("2")


def test_generate_without_chat_template_continues_the_bare_prompt(folders):
    target, drafter = folders
    arguments = ["generate", "--target", target, "--drafter", drafter, "--prompt", "w1 w2", "--dtype", "float32"]
    result = RUNNER.invoke(app, [*arguments, "--no-chat", "--max-new-tokens", "8", "--json"])
    inputs = tiny_tokenizer()("w1 w2", return_tensors="pt")
    plain = tiny_chat_target().generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False, max_new_tokens=8
    )
    assert json.loads(result.stdout)["token_ids"] == plain[0, 2:].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--target", "./nothing", "--drafter", "./none"], "drafter's folder"),
        (["regenerate", "--prompts", "x", "--device", "nonsense", "--output-dir", "x"], "found 'nonsense'"),
        (
            ["eval", "--prompts", "x", "--drafter", "x", "--device", "nonsense", "--output-dir", "x"],
            "found 'nonsense'",
        ),
        (["train", "--data", "x", "--target", "./nothing", "--drafter", "./none"], "drafter's folder"),
        (["generate", "--prompt", "x", "--target", "org/name"], "expected --drafter"),
        (["generate", "--prompt", "x", "--target", "none.gguf", "--drafter", "CARD"], "expected a GGUF file"),
        (["generate", "--prompt", "x", "--target", "./nothing", "--drafter", "CARD"], "found nothing at"),
    ],
)
def test_an_error_the_user_can_cure_is_a_message_and_exit_code_1(arguments, message, capsys, folders):
    """A bad drafter or device is noticed before the target is looked for."""
    with pytest.raises(SystemExit) as stop:
        main([folders[1] if word == "CARD" else word for word in arguments])
    printed = capsys.readouterr()
    assert stop.value.code == 1
    assert message in printed.err and "Traceback" not in printed.err
    assert printed.out == ""


def test_debug_variable_brings_the_traceback_back(monkeypatch):
    monkeypatch.setenv("DSPINE_DEBUG", "1")
    with pytest.raises(ValueError, match="expected --drafter"):
        main(["generate", "--prompt", "x", "--target", "org/name"])


def test_command_line_answers_from_a_gguf_file_with_json_alone_on_stdout(fresh_drafter, embedded_target, tmp_path):
    fresh_drafter.save_pretrained(tmp_path)
    arguments = ["--target", str(embedded_target_file()), "--drafter", str(tmp_path), "--dtype", "float32"]
    arguments += ["--prompt", "What is the capital of France?", "--max-new-tokens", "16", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "dspine_hf.cli", "generate", *arguments], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    model, tokenizer = embedded_target
    inputs = common.encode(tokenizer, "What is the capital of France?", model.device)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    assert json.loads(done.stdout)["token_ids"] == plain.tolist()


def test_the_warning_about_another_target_is_shown(folders, tmp_path, monkeypatch, capsys):
    target, _ = folders
    model = tiny_chat_target()
    torch.manual_seed(9)
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    tiny_drafter(model).save_pretrained(tmp_path / "stranger")
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
    common.load_pair(target, str(tmp_path / "stranger"), torch.float32)
    assert "trained for another target" in capsys.readouterr().err


@pytest.mark.parametrize("found, device", [(True, "cuda"), (False, "cpu")])
def test_work_goes_to_a_gpu_where_there_is_one(monkeypatch, found, device):
    placed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: placed.append(device) or torch.ones(size))
    assert common.usable_device(None) == torch.device(device) == placed[0]


def test_the_demo_runs_where_it_is_told(tiny_pair, monkeypatch):
    asked, load_pair = [], demo.load_pair
    monkeypatch.setattr(demo, "load_pair", lambda *args: asked.append(args[3]) or load_pair(*args))
    for words in (["--device", "cpu"], []):
        assert not RUNNER.invoke(app, ["demo", "--json", "--prompts", "1", "--max-new-tokens", "4", *words]).exit_code
    assert asked == ["cpu", None]


def test_answers_of_a_server_need_no_gpu(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(regenerate, "usable_device", lambda name: asked.append(name) or torch.device("cpu"))
    words = ["regenerate", "--prompts", str(tmp_path / "none.jsonl"), "--output-dir", str(tmp_path / "out")]
    words += ["--target", str(save_tiny_target(tmp_path / "target"))]
    for more in (["--server", "http://127.0.0.1:9"], ["--server", "http://127.0.0.1:9", "--device", "cuda"], []):
        assert RUNNER.invoke(app, [*words, *more]).exit_code  # there are no prompts
    assert asked == ["cpu", "cuda", None]


@pytest.mark.parametrize("device", ["nonsense", "meta", "xpu:99"])
def test_a_device_that_cannot_be_used_is_refused_before_anything_is_loaded(device):
    with pytest.raises(ValueError, match=rf"--device.*found '{device}'"):
        common.load_pair("./nowhere", "./nowhere", torch.float32, device)
