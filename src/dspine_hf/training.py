"""DSpineTrainer: trains a drafter on the frozen target's states, which are computed on the fly."""

import json
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, enable_full_determinism

from .blocks import cut_blocks, sample_anchors
from .checkpoint import checkpoint_step
from .features import TargetReader
from .flops import peak_tflops, step_flops
from .lora import is_adapted, load_adapter, merged_copy, save_adapter
from .losses import LossWeights, slot_weights
from .muon import MuonAdamW
from .objective import SequenceBatch, block_states, training_loss
from .offline import offline_walk
from .seeds import hash_seed, hashed_uniform
from .sequences import SequenceCollator, WholeBatches

STATE_FILE = "trainer_state.json"


@dataclass
class DSpineTrainingArguments(TrainingArguments):
    r"""
    [`~transformers.TrainingArguments`] and what is special about a drafter.

    Args:
        anchors_per_sequence: blocks that are cut from each sequence in a step.
        max_length: sequences are cut to this many tokens.
        loss_unary, loss_conditional, loss_layer, loss_gamma, layer_loss, sharpness: see [`LossWeights`].
        distill, teacher_temperature, total_variation: see [`LossWeights`].
        forcing: probability of teacher forcing at the first step. forcing_until: share of the steps over which it
            falls to 0.
        optim_drafter: "adamw" follows `optim`; "muon" orthogonalises the updates of all matrices.
        compile_drafter: compile the drafter's pass and its loss; every batch is then padded to `max_length`.
        pad_multiple: batches are padded to a multiple of this many tokens.
        peak_tflops: dense peak of each device, which "mfu" in the log is a share of; None: by the GPU's name, where
            it is known (see [`PEAK_TFLOPS`]).
    """

    output_dir: str | None = field(default="dspine-drafter")
    per_device_train_batch_size: int = field(default=8)
    learning_rate: float = field(default=6e-4)
    lr_scheduler_type: str = field(default="cosine")
    warmup_steps: float = field(default=0.04)
    weight_decay: float = field(default=0.01)
    adam_beta2: float = field(default=0.95)
    logging_steps: float = field(default=10)
    save_steps: float = field(default=500)
    save_total_limit: int | None = field(default=2)
    remove_unused_columns: bool = field(default=False)
    report_to: None | str | list[str] = field(default="none")
    metric_for_best_model: str | None = field(default="acceptance_length")
    greater_is_better: bool | None = field(default=True)

    anchors_per_sequence: int = field(default=48, metadata={"help": "Blocks cut from each sequence in a step."})
    max_length: int = field(default=2048, metadata={"help": "Sequences are cut to this many tokens."})
    loss_unary: float = field(default=0.3, metadata={"help": "Weight of the unary cross-entropy."})
    loss_conditional: float = field(default=0.7, metadata={"help": "Weight of the conditional cross-entropy."})
    loss_layer: float = field(default=0.3, metadata={"help": "Weight of the layer-wise supervision."})
    loss_gamma: float | None = field(default=None, metadata={"help": "Decay length of the slot weights."})
    layer_loss: str = field(default="cosine", metadata={"help": "'cosine' or 'contrast'."})
    sharpness: float = field(default=20.0, metadata={"help": "Sharpness of the contrastive layer loss."})
    distill: float = field(default=0.0, metadata={"help": "Share of the target's softmax in the label."})
    teacher_temperature: float = field(default=1.0, metadata={"help": "Temperature of that softmax."})
    total_variation: float = field(default=0.0, metadata={"help": "Weight of the total-variation term."})
    forcing: float = field(default=0.0, metadata={"help": "Probability of teacher forcing at the first step."})
    forcing_until: float = field(default=0.6, metadata={"help": "Share of the steps until it is 0."})
    optim_drafter: str = field(default="adamw", metadata={"help": "'adamw' or 'muon'."})
    compile_drafter: bool = field(default=False, metadata={"help": "Compile the drafter's pass and loss."})
    pad_multiple: int = field(default=32, metadata={"help": "Batches are padded to a multiple of this."})
    peak_tflops: float | None = field(default=None, metadata={"help": "Dense peak of each device, for the log's MFU."})

    def __post_init__(self):
        if self.optim_drafter not in ("adamw", "muon"):
            raise ValueError(f"optim_drafter={self.optim_drafter!r} is unknown: choose 'adamw' or 'muon'.")
        self.compile_drafter = self.compile_drafter or bool(getattr(self, "torch_compile", False))
        self.torch_compile = False
        super().__post_init__()
        if self.device.type == "cuda":
            self._n_gpu = 1  # several GPUs are used through accelerate, one process each
        else:
            self.dataloader_pin_memory = False

    @property
    def whole_batch(self) -> int:
        """Sequences of a step: of all processes and accumulated batches."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def loss_weights(self) -> LossWeights:
        """The weights of the loss terms."""
        return LossWeights(
            unary=self.loss_unary,
            conditional=self.loss_conditional,
            layer=self.loss_layer,
            distill=self.distill,
            teacher_temperature=self.teacher_temperature,
            total_variation=self.total_variation,
            gamma=self.loss_gamma,
            layer_loss=self.layer_loss,
            sharpness=self.sharpness,
        )


class DraftLoss(nn.Module):
    """The module that is trained: sequences in, the drafter's loss out. Only the drafter is a submodule of it."""

    accepts_loss_kwargs = True

    def __init__(self, drafter: nn.Module, reader: TargetReader, weights: LossWeights, compiled: bool = False):
        super().__init__()
        self.drafter = drafter
        self.reader, self.weights, self.compiled = reader, weights, compiled
        self.states_fn = torch.compile(block_states, dynamic=False) if compiled else block_states

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        prompt_lengths: torch.Tensor,
        anchors: torch.Tensor | None = None,
        forcing: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """The loss and its parts; without anchors, the exact greedy [`Walk`] of one sequence (batch size 1)."""
        features, final = self.reader(tokens)
        view = self.drafter.bind_target(self.reader.target)
        if anchors is None:
            length = int(lengths[0])
            walk = offline_walk(self.drafter, view, features[:, :length], tokens[0, :length], int(prompt_lengths[0]))
            return {"walk": walk}
        need_final = bool(self.weights.distill or self.weights.total_variation)
        final = final if need_final else None
        batch = SequenceBatch(tokens, lengths, prompt_lengths, features, anchors, final, forcing)
        loss, parts = training_loss(
            self.drafter,
            view,
            batch,
            self.weights,
            states_fn=self.states_fn,
            compiled=self.compiled,
        )
        return {"loss": loss, **parts}


class DSpineTrainer(Trainer):
    """A Trainer whose steps do not depend on how many processes share the batch, and that saves drafters only.

    Args:
        drafter: the drafter to train, in fp32 (`bf16=True` computes in bf16); with LoRA layers, only they are trained.
        target: its frozen target, on this process's device (or spread over devices).
        args: [`DSpineTrainingArguments`].
        train_dataset, eval_dataset: [`TokenSequences`]. Evaluation reports the exact acceptance length at T = 0 when
            the responses are the target's own greedy ones.
    """

    optimizer: Any
    control: Any

    def __init__(self, drafter: nn.Module, target: Any, args: DSpineTrainingArguments, **options: Any):
        self.drafter = drafter
        if args.full_determinism:  # before the first product on a GPU, which is the next line's
            enable_full_determinism(args.seed)
        drafter.check_target(target)
        reader = TargetReader(target, drafter.config.target_layer_ids)
        padding = args.max_length if args.compile_drafter else None
        options.setdefault("data_collator", SequenceCollator(multiple=args.pad_multiple, length=padding))
        self.reader = reader
        if args.ddp_find_unused_parameters is None:  # the search costs a walk through the graph every step
            args.ddp_find_unused_parameters = not args.loss_layer or hasattr(drafter, "training_loss")
        module = DraftLoss(drafter, reader, args.loss_weights, args.compile_drafter)
        super().__init__(model=module, args=args, **options)
        if self.is_fsdp_enabled:
            _keep_buffers_in_fp32(self.accelerator.state.fsdp_plugin)
        self._parts: dict[str, torch.Tensor] = {}
        self._steps_since_log, self._started, self._work = 0, 0.0, (0, 0, 0.0)
        self._peak = args.peak_tflops or peak_tflops(args.device)

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return WholeBatches(len(dataset), self.args.whole_batch, self.args.seed, lambda: self.state.global_step)

    def _run_epoch(self, *args, **kwargs):  # the Trainer would go a step beyond the checkpoint of a finished run
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True

    # ---- one step -----------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of one step with their anchors, and the sum of slot weights over all processes."""
        if self._steps_since_log == 0:
            self._started, self._work = time.perf_counter(), (0, 0, 0.0)
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        step, rank, world = self.state.global_step, self.args.process_index, self.args.world_size
        gamma, size = self.args.loss_gamma, self.drafter.config.block_size
        total = torch.zeros((), device=device)
        self._steps_since_log += 1
        for i, batch in enumerate(batches):
            index, prompts, lengths = batch.pop("index"), batch["prompt_lengths"], batch["lengths"]
            offsets = hashed_uniform(self.args.seed, step, index, self.args.anchors_per_sequence)
            batch["anchors"] = sample_anchors(prompts, lengths, self.args.anchors_per_sequence, offsets=offsets)
            blocks = cut_blocks(batch["tokens"], prompts, lengths, batch["anchors"], size)
            batch["slot_weight"] = (blocks.valid * slot_weights(size, gamma, index.device)).sum()
            if (chance := self._forcing()) > 0:
                numbers = hashed_uniform(self.args.seed + 1, step, index, blocks.labels[0].numel())
                batch["forcing"] = numbers.view_as(blocks.labels) < chance
            batch["seed"] = hash_seed(self.args.seed, step, i * world + rank)
            self._count(*batch["tokens"].shape)
            total = total + batch["slot_weight"].to(device)
        return batches, self.accelerator.gather(total.reshape(1)).sum()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """This batch's share of the whole step's loss: the mean over all slots of all processes, by slot weight."""
        torch.manual_seed(inputs.pop("seed"))
        share = inputs.pop("slot_weight") / num_items_in_batch.clamp_min(1e-6) * self.args.world_size
        outputs = model(**inputs)
        for name, value in outputs.items():
            if name != "loss":
                self._parts[name] = self._parts.get(name, 0.0) + value.detach().float().mean() * share
        loss = outputs["loss"] * share
        return (loss, outputs) if return_outputs else loss

    def _count(self, sequences: int, length: int) -> None:
        """Add one batch to the work since the last log: tokens (padding included), blocks, operations."""
        anchors, target, config = self.args.anchors_per_sequence, self.reader.target, self.drafter.config
        flops = step_flops(target, config, self.args.loss_weights, sequences, length, anchors).total
        tokens, blocks, done = self._work
        self._work = (tokens + sequences * length, blocks + sequences * anchors, done + flops)

    def speed(self) -> dict[str, float]:
        """Tokens (padding included) and blocks per second of all processes since the last log; the MFU of one."""
        seconds, world = max(1e-9, time.perf_counter() - self._started), self.args.world_size
        tokens, blocks, flops = self._work
        found = {
            "tokens_per_second": round(world * tokens / seconds, 1),
            "blocks_per_second": round(world * blocks / seconds, 1),
        }
        if self._peak and not hasattr(self.drafter, "training_loss"):
            found["mfu"] = round(flops / seconds / self._peak / 1e12, 4)
        return found

    def _forcing(self) -> float:
        horizon = max(1.0, self.args.forcing_until * self.state.max_steps)
        return self.args.forcing * max(0.0, 1 - self.state.global_step / horizon)

    def create_optimizer(self, model=None):
        """Muon where the arguments ask for it, else what `optim` names."""
        if self.optimizer is None and self.args.optim_drafter == "muon":
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError("optim_drafter='muon' needs whole matrices; train with DDP, or with 'adamw'.")
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = MuonAdamW(
                list(self.drafter.named_parameters()),
                lr=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=betas,
            )
        return super().create_optimizer(model)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the loss's parts, averaged since the last log, and the speed to the logs of a training step."""
        if "loss" in logs and self._parts:
            sums = torch.stack([self._parts[name] for name in self._parts])
            means = self.accelerator.reduce(sums, reduction="mean") / max(1, self._steps_since_log)
            logs |= {name: round(mean, 6) for name, mean in zip(self._parts, means.tolist(), strict=True)}
            logs |= self.speed()
            self._parts, self._steps_since_log = {}, 0
        super().log(logs, *args, **kwargs)

    # ---- model selection ----------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Offline acceptance length over the evaluation sequences, which the processes share between them."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        model.eval()
        world, rank, slots = self.args.world_size, self.args.process_index, self.drafter.config.num_draft_slots
        sums = torch.zeros(2 + 2 * slots, device=self.args.device)
        for start in range(0, len(dataset), world):
            item = SequenceCollator(multiple=1)([dataset[min(start + rank, len(dataset) - 1)]])
            item.pop("index")
            with torch.no_grad(), self.compute_loss_context_manager():
                walk = model(**self._prepare_inputs(item))["walk"]
            if start + rank < len(dataset):
                row = [walk.new_tokens - 1, walk.rounds, *walk.trials, *walk.hits]
                sums += torch.tensor(row, device=sums.device)
        tokens, rounds, *counts = self.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = {f"{metric_key_prefix}_acceptance_length": tokens / max(1, rounds)}
        for slot in range(slots):
            metrics[f"{metric_key_prefix}_slot_{slot + 1}"] = counts[slots + slot] / max(1, counts[slot])
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        model.train()
        return metrics

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the Trainer does. A checkpoint that is written again counts as incomplete until its state is there."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / STATE_FILE).unlink(missing_ok=True)
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _is_of_torch_save(error):
                raise
            raise OSError(
                f"expected room for the checkpoint '{folder}'; found: {error}. Earlier checkpoints are whole: free "
                "some space, and the same command goes on from the last of them."
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write the drafter alone, as `from_pretrained` reads it; LoRA layers are merged, and kept beside it."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if is_adapted(self.drafter):
            save_adapter(self.drafter, folder)
            merged_copy(self.drafter).save_pretrained(folder)
        else:
            if state_dict is not None:
                state_dict = {name.removeprefix("drafter."): value for name, value in state_dict.items()}
            self.drafter.save_pretrained(folder, state_dict=state_dict)
        torch.save(self.args, folder / "training_args.bin")

    def save_drafter(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the finished drafter in `dtype` (the transfer space stays fp32). Call it on every process."""
        state = None
        if self.is_fsdp_enabled:
            state = self.accelerator.get_state_dict(self.model)
        if not self.args.should_save:
            return
        if state is None:
            drafter = merged_copy(self.drafter)
        else:
            drafter = type(self.drafter)(self.drafter.config)
            drafter.load_state_dict({name.removeprefix("drafter."): value for name, value in state.items()})
        drafter.to(dtype).save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._restore(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._restore(Path(self.state.best_model_checkpoint))

    def _restore(self, folder: Path) -> None:
        if is_adapted(self.drafter):
            load_adapter(self.drafter, folder)
            return
        saved = type(self.drafter).from_pretrained(folder, dtype=torch.float32)
        self.drafter.load_state_dict(saved.state_dict())


def _is_of_torch_save(error: BaseException) -> bool:
    """Whether torch.save raised it: a failed write has several messages there, and no class of its own."""
    return any(frame.filename.endswith("serialization.py") for frame in traceback.extract_tb(error.__traceback__))


def _keep_buffers_in_fp32(plugin: Any) -> None:
    """FSDP's mixed precision would cast the transfer space."""
    policy = plugin.mixed_precision_policy
    if getattr(policy, "buffer_dtype", None) is not None:
        plugin.mixed_precision_policy = replace(policy, buffer_dtype=torch.float32)


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint that was written to its end; None when there is none."""
    found = sorted(Path(output_dir).glob("checkpoint-*"), key=checkpoint_step)
    for folder in reversed(found):
        if _is_complete(folder):
            return str(folder)
    return None


def _is_complete(folder: Path) -> bool:
    """Whether the Trainer wrote the whole checkpoint: its state comes last."""
    try:
        return "global_step" in json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError):
        return False
