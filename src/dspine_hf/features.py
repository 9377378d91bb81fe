"""The frozen target's hidden states for whole sequences: what a drafter learns from, computed on the fly."""

from typing import Any

import torch

from .compat_dspine import FeatureTaps


class TargetReader:
    """Runs the target's decoder (without its head) over right-padded sequences. It is no module, so nothing saves it.

    Args:
        target: the causal LM; it is put into eval mode and its parameters are frozen.
        layer_ids: the layers whose outputs a drafter reads (`config.target_layer_ids`).
    """

    def __init__(self, target: Any, layer_ids: list[int]):
        self.target = target.eval().requires_grad_(False)
        self.decoder = target.get_decoder()
        # Some families (Llama 4) name no decoder apart from the whole model: its last state is then the normed one.
        self.whole = self.decoder is target
        self.taps = FeatureTaps(self.decoder, layer_ids, self.whole)

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of tokens [batch, length]; a causal target's real rows do not see the padding on their right.

        Returns:
            Features [batch, length, len(layer_ids) * d], and the normed last states [batch, length, d], in the
            target's dtype, on the device of `tokens`.
        """
        device = tokens.device
        first = self.target.get_input_embeddings().weight.device
        options: dict[str, Any] = {"output_hidden_states": self.taps.request, "use_cache": False, "return_dict": True}
        if self.whole:
            options["logits_to_keep"] = 1
        with torch.autocast(device.type, enabled=False):
            outputs = self.decoder(input_ids=tokens.to(first), **options)
        states = [state.to(device) for state in self.taps.read(outputs)]
        final = outputs.hidden_states[-1] if self.whole else outputs.last_hidden_state
        return torch.cat(states, dim=-1), final.to(device)
