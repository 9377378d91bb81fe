"""SGLang, by contract on CPU (its DFLASH worker needs a GPU): what it calls on our classes, and what it gets."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from dspine_hf import DSpineConfig, DSpineDraftModel
from dspine_hf.serving.export import export
from dspine_hf.serving.sglang import attach_target
from helpers.sglang_stubs import install

pytest.importorskip("sglang", reason="run 'make test-sglang'")
install()

from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.plugins import load_plugins, load_plugins_by_group  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.speculative import dflash_worker_v2 as worker  # noqa: E402
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config  # noqa: E402
from transformers import AutoConfig  # noqa: E402

VOCAB, WIDTH = 97, 32


@pytest.fixture(scope="module", autouse=True)
def engine():
    """SGLang's runtime context for one CPU process, with the plug-ins loaded as the engine loads them."""
    override = get_context().override_server_args(device="cpu", tp_size=1)
    override.install()
    load_plugins()
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1, rank_in_group=0)):
        yield
    override.restore()


class Target(nn.Module):
    """The little that a drafter needs of its target."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.org_vocab_size = VOCAB
        self.config = DSpineConfig(hidden_size=WIDTH, vocab_size=VOCAB, transfer_rank=8)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head


class CachedAttention:
    """An attention backend over a cache per layer; only `save_kv_cache` writes the block's keys and values."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.context: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.block: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if save_kv_cache:
            self.block[layer.layer_id] = (k.clone(), v.clone())
        kv = []
        for context, block in zip(self.context[layer.layer_id], self.block[layer.layer_id], strict=True):
            rows = torch.cat(
                [t.view(self.blocks, -1, layer.tp_k_head_num, layer.head_dim) for t in (context, block)], 1
            )
            kv.append(rows.transpose(1, 2).repeat_interleave(layer.tp_q_head_num // layer.tp_k_head_num, 1))
        heads = q.view(self.blocks, -1, layer.tp_q_head_num, layer.head_dim).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, *kv).transpose(1, 2).reshape(q.shape[0], -1)


def random_drafter(seed: int, **fields) -> DSpineDraftModel:
    torch.manual_seed(seed)
    config = DSpineConfig(
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        block_size=5,
        num_target_layers=8,
        target_layer_ids=[1, 4],
        transfer_rank=8,
        num_candidates=4,
        **fields,
    )
    drafter = DSpineDraftModel(config).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
        drafter.transfer.W.normal_()
        drafter.transfer.c.normal_()
    return drafter


@pytest.fixture
def folder(tmp_path):
    drafter = random_drafter(0, injection_placement="mlp", rewrite_layers=2)
    drafter.save_pretrained(tmp_path / "drafter")
    export(tmp_path / "drafter", tmp_path / "serving", copy=True)
    return tmp_path / "serving"


def load(folder):
    """The drafter as SGLang builds it: the class of its architecture, on its config, from its files."""
    config = AutoConfig.from_pretrained(folder)
    cls, _ = ModelRegistry.resolve_model_cls(config.architectures)
    model = cls(config)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model.eval()


def test_the_entry_point_loads_and_the_architecture_resolves_to_our_class():
    register, package = load_plugins_by_group("sglang.srt.plugins")["dspine"]
    assert (register.__module__, package) == ("dspine_hf.serving.sglang", "dspine-hf")
    cls, name = ModelRegistry.resolve_model_cls(["DSpineDraftModel"])
    assert name == "DSpineDraftModel" and cls.__module__.startswith("dspine_hf.serving.")


def test_sglang_parses_the_exported_config(folder):
    parsed = parse_dflash_draft_config(draft_hf_config=AutoConfig.from_pretrained(folder))
    assert (parsed.block_size, parsed.num_target_layers, parsed.num_hidden_layers) == (5, 8, 3)
    assert parsed.resolve_target_layer_ids(target_num_layers=8) == [1, 4]
    assert (parsed.selector_rank, parsed.selector_top_k, parsed.mask_token_id) == (8, 4, 0)


def test_the_worker_gives_a_drafter_its_targets_head_when_it_is_made(folder):
    target = Target()
    made = worker.DFlashWorkerV2.__new__(worker.DFlashWorkerV2)
    made.draft_model, made.model_runner = load(folder), SimpleNamespace(model=target)
    attach_target(None, made)
    assert made.draft_model.lm_head is target.lm_head
    made.draft_model = nn.Identity()  # another drafter is left alone
    attach_target(None, made)
    assert worker.DFlashWorkerV2.__init__.__wrapped__.__qualname__ == "DFlashWorkerV2.__init__"


@pytest.mark.parametrize("damage", ["missing", "superfluous", "shape"])
def test_a_damaged_checkpoint_is_refused(folder, damage):
    tensors = load_file(folder / "model.safetensors")
    if damage == "missing":
        del tensors["layers.1.injection.U.weight"]
    elif damage == "superfluous":
        tensors["layers.1.injection.V.weight"] = torch.zeros(2)
    else:
        tensors["layers.1.injection.U.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors of this drafter; 1 are .*layers\.1\.injection\.[UV]\.weight"):
        load(folder)


@pytest.mark.parametrize(("field", "value"), [("chain_passes", 1), ("context_window", 4), ("embedding_scale", 2.0)])
def test_a_drafter_whose_drafts_would_be_wrong_is_refused_and_the_cure_named(tmp_path, field, value):
    drafter = random_drafter(0, **{"injection_placement": "mlp", "rewrite_layers": 2, field: value})
    drafter.save_pretrained(tmp_path / "drafter")
    export(tmp_path / "drafter", tmp_path / "serving")
    with pytest.raises(ValueError, match=f"{field}={value} is not supported with SGLang; use the drafter in Transf"):
        load(tmp_path / "serving")


@pytest.mark.parametrize("placement", ["mlp", "layer"])
@pytest.mark.parametrize("rewrite", [0, 1, 2])
@pytest.mark.parametrize("mask", [None, 5])
@torch.no_grad()
def test_the_workers_greedy_path_gives_the_tokens_of_the_transformers_drafter(tmp_path, placement, rewrite, mask):
    drafter = random_drafter(rewrite, injection_placement=placement, rewrite_layers=rewrite, mask_token_id=mask)
    drafter.save_pretrained(tmp_path / "drafter")
    export(tmp_path / "drafter", tmp_path / "serving")
    model, target, blocks, context = load(tmp_path / "serving"), Target(), 3, 6
    model.attach_target(target)
    features = torch.randn(blocks, context, 2 * WIDTH)
    anchors = torch.randint(VOCAB, (blocks,))

    cache = drafter.new_cache()
    drafter.extend_context(cache, features, torch.arange(context).expand(blocks, -1))
    view = drafter.bind_target(target)
    ours = drafter.draft_block(view, cache, anchors, torch.full((blocks,), context))
    wanted, index = [], None
    for slot in range(1, 5):
        index = ours.transitions.scores(slot, index).argmax(-1)
        wanted.append(ours.candidates[:, slot - 1].gather(1, index[:, None])[:, 0])

    backend = CachedAttention(blocks)
    hidden = model.project_target_hidden(features.flatten(0, 1))
    for i, layer in enumerate(model.layers):
        k, v = layer.self_attn.kv_proj_only(hidden)
        k = layer.self_attn.apply_k_rope(torch.arange(context).repeat(blocks), layer.self_attn.apply_k_norm(k))
        backend.context[i] = (k, v)
    ids = torch.full((blocks, 5), 5)
    ids[:, 0] = anchors
    positions = (context + torch.arange(5)).repeat(blocks)
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    with forward_context(ForwardContext(attn_backend=backend)):
        out = model(ids.flatten(), positions, batch, input_embeds=target.embed(ids).flatten(0, 1))
    states = out.hidden_states.view(blocks, 5, -1)[:, 1:]
    candidates, scores = worker._selector_lattice(model, states, anchors)
    tokens, q = model.candidate_selector.sample_path(
        candidate_ids=candidates,
        scores=scores,
        uniforms=torch.rand(blocks, 4),
        temperatures=torch.ones(blocks),
        greedy_mask=torch.ones(blocks, dtype=torch.bool),
    )
    assert torch.equal(candidates, ours.candidates)
    torch.testing.assert_close(scores[:, 1:], ours.transitions.pairs, rtol=1e-4, atol=1e-4)
    assert torch.equal(tokens, torch.stack(wanted, 1))
    assert torch.equal(q.sum(-1), torch.ones(blocks, 4))
