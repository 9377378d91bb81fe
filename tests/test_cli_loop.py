"""`dspine generate` and `dspine demo` with the options of the fast loop, and what the demo says of its times."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

import dspine_hf
from dspine_hf.cli import app, main
from dspine_hf.commands import common, demo, demo_view
from dspine_hf.commands.common import Pair
from helpers.tiny_files import save_tiny_target, tiny_chat_target, tiny_tokenizer
from helpers.tiny_pair import load_tiny_pair, tiny_drafter

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    """The words of a `dspine generate` over a tiny pair."""
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_target(folder / "target")
    tiny_drafter(tiny_chat_target()).save_pretrained(folder / "drafter")
    words = ["generate", "--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--json"]
    return [*words, "--prompt", "w1 w2 w3", "--dtype", "float32", "--max-new-tokens", "20", "--device", "cpu"]


@pytest.fixture
def looped(monkeypatch):
    """What the fast loop was called with, call by call; it decodes as ever."""
    calls = []

    def generate(target, drafter, **options):
        calls.append(options)
        return dspine_hf.generate(target, drafter, **options)

    monkeypatch.setattr(common, "generate", generate)
    return calls


LOOPS = {
    "--fast": {},
    "--tree-nodes 9": {"tree_nodes": 9},
    "--adaptive": {"adaptive": True},
    "--candidates 3 --fast": {"num_candidates": 3},
}


@pytest.mark.parametrize("words", LOOPS)
def test_options_of_the_loop_decode_with_it_the_text_of_plain_generate(words, question, looped):
    plain = json.loads(RUNNER.invoke(app, question).stdout)
    assert not looped
    result = RUNNER.invoke(app, [*question, *words.split()])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["token_ids"] == plain["token_ids"]
    (options,) = looped
    names = ("tree_nodes", "adaptive", "compiled", "num_candidates")
    assert {name: options[name] for name in names if name in options} == LOOPS[words]


@pytest.mark.parametrize("words, compiled", [(["--compile"], True), (["--compile", "--fused"], "fused")])
def test_compiled_passes_are_asked_for(words, compiled, question, monkeypatch):
    asked = []

    def generate(target, drafter, **options):
        asked.append((options.pop("compiled"), drafter.config.use_fused_kernels))
        return dspine_hf.generate(target, drafter, **options)

    monkeypatch.setattr(common, "generate", generate)
    assert RUNNER.invoke(app, [*question, *words]).exit_code == 0
    assert asked == [(compiled, "--fused" in words)]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--tree-nodes", "4", "--adaptive"], "--adaptive cuts chains"),
        (["--tree-nodes", "4", "--temperature", "0.5"], "greedy decoding; found --temperature 0.5"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_loaded(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--prompt", "x", "--target", "./nothing", "--drafter", "./nothing", *words])
    assert message in capsys.readouterr().err


@pytest.fixture
def tiny_demo(monkeypatch):
    monkeypatch.setattr(demo, "load_pair", load_tiny_pair)


def test_the_demo_drafts_in_the_loop_and_compares_with_generate(tiny_demo, looped):
    words = ["demo", "--prompts", "1", "--max-new-tokens", "12", "--device", "cpu"]
    result = RUNNER.invoke(app, [*words, "--tree-nodes", "6", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["identical"] and found["drafted_by"] == "dspine_hf.generate(tree_nodes=6)"
    assert [call["tree_nodes"] for call in looped] == [6] * 3  # to warm up, timed, in float32
    result = RUNNER.invoke(app, [*words, "--fast"])
    assert "dspine_hf.generate()" in result.stdout
    found = json.loads(RUNNER.invoke(app, [*words, "--json"]).stdout)
    assert found["drafted_by"] == "generate(assistant_model=drafter)"


@pytest.mark.parametrize("timed_in", ["bfloat16", "float32"])
def test_answers_that_are_only_watched_show_no_time(timed_in):
    target = tiny_chat_target()
    pair = Pair(target, tiny_tokenizer(), tiny_drafter(target), "tiny", "tiny-drafter")
    console = Console(width=80)
    with console.capture() as shown:
        demo_view.watch(console, pair, "w1 w2", 8, timed_in)
    text = " ".join(shown.get().split())
    watched = timed_in != "float32"
    assert text.count("tokens, float32, not timed") == 2 * watched
    assert ("The table below is timed, in bfloat16." in text) == watched
    assert (" s, float32" in text) != watched
