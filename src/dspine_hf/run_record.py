"""What a training run was begun with, kept in its folder: a run that goes on must be the same one."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checkpoint import read_json
from .configuration_dspine import DSpineConfig
from .journal import write_atomically

if TYPE_CHECKING:
    from .training import DSpineTrainingArguments

RECORD = "begun.json"
ROWS = 256  # that a digest looks at
BATCH = "--per-device-train-batch-size x --gradient-accumulation-steps x processes"

# What the loss curve depends on. All other training arguments may change when a run goes on: how long it is, what is
# logged, saved and evaluated, how the batch is shared out, how the data is loaded.
CURVE = (
    *("seed", "max_length", "anchors_per_sequence", "loss_unary", "loss_conditional", "loss_layer", "loss_gamma"),
    *("layer_loss", "sharpness", "distill", "teacher_temperature", "total_variation", "forcing", "forcing_until"),
    *("optim_drafter", "optim", "optim_args", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16"),
)


class RunRecord:
    """The record in the folder of a run.

    Attributes:
        content: what the file holds; None where there is none, as in folders of runs that kept no record.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / RECORD
        self.content: dict[str, Any] | None = read_json(self.path) if self.path.is_file() else None

    def check(self, options: dict[str, Any]) -> None:
        """Raise ValueError if one of these options was another when the run was begun; those not recorded pass."""
        begun = (self.content or {}).get("options", {})
        wanted = json.loads(json.dumps(options))
        differing = [name for name, value in wanted.items() if name in begun and begun[name] != value]
        if differing:
            named = ", ".join(f"{name}: {begun[name]!r} (now {wanted[name]!r})" for name in differing)
            raise ValueError(
                f"'{self.folder}' holds a drafter whose training was begun with {named}. Use the same options to go "
                "on with it, or another --output-dir."
            )

    def begin(self, options: dict[str, Any], from_step: int, hardware: str) -> None:
        """Keep what the run is begun with, or that it goes on from this step. Call it on one process.

        Raises:
            OSError: the file cannot be written.
        """
        old = self.content or {}
        if from_step:
            options = {**options, **old.get("options", {})}
        parts = [part for part in old.get("parts", []) if part["from_step"] < from_step]
        parts.append({"from_step": from_step, "hardware": hardware})
        self._write({**old, "options": options, "parts": parts})

    def hardware(self, steps: int) -> str:
        """Where the `steps` steps of the run were done."""
        text = last = ""
        for part in (self.content or {}).get("parts", []):
            start, name = part["from_step"], part["hardware"]
            if name != last and (not start or start < steps):
                text, last = f"{text}; from step {start:,} on: {name}" if text else name, name
        return text

    def publish(self, name: str, facts: dict[str, Any]) -> None:
        """Write a file of facts into the folder; what somebody has written into it by hand stays.

        Raises:
            OSError: the file cannot be written.
        """
        assert self.content is not None
        path, written = self.folder / name, self.content.get(name, [])
        facts = json.loads(json.dumps(facts))
        ours = [*written[-9:], facts]  # the last ones, since a kill may come between record and file
        if path.is_file():
            if not written:
                return
            found = read_json(path)
            facts = {**facts, **{key: v for key, v in found.items() if all(v != old.get(key) for old in ours)}}
        self._write({**self.content, name: ours})
        _write(path, facts)

    def _write(self, content: dict[str, Any]) -> None:
        self.content = json.loads(json.dumps(content))
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.path, content)


def curve_options(args: "DSpineTrainingArguments") -> dict[str, Any]:
    """The training arguments that the loss curve depends on, by option; the batch is that of all processes."""
    return {**{f"--{name.replace('_', '-')}": getattr(args, name) for name in CURVE}, BATCH: args.whole_batch}


def config_options(config: DSpineConfig) -> dict[str, Any]:
    """The fields of a drafter's config, by option."""
    content = config.to_dict()
    return {f"--config {name}": content.get(name) for name in DSpineConfig.field_types()}


def given_options(fields: dict[str, Any]) -> dict[str, Any]:
    """Those of them that are known before there is a config; an object is completed there."""
    return {f"--config {name}": value for name, value in fields.items() if not isinstance(value, dict)}


def name_of(source: str | Path) -> str:
    """The last part of a name or path, which is the same wherever a folder is moved."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else path.name


def rows_digest(rows: Any) -> str:
    """What tells one list of token sequences from another: how many there are, and some of them."""
    every = max(1, len(rows) // ROWS)
    found = [[list(rows[i]["tokens"]), int(rows[i]["prompt_length"])] for i in range(0, len(rows), every)]
    return f"{len(rows)} sequences ({_short(json.dumps(found).encode())})"


def head_digest(weight: torch.Tensor) -> str:
    """What tells one target's output embedding [V, d] from another's: some of its rows."""
    return _short(_bytes(weight[:: max(1, weight.shape[0] // ROWS)]))


def start_digest(module: torch.nn.Module) -> str:
    """What tells one drafter's weights from another's: the first numbers of each."""
    return _short(b"".join(_bytes(value.flatten()[:ROWS]) for value in module.state_dict().values()))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().double().contiguous().numpy().tobytes()


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise OSError(
            f"expected to write '{path}'; found: {error}. Make room, and the same command goes on where it was."
        ) from error
