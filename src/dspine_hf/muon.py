"""Muon for the drafter's matrices (momentum orthogonalised by Newton-Schulz), AdamW for everything else.

Matrices of one shape are orthogonalised together in one batched product, which keeps the launch count small.
Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the update is scaled to
AdamW's size (0.2 sqrt(max(rows, columns))), so that one learning rate serves both.
"""

from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
TABLE_ROWS = 16384


def orthogonalise(stack: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest semi-orthogonal matrices, approximately: [n, rows, columns] -> the same shape, bf16 arithmetic."""
    a, b, c = COEFFICIENTS
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = (x / (x.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)).contiguous()
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return (x.mT if tall else x).to(stack.dtype)


class MuonAdamW(torch.optim.Optimizer):
    """Muon on matrices, AdamW on vectors and on tables with a row per token (16,384 rows or more).

    Args:
        named_parameters: (name, parameter) pairs.
        lr: learning rate of both halves. weight_decay: decoupled; matrices only.
        momentum: of Muon, Nesterov. betas, eps: of AdamW.
    """

    def __init__(self, named_parameters, lr=1e-3, weight_decay=0.01, momentum=0.95, betas=(0.9, 0.95), eps=1e-8):
        matrices: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for _, parameter in named_parameters:
            if parameter.requires_grad:
                table = parameter.ndim == 2 and parameter.shape[0] >= TABLE_ROWS
                (matrices if parameter.ndim == 2 and not table else rest).append(parameter)
        groups = [
            {"params": matrices, "muon": True, "weight_decay": weight_decay},
            {"params": rest, "muon": False, "weight_decay": 0.0},
        ]
        super().__init__(
            [g for g in groups if g["params"]], {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        )

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (self._muon_step if group["muon"] else self._adamw_step)(group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for shape, params in by_shape.items():
            grads = [p.grad.float() for p in params]
            momenta = [self._state(p, "momentum") for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            ahead = torch._foreach_lerp(grads, momenta, group["momentum"])
            updates = orthogonalise(torch.stack(ahead)).to(params[0].dtype)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates.unbind()), alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)

    def _adamw_step(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        beta1, beta2 = group["betas"]
        group["step"] = step = group.get("step", 0) + 1
        grads = [p.grad.float() for p in params]
        means, squares = ([self._state(p, name) for p in params] for name in ("mean", "square"))
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(params, means, roots, value=-group["lr"] / (1 - beta1**step))

    def _state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return state[name]
