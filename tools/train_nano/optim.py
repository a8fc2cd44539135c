"""Muon for stacked matrices, AdamW for the rest; both driven by one schedule factor."""

import torch


def orthogonalize(g, steps=5):
    """Newton-Schulz iteration on a [layers, out, in] stack."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if tall else x).to(g.dtype)


class Optimizer:
    def __init__(self, model, stacks, muon_lr=0.01, adam_lr=3e-3, decay=0.1):
        self.muon = [p for n, p in model.named_parameters() if n in stacks]
        rest = [(n, p) for n, p in model.named_parameters() if n not in stacks]
        self.adam = torch.optim.AdamW(
            [
                dict(params=[p for _, p in rest if p.dim() >= 2 and p.shape[-2] > 64], weight_decay=0.05),
                dict(params=[p for _, p in rest if not (p.dim() >= 2 and p.shape[-2] > 64)], weight_decay=0.0),
            ],
            lr=adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=rest[0][1].is_cuda,
        )
        self.muon_lr, self.adam_lr, self.decay = muon_lr, adam_lr, decay
        self.buf = [torch.zeros_like(p) for p in self.muon]
        self.ortho = torch.compile(orthogonalize, dynamic=False) if rest[0][1].is_cuda else orthogonalize

    @torch.no_grad()
    def step(self, factor, momentum=0.95):
        for g in self.adam.param_groups:
            g["lr"] = self.adam_lr * factor
        self.adam.step()
        lr = self.muon_lr * factor
        for p, m in zip(self.muon, self.buf):
            m.lerp_(p.grad, 1 - momentum)
            u = self.ortho(p.grad.lerp(m, momentum))
            p.mul_(1 - lr * self.decay).add_(u, alpha=-lr * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)
        for p in self.muon + [q for g in self.adam.param_groups for q in g["params"]]:
            p.grad = None
