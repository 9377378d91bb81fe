"""Model cards: true to the results, readable by huggingface_hub, and their snippets run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from dspine_hf.cards import PLACEHOLDER, TRAINING_FIELDS, card_problems, eval_results, render_card, template_file
from dspine_hf.embedded import embedded_drafter_folder
from dspine_hf.hub import write_card
from helpers.hub_server import HubServer
from helpers.published import TARGET, TRAINING, tiny_published
from helpers.tiny_files import save_tiny_target

NAME = "someone/tiny-drafter"
SHIPPED = embedded_drafter_folder()
RESULT_FIELDS = ("acceptance_length", "acceptance_length_interval", "acceptance_length_without_loops", "speedup")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_published(tmp_path_factory.mktemp("card") / "tiny")
    write_card(folder, NAME)
    return folder


@pytest.fixture
def facts(folder):
    """(config, results, training), to be changed."""
    return [json.loads((folder / name).read_text()) for name in ("config.json", "results.json", "training.json")]


def snippets(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_every_figure_of_the_card_is_that_of_the_results(folder, facts):
    text = (folder / "README.md").read_text()
    card = ModelCard(text, ignore_metadata_errors=False)
    found = {(r.dataset_name, r.metric_name): r.metric_value for r in card.data.eval_results}
    benchmarks = {t: figures["benchmarks"] for t, figures in facts[1]["temperatures"].items()}
    for temperature, rows in benchmarks.items():
        for name, row in rows.items():
            assert found[name, f"Acceptance length, T = {temperature}"] == row["acceptance_length"]
            assert found[name, f"Speed-up of generate(), T = {temperature}"] == row["speedup"]
            low, high = row["acceptance_length_interval"]
            line = f"| {name} | 16 | {row['acceptance_length']:.2f} | {low:.2f} to {high:.2f} |"
            assert line in text and f"| {row['speedup']:.2f}x |" in text
    assert len(found) == 8


def test_the_metadata_is_read_by_huggingface_hub(folder):
    data = ModelCard.load(folder / "README.md").data
    assert (data.library_name, data.base_model, data.license) == ("transformers", TARGET, "apache-2.0")
    assert (data.pipeline_tag, data.datasets, data.language) == ("text-generation", ["openai/gsm8k"], ["en"])
    assert data.base_model_relation == "adapter" and {"dspine", "speculative-decoding"} <= set(data.tags)
    assert data.model_name == "tiny-drafter"


def test_no_placeholder_survives_and_every_picture_is_there(folder):
    text = (folder / "README.md").read_text()
    assert not PLACEHOLDER.search(text)
    assert set(re.findall(r"\{\{(\w+)\}\}", template_file().read_text()))
    pictures = re.findall(r"!\[[^\]]+\]\((\S+)\)", text)
    assert len(pictures) == 2 and all((folder / p).read_bytes().startswith(b"\x89PNG") for p in pictures)
    assert card_problems(text, NAME, json.loads((folder / "results.json").read_text()), dict.fromkeys(pictures)) == []


@pytest.mark.parametrize("field", RESULT_FIELDS)
@pytest.mark.parametrize("value", [None, "absent", "many", float("nan"), True])
def test_a_card_with_a_missing_figure_is_refused(facts, field, value):
    row = facts[1]["temperatures"]["1"]["benchmarks"]["mt-bench"]
    if field.endswith("interval") and value not in (None, "absent"):
        pytest.skip("an interval is two numbers")
    row[field] = value
    if value == "absent":
        del row[field]
    with pytest.raises(ValueError, match=field):
        render_card(NAME, *facts)


@pytest.mark.parametrize("field", ["mean_acceptance_length", "mean_speedup"])
def test_a_card_with_a_missing_mean_is_refused(facts, field):
    del facts[1]["temperatures"]["0"][field]
    with pytest.raises(ValueError, match=field):
        render_card(NAME, *facts)


@pytest.mark.parametrize("field", TRAINING_FIELDS)
def test_a_card_with_a_missing_fact_of_the_training_is_refused(facts, field):
    for value in (None, "", []):
        with pytest.raises(ValueError, match=rf"missing: {field} \("):
            render_card(NAME, facts[0], facts[1], {**TRAINING, field: value})


@pytest.mark.parametrize("left", ["{{x}}", "TODO", "TBD", "[More Information Needed]"])
def test_a_card_with_a_placeholder_is_refused(facts, left):
    with pytest.raises(ValueError, match="placeholder"):
        render_card(NAME, facts[0], facts[1], {**TRAINING, "data": f"Sequences: {left}."})


def test_a_changed_figure_is_a_problem(folder, facts):
    text = (folder / "README.md").read_text()
    files = dict.fromkeys(("acceptance_length.png", "slots.png"))
    assert card_problems(text.replace("value: 3.25", "value: 4.25"), NAME, facts[1], files)
    assert card_problems(text.replace("license: apache-2.0\n", ""), NAME, facts[1], files) == [
        "no license in the metadata"
    ]
    assert card_problems(text.replace("base_model: ", "base_model: ["), NAME, facts[1], files)
    assert card_problems(text, NAME, facts[1], {}) == [
        "the picture acceptance_length.png, which is not there",
        "the picture slots.png, which is not there",
    ]


def test_evaluations_without_speed_do_not_make_a_card(facts):
    for row in facts[1]["temperatures"]["0"]["benchmarks"].values():
        del row["speedup"]
    with pytest.raises(ValueError, match="without --offline"):
        eval_results(facts[1])


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """A Hub with the tiny target under the name that the card gives it, and the drafter with its code."""
    server = HubServer()
    server.add_folder(TARGET, save_tiny_target(tmp_path_factory.mktemp("target")))
    server.add_folder(NAME, folder)
    yield server
    server.close()


@pytest.mark.parametrize("index", [0, 1], ids=["with the package", "without the package"])
def test_the_snippets_of_a_card_run_as_they_stand(server, folder, tmp_path, index):
    text = (folder / "README.md").read_text()
    assert len(snippets(text)) == 2
    environment = {**os.environ, **server.environment(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", snippets(text)[index]]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "w" in done.stdout
    assert ("import dspine_hf" in snippets(text)[index]) is (index == 0)
    assert ("trust_remote_code=True" in snippets(text)[index]) is (index == 1)


needs_results = pytest.mark.skipif(
    not (SHIPPED / "results.json").is_file(), reason="the checkpoint is not measured yet"
)


@needs_results
def test_the_shipped_card_is_what_its_results_say():
    text, results = (SHIPPED / "README.md").read_text(), json.loads((SHIPPED / "results.json").read_text())
    repo_id = re.search(r'AutoModel\.from_pretrained\("([^"]+)"', text)[1]
    files = {path.name: path for path in Path(SHIPPED).iterdir()}
    assert card_problems(text, repo_id, results, files) == []
    facts = [json.loads((SHIPPED / name).read_text()) for name in ("config.json", "results.json", "training.json")]
    assert render_card(repo_id, *facts) == text


def test_a_card_says_that_a_drafter_drafts_chains_beforehand(facts):
    config, results, training = facts
    assert "chain drafted beforehand" not in render_card(NAME, config, results, training)
    chained = config | {"rewrite_layers": 1, "chain_passes": 2}
    assert "see the states of a chain drafted beforehand (2 passes)." in render_card(NAME, chained, results, training)
