"""Muon for the drafter's matrices (momentum orthogonalised by Newton-Schulz), AdamW for everything else.

Matrices of one shape are orthogonalised together in one batched product, which keeps the launch count small.
Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the update is scaled to
AdamW's size (0.2 sqrt(max(rows, columns))), so that one learning rate serves both.
"""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest semi-orthogonal matrices, approximately: [n, rows, columns] -> the same shape, bf16 arithmetic."""
    a, b, c = COEFFICIENTS
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(stack.dtype)


class MuonAdamW(torch.optim.Optimizer):
    """Muon on matrices, AdamW on vectors and on whatever `is_matrix` says no to.

    Args:
        named_parameters: (name, parameter) pairs.
        lr: learning rate of both halves. weight_decay: decoupled; matrices only.
        momentum: of Muon, Nesterov. betas, eps: of AdamW.
    """

    def __init__(self, named_parameters, lr=1e-3, weight_decay=0.01, momentum=0.95, betas=(0.9, 0.95), eps=1e-8):
        matrices, rest = [], []
        for _, parameter in named_parameters:
            if parameter.requires_grad:
                (matrices if parameter.ndim == 2 else rest).append(parameter)
        groups = [
            {"params": matrices, "muon": True, "weight_decay": weight_decay},
            {"params": rest, "muon": False, "weight_decay": 0.0},
        ]
        super().__init__([g for g in groups if g["params"]], {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps})

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

    def _muon_step(self, group) -> None:
        by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for shape, params in by_shape.items():
            grads = [p.grad.float() for p in params]
            momenta = [self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32)) for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            torch._foreach_lerp_(grads, momenta, group["momentum"])
            updates = orthogonalise(torch.stack(grads)) * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates.to(params[0].dtype)), alpha=-group["lr"])

    def _adamw_step(self, group) -> None:
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["mean"] = torch.zeros_like(p, dtype=torch.float32)
                state["square"] = torch.zeros_like(p, dtype=torch.float32)
            state["step"] += 1
            grad = p.grad.float()
            state["mean"].lerp_(grad, 1 - beta1)
            state["square"].lerp_(grad.square(), 1 - beta2)
            mean = state["mean"] / (1 - beta1 ** state["step"])
            root = (state["square"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_((mean / root).to(p.dtype), alpha=-group["lr"])
