"""Muon for the hidden matrices (Jordan et al. 2024, public method): momentum, then the nearest orthogonal matrix."""
import torch


def is_hidden_matrix(name: str) -> bool:
    return name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "experts.gate_up_proj", "experts.down_proj"))


def orthogonal(g: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """Newton-Schulz iteration on a stack of matrices [n, r, c], in bfloat16."""
    x = g.bfloat16()
    flip = x.shape[1] > x.shape[2]
    if flip:
        x = x.mT
    x = x / (x.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
    for _ in range(rounds):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if flip else x


class Muon:
    def __init__(self, params: list, momentum: float, weight_decay: float):
        self.momentum, self.weight_decay = momentum, weight_decay
        self.buffers = [torch.zeros_like(p) for p in params]
        self.groups: dict = {}
        for p, b in zip(params, self.buffers):
            self.groups.setdefault(tuple(p.shape), []).append((p, b))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, members in self.groups.items():
            updates = []
            for p, b in members:
                b.lerp_(p.grad, 1 - self.momentum)
                updates.append(p.grad.lerp(b, self.momentum))
            stack = torch.stack(updates)
            matrices = stack.reshape(-1, shape[-2] // 2, shape[-1]) if len(shape) == 3 and shape[1] == 256 and shape[2] == 256 else stack.reshape(-1, *shape[-2:])
            scale = 0.2 * max(matrices.shape[1:]) ** 0.5  # as large per element as an Adam step
            out = orthogonal(matrices).reshape(stack.shape).float()
            for (p, _), u in zip(members, out):
                p.mul_(1 - lr * self.weight_decay).add_(u, alpha=-lr * scale)
