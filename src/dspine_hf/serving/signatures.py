"""What the plug-ins rely on in each engine, read from its source without importing it; a drift means: do not register.

Each line of a table names a function and parameters. "override": we define it again and the engine calls ours, so its
parameters must be exactly these. "call": we call it with these, so they must exist and no other may be required.
"fields": attributes that a class must declare.
"""

import ast
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Relied:
    """One line of a table: a place in the engine's source, and what must hold there."""

    file: str
    name: str
    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Engine:
    """An engine: its package, the version the table was checked with, and the table."""

    package: str
    version: str
    table: tuple[Relied, ...]


_V = "model_executor/models/qwen3_dflash.py"
_V2 = "model_executor/models/qwen3_dflash2.py"
_WALK = "v1/worker/gpu/spec_decode/dflash2/speculator.py"
_CPU = "v1/attention/backends/cpu_attn.py"
_FLASH = "v1/attention/backends/flash_attn.py"
_TRITON = "v1/attention/backends/triton_attn.py"
_ATTEND = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_METADATA = ("num_actual_tokens", "max_query_len", "query_start_loc", "seq_lens", "scheduler_metadata", "causal")
_LAYER = ("self", "vllm_config", "config", "layer_idx", "cache_config", "quant_config", "prefix")

VLLM = Engine(
    "vllm",
    "0.32.0",
    (
        Relied(_V, "DFlashQwen3DecoderLayer.__init__", "override", _LAYER),
        Relied(_V, "DFlashQwen3Model.__init__", "override", ("self", "vllm_config", "start_layer_id", "prefix")),
        Relied(_V, "DFlashQwen3Model.load_weights", "call", ("self", "weights")),
        Relied(_V, "DFlashQwen3Model._build_fused_kv_buffers", "call", ("self",)),
        Relied(_V, "DFlashQwen3Model._normalize_context_k", "override", ("self", "all_k")),
        Relied(_V, "DFlashQwen3ForCausalLM.__init__", "override", ("self", "vllm_config", "prefix")),
        Relied(
            _V,
            "DFlashQwen3ForCausalLM.forward",
            "override",
            ("self", "input_ids", "positions", "inputs_embeds"),
        ),
        Relied(_V, "DFlashQwen3ForCausalLM.compute_logits", "override", ("self", "hidden_states")),
        Relied(_V, "DFlashQwen3ForCausalLM.load_weights", "override", ("self", "weights")),
        Relied(_V, "DFlashQwen3Attention.forward", "call", ("self", "positions", "hidden_states")),
        Relied(_CPU, "CPUAttentionMetadata", "fields", _METADATA),
        Relied(_CPU, "CPUAttentionBackendImpl.forward", "call", ("self", *_ATTEND)),
        Relied(_FLASH, "FlashAttentionMetadata", "fields", _METADATA),
        Relied(_FLASH, "FlashAttentionImpl.forward", "call", ("self", *_ATTEND)),
        Relied(_TRITON, "TritonAttentionMetadata", "fields", _METADATA),
        Relied(_TRITON, "TritonAttentionImpl.forward", "call", ("self", *_ATTEND)),
        Relied(
            "_custom_ops.py",
            "cpu_attn_get_scheduler_metadata",
            "call",
            (
                "num_reqs",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "seq_lens",
                "dtype",
                "query_start_loc",
                "causal",
                "sliding_window_size",
                "isa",
                "enable_kv_split",
            ),
        ),
        Relied(
            "model_executor/layers/logits_processor.py",
            "LogitsProcessor.forward",
            "call",
            ("self", "lm_head", "hidden_states", "embedding_bias"),
        ),
        Relied(
            _WALK,
            "DFlash2Speculator._score_candidates",
            "call",
            ("self", "candidate_ids", "unary_logits", "hidden_states"),
        ),
        Relied(_V2, "DFlash2Qwen3ForCausalLM.compute_candidates", "override", ("self", "hidden_states")),
        Relied(
            _V2,
            "CandidateSelector.forward",
            "override",
            ("self", "candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids"),
        ),
        Relied("forward_context.py", "get_forward_context", "call", ()),
        Relied(
            "model_executor/models/registry.py",
            "_ModelRegistry.register_model",
            "call",
            ("self", "model_arch", "model_cls"),
        ),
    ),
)

_S = "srt/models/dflash.py"
_LATTICE = ("candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids")
_CONTEXT = ("input_ids", "positions", "forward_batch", "input_embeds", "get_embedding", "pp_proxy_tensors")

SGLANG = Engine(
    "sglang",
    "0.5.23",
    (
        Relied(_S, "DFlashAttention.__init__", "override", ("self", "config", "layer_id", "quant_config", "prefix")),
        Relied(_S, "DFlashAttention.forward", "override", ("self", "positions", "hidden_states", "forward_batch")),
        Relied(
            _S,
            "DFlashDecoderLayer.__init__",
            "override",
            ("self", "config", "layer_id", "attention_conv", "mlp_conv", "quant_config", "prefix"),
        ),
        Relied(_S, "DFlashDraftModel.__init__", "override", ("self", "config", "quant_config", "prefix")),
        Relied(_S, "DFlashDraftModel.forward", "override", ("self", *_CONTEXT)),
        Relied(_S, "DFlashDraftModel.set_block_size", "override", ("self", "block_size")),
        Relied(_S, "DFlashDraftModel.load_weights", "override", ("self", "weights")),
        Relied(_S, "CandidateSelector.build_lattice", "override", ("self", *_LATTICE)),
        Relied(
            _S,
            "CandidateSelector.sample_path",
            "override",
            ("self", "candidate_ids", "scores", "uniforms", "temperatures", "greedy_mask"),
        ),
        Relied(_S, "DFlash2DraftModel.compute_candidates", "override", ("self", "hidden")),
        Relied(_S, "DFlash2DraftModel._transform_unary_logits", "call", ("self", "logits")),
        Relied(
            "srt/layers/radix_attention.py",
            "RadixAttention.forward",
            "call",
            ("self", "q", "k", "v", "forward_batch", "save_kv_cache"),
        ),
        Relied(
            "srt/speculative/dflash_worker_v2.py",
            "_selector_lattice",
            "override",
            ("draft_model", "pred_hidden", "anchor_token_ids"),
        ),
        Relied(
            "srt/speculative/dflash_worker_v2.py",
            "DFlashWorkerV2.__init__",
            "override",
            ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        ),
        Relied(
            "srt/models/registry.py",
            "_ModelRegistry.register",
            "call",
            ("self", "package_name", "overwrite", "strict"),
        ),
        Relied(
            "srt/plugins/hook_registry.py", "HookRegistry.register", "call", ("cls", "target", "hook", "hook_type")
        ),
    ),
)


def fits(engine: Engine, name: str) -> bool:
    """Whether a plug-in may register with the installed engine; where not, a warning says what differs."""
    found = drift(engine)
    if found:
        logging.getLogger(__name__).warning(
            "DSpine is not registered: this %s differs from %s, which works, in %s. Install that version, or serve "
            "without a DSpine drafter.",
            name,
            engine.version,
            "; ".join(found),
        )
    return not found


def drift(engine: Engine, root: Path | None = None) -> list[str]:
    """Where the engine's source differs from the table; empty when nothing does.

    Args:
        root: the engine's package folder; None: the installed one's.
    """
    root = package_folder(engine.package) if root is None else root
    if root is None:
        return [f"{engine.package} is not installed"]
    trees: dict[str, ast.Module | None] = {}
    found = []
    for relied in engine.table:
        if relied.file not in trees:
            path = root / relied.file
            trees[relied.file] = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None
        tree = trees[relied.file]
        problem = "no such file" if tree is None else _problem(relied, _definition(tree, relied.name))
        if problem:
            found.append(f"{engine.package}/{relied.file}: {relied.name}: {problem}")
    return found


def package_folder(package: str) -> Path | None:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def _definition(tree: ast.Module, name: str) -> ast.AST | None:
    """The class or function of this dotted name."""
    node: ast.AST = tree
    for part in name.split("."):
        inner = [
            n for n in getattr(node, "body", []) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part
        ]
        if not inner:
            return None
        node = inner[-1]
    return node


def _problem(relied: Relied, node: ast.AST | None) -> str | None:
    """What is wrong with a definition; None: nothing."""
    if node is None:
        return "not found"
    wanted = set(relied.names)
    if relied.kind == "fields":
        assert isinstance(node, ast.ClassDef)
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        missing = sorted(wanted - fields)
        return f"no field {', '.join(missing)}" if missing else None
    if not isinstance(node, ast.FunctionDef):
        return "not a function"
    names, required = _parameters(node.args)
    if relied.kind == "override" and names != wanted:
        return f"expected the parameters {', '.join(relied.names)}; found {', '.join(sorted(names))}"
    missing, new = sorted(wanted - names), sorted(required - wanted)
    if missing or new:
        return f"expected the parameters {', '.join(relied.names) or 'none'}; found {', '.join(sorted(names))}"
    return None


def _parameters(args: ast.arguments) -> tuple[set[str], set[str]]:
    """Names of all parameters, and of those without a default."""
    positional = [a.arg for a in (*args.posonlyargs, *args.args)]
    keyword = [a.arg for a in args.kwonlyargs]
    required = set(positional[: len(positional) - len(args.defaults)])
    required |= {name for name, default in zip(keyword, args.kw_defaults, strict=True) if default is None}
    return {*positional, *keyword}, required
