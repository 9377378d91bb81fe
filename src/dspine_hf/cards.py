"""Model cards: README.md from config.json, results.json and training.json, and the check that it is true."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import RepoCard

TAGS = ["dspine", "speculative-decoding", "draft-model", "custom_code", "custom_generate"]
PICTURES = ("acceptance_length.png", "slots.png")
REQUIRED_METADATA = ("library_name", "base_model", "license", "pipeline_tag", "tags", "datasets", "language")
TRAINING_FIELDS = {
    "base_model": "Hub name of the target",
    "base_model_relation": "the Hub's word for how this model depends on the target, e.g. adapter",
    "license": "Hub identifier of the licence",
    "language": "list of language codes",
    "datasets": "list of the Hub names of data sets that prompts came from",
    "data": "what the training data is",
    "procedure": "the training procedure, an object of names and values",
    "evaluated_on": "the machine that the speed-up was measured on",
}
PLACEHOLDER = re.compile(r"\{\{|\}\}|\bTODO\b|\bTBD\b|\bFIXME\b|More Information Needed|\borg/name\b", re.IGNORECASE)


def template_file() -> Path:
    """The template: beside the package in a wheel, in model_cards/ in a source checkout."""
    here = Path(__file__).resolve()
    installed = here.parent / "model_cards" / "template.md"
    return installed if installed.is_file() else here.parents[2] / "model_cards" / "template.md"


def render_card(repo_id: str, config: dict[str, Any], results: dict[str, Any], training: dict[str, Any]) -> str:
    """The text of README.md.

    Args:
        repo_id: where the drafter will be published; the snippets name it.
        config, results, training: the contents of config.json, results.json (of `dspine eval`) and training.json.

    Raises:
        ValueError: a number or a field that the card needs is missing, or a placeholder is left.
    """
    check_training(training)
    temperatures = _need(results, "temperatures", "results.json")
    if not temperatures:
        raise ValueError("expected figures for at least one temperature in results.json; found none.")
    settings = _need(results, "settings", "results.json")
    first = next(iter(temperatures.values()))
    values = {
        "metadata": metadata(repo_id, results, training).to_yaml().strip(),
        "name": repo_id.rpartition("/")[2],
        "repo_id": repo_id,
        "base_model": training["base_model"],
        "num_slots": str(_need(config, "block_size", "config.json") - 1),
        "num_benchmarks": str(len(first["benchmarks"])),
        "headline": "; ".join(_headline(t, figures) for t, figures in temperatures.items()),
        "dtype": _need(settings, "dtype", "results.json: settings"),
        "evaluated_on": training["evaluated_on"],
        "max_new_tokens": str(_need(settings, "max_new_tokens", "results.json: settings")),
        "tables": "\n\n".join(_table(t, figures) for t, figures in temperatures.items()),
        "architecture": _architecture(config),
        "data": training["data"],
        "procedure": _procedure(training),
        "limits": "\n".join(f"- {limit}" for limit in _limits(results, training)),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match.group(1)], template_file().read_text("utf-8"))
    if found := PLACEHOLDER.search(text):
        raise ValueError(f"expected a card without placeholders; found {found.group()!r}. Give that field a value.")
    return text


def check_training(training: dict[str, Any]) -> None:
    """Raise ValueError unless every field of training.json that a card needs is there."""
    missing = [name for name in TRAINING_FIELDS if training.get(name) in (None, "", [], {})]
    if missing:
        raise ValueError(
            f"expected the facts of the training in training.json; missing: {described(missing)}. Write them into it: "
            "'dspine train' keeps what was written there."
        )


def described(names: Iterable[str]) -> str:
    """These fields of training.json, and what each of them is."""
    return "; ".join(f"{name} ({TRAINING_FIELDS[name]})" for name in names)


def metadata(repo_id: str, results: dict[str, Any], training: dict[str, Any]) -> ModelCardData:
    """The card's YAML block, with one result per prompt set, temperature and measure."""
    return ModelCardData(
        language=training["language"],
        license=training["license"],
        library_name="transformers",
        tags=TAGS,
        datasets=training["datasets"],
        base_model=training["base_model"],
        base_model_relation=training["base_model_relation"],
        pipeline_tag="text-generation",
        model_name=repo_id.rpartition("/")[2],
        eval_results=eval_results(results),
    )


def eval_results(results: dict[str, Any]) -> list[EvalResult]:
    """Acceptance length and speed-up of every prompt set at every temperature.

    Raises:
        ValueError: a figure is missing, or is no number.
    """
    found = []
    for temperature, figures in results["temperatures"].items():
        for name, row in figures["benchmarks"].items():
            for measure, title in (("acceptance_length", "Acceptance length"), ("speedup", "Speed-up of generate()")):
                found.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=name,
                        dataset_name=name,
                        metric_type=measure,
                        metric_name=f"{title}, T = {temperature}",
                        metric_value=_number(row, measure, f"{name}, T = {temperature}"),
                    )
                )
    if not found:
        raise ValueError("expected at least one prompt set in results.json; found none. Run 'dspine eval'.")
    return found


def card_problems(text: str, repo_id: str, results: dict[str, Any], files: Mapping[str, Any]) -> list[str]:
    """What keeps a card from being published: empty if nothing does.

    Args:
        text: of README.md.
        repo_id: where it goes.
        results: the content of results.json.
        files: what is published beside it, by path.
    """
    problems = [f"the placeholder {found.group()!r}" for found in PLACEHOLDER.finditer(text)]
    try:
        data = RepoCard(text, ignore_metadata_errors=False).data.to_dict()
        figures = ModelCardData(**data).eval_results or []
    except Exception as error:  # whatever the parser of the Hub's library stumbles over
        return [*problems, f"metadata that huggingface_hub cannot read ({error})"]
    problems += [f"no {name} in the metadata" for name in REQUIRED_METADATA if not data.get(name)]
    stated = {(r.dataset_name, r.metric_name, r.metric_value) for r in figures}
    measured = {(r.dataset_name, r.metric_name, r.metric_value) for r in eval_results(results)}
    for name, metric, value in sorted(measured ^ stated, key=str)[:3]:
        which = "results.json, but not the card" if (name, metric, value) in measured else "the card, not results.json"
        problems.append(f"{name}: {metric} = {value} is in {which}")
    if f'"{repo_id}"' not in text:
        problems.append(f'no snippet that loads "{repo_id}"')
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text)
    problems += [f"the picture {p}, which is not there" for p in pictures if "://" not in p and p not in files]
    return problems


def _headline(temperature: str, figures: dict[str, Any]) -> str:
    where = f"T = {temperature}"
    length = _number(figures, "mean_acceptance_length", where)
    return f"{length:.2f} new tokens per pass and {_number(figures, 'mean_speedup', where):.2f}x the speed at {where}"


def _table(temperature: str, figures: dict[str, Any]) -> str:
    """One Markdown table."""
    rows = [
        f"**T = {temperature}**\n",
        "| prompt set | prompts | acceptance length | 95 % | no loops | plain tok/s | drafted tok/s | speed-up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in figures["benchmarks"].items():
        where = f"{name}, T = {temperature}"
        number = {
            key: _number(row, key, where)
            for key in ("acceptance_length", "acceptance_length_without_loops", "speedup", "prompts")
            + ("tokens_per_second_plain", "tokens_per_second_drafted")
        }
        low, high = _need(row, "acceptance_length_interval", where)
        rows.append(
            f"| {name} | {number['prompts']} | {number['acceptance_length']:.2f} | {low:.2f} to {high:.2f} | "
            f"{number['acceptance_length_without_loops']:.2f} | {number['tokens_per_second_plain']:.1f} | "
            f"{number['tokens_per_second_drafted']:.1f} | {number['speedup']:.2f}x |"
        )
    means = [
        _number(figures, f"mean_{name}", f"T = {temperature}")
        for name in ("acceptance_length", "acceptance_length_without_loops", "speedup")
    ]
    rows.append(f"| **mean** | | **{means[0]:.2f}** | | **{means[1]:.2f}** | | | **{means[2]:.2f}x** |")
    return "\n".join(rows)


def _architecture(config: dict[str, Any]) -> str:
    layers, ids = _need(config, "num_hidden_layers", "config.json"), _need(config, "target_layer_ids", "config.json")
    text = (
        f"{layers} layers of width {_need(config, 'hidden_size', 'config.json')}; blocks of {config['block_size']} "
        f"slots; context from the target's layers {', '.join(map(str, ids))}. The target's own embedding and head are "
        "used and not part of this repository. "
    )
    if config.get("injection", "all") == "none":
        return text + "No injection: slots are chosen independently, as in DFlash."
    where = {"all": "at every layer", "last": "at the last layer"}[config.get("injection", "all")]
    rank, placed = config["transfer_rank"], config.get("injection_placement", "layer")
    text += (
        f"Messages of rank {rank} between neighbouring slots {where}, "
        f"{'between attention and MLP' if placed == 'mlp' else 'after the layer'}"
    )
    if config.get("selection", "transition") == "transition":
        rewritten = config.get("rewrite_layers", 0) + 1
        text += (
            f"; the last {'write is' if rewritten == 1 else f'{rewritten} writes are'} repeated with each of the "
            f"{config['num_candidates']} candidates of the slot before"
        )
        if passes := config.get("chain_passes", 0):
            text += f", and see the states of a chain drafted beforehand ({passes} pass{'es' * (passes > 1)})"
    return text + "."


def _procedure(training: dict[str, Any]) -> str:
    """The list of the procedure, and what its author says of other drafters trained so, if anything."""
    lines = [f"- **{name}**: {value}" for name, value in training["procedure"].items()]
    return "\n".join(lines) + (f"\n\n{training['comparison']}" if training.get("comparison") else "")


def _limits(results: dict[str, Any], training: dict[str, Any]) -> list[str]:
    """What the figures themselves say, then what the training's author adds."""
    limits = []
    greedy = results["temperatures"].get("0", {}).get("benchmarks", {})
    same = [(row["identical"], row["prompts"]) for row in greedy.values() if row.get("identical") is not None]
    dtype = results["settings"]["dtype"]
    if same and dtype != "float32":
        share = sum(s * n for s, n in same) / sum(n for _, n in same)
        limits.append(
            f"In {dtype}, {share:.0%} of the greedy answers were the same, token for token, as without the drafter: "
            "where two tokens are tied to the last bit, a pass over several tokens may decide otherwise than a pass "
            "over one. In float32 the texts are the same."
        )
    loops, prompts = (sum(row.get(key, 0) for row in greedy.values()) for key in ("loops", "prompts"))
    if loops:
        limits.append(
            f"{loops} of the {prompts} greedy answers end in a loop, which is easy to draft: see the column without."
        )
    limits.append(
        "Speed-ups hold for the machine above; where a pass over a block costs more than a pass over one "
        "token, they are smaller. `generate()` drafts for one sequence at a time."
    )
    return [*limits, *training.get("limits", [])]


def _need(container: Mapping[str, Any], name: str, where: str) -> Any:
    if container.get(name) is None:
        raise ValueError(f"expected '{name}' in {where}; found none. Run 'dspine eval' again, without --offline.")
    return container[name]


def _number(container: Mapping[str, Any], name: str, where: str) -> float:
    value = _need(container, name, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == float("inf"):
        raise ValueError(f"expected a number as '{name}' in {where}; found {value!r}. Run 'dspine eval' again.")
    return value
