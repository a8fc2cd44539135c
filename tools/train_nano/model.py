"""nano-glimmer: the Muse Glimmer text architecture and its DFlash drafter in plain torch.

Matrices of all layers are kept stacked ([layer, out, in]) so that the optimizer
can work on whole stacks.  Q and K use the "rotate half" rotary layout; the
export to GGUF re-orders the target's rows (see export_gguf.py).
"""

import math
from dataclasses import asdict, dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

QK_SCALE = 3.87
EPS, POST_EPS = 1e-5, 1e-8


@dataclass
class Config:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    ffn: int = 768
    window: int = 128
    context: int = 2048
    theta: float = 500000.0
    softcap: float = 20.0

    @property
    def logit_scale(self):
        return 1.0 / math.sqrt(self.hidden / 256)

    @property
    def full(self):  # every 4th layer counted back from the last is full attention without RoPE
        return [(self.layers - 1 - i) % 4 == 0 for i in range(self.layers)]


@dataclass
class DraftConfig:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    ffn: int = 768
    window: int = 128
    block: int = 16
    target_layers: list = field(default_factory=lambda: [1, 4, 6])  # outputs of these target layers
    mask_token: int = 0


def rms(x, w=None, eps=EPS):
    f = x.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return (f if w is None else f * w).to(x.dtype)


def rope_table(n, d, theta, device=None):
    inv = 1.0 / (theta ** (torch.arange(0, d, 2, dtype=torch.float64) / d))
    ang = torch.arange(n, dtype=torch.float64)[:, None] * inv[None]
    return ang.cos().float().to(device), ang.sin().float().to(device)


def rope(x, cos, sin):
    """x [..., heads, d]; cos/sin [..., d/2] without the head axis."""
    a, b = x.float().chunk(2, -1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def sdpa(q, k, v, mask=None, causal=False):
    """[B, T, H, D] attention; kv heads are repeated to the number of query heads."""
    rep = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(rep, 2), v.repeat_interleave(rep, 2)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


def linear(x, w):
    return F.linear(x, w.to(x.dtype))


class Target(nn.Module):
    STACKS = ("wq", "wk", "wv", "wg", "wo", "w1", "w3", "w2")
    NORMS = ("attn_norm", "attn_post", "ffn_norm", "ffn_post")

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        L, H, A, K = c.layers, c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim
        mat = lambda o, i, s=1.0: nn.Parameter(torch.randn(L, o, i) * (s / math.sqrt(i)))
        self.wq, self.wk, self.wv, self.wg = mat(A, H), mat(K, H), mat(K, H), mat(A, H, 0.5)
        self.wo, self.w1, self.w3, self.w2 = mat(H, A), mat(c.ffn, H), mat(c.ffn, H), mat(H, c.ffn)
        # centred norms: the effective weight is 1 + p; the post norms start small so that
        # every block begins as a gentle correction of the residual stream
        self.attn_norm, self.ffn_norm = (nn.Parameter(torch.zeros(L, H)) for _ in range(2))
        self.attn_post, self.ffn_post = (nn.Parameter(torch.full((L, H), 0.25 - 1.0)) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(H))
        self.emb = nn.Parameter(torch.randn(c.vocab, H) * 0.1)
        self.head = nn.Parameter(torch.randn(c.vocab, H) * 0.02)
        cos, sin = rope_table(c.context + 64, c.head_dim, c.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.attend = None  # optional replacement: f(q, k, v, window or 0)

    def block_params(self, i):
        return {n: getattr(self, n)[i] for n in self.STACKS + self.NORMS}

    def qkvg(self, x, p, cos, sin):
        c = self.c
        h = rms(x, 1 + p["attn_norm"])
        q = rms(linear(h, p["wq"]).unflatten(-1, (c.heads, -1))) * QK_SCALE
        k = rms(linear(h, p["wk"]).unflatten(-1, (c.kv_heads, -1)))
        v = linear(h, p["wv"]).unflatten(-1, (c.kv_heads, -1))
        if cos is not None:
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        return q, k, v, torch.sigmoid(linear(h, p["wg"]))

    def finish(self, x, att, gate, p):
        x = x + rms(linear(att * gate, p["wo"]), 1 + p["attn_post"], POST_EPS)
        h = rms(x, 1 + p["ffn_norm"])
        h = linear(F.silu(linear(h, p["w1"])) * linear(h, p["w3"]), p["w2"])
        return x + rms(h, 1 + p["ffn_post"], POST_EPS)

    def block(self, x, p, full, cos, sin, mask):
        q, k, v, gate = self.qkvg(x, p, None if full else cos, sin)
        if self.attend is not None:
            att = self.attend(q, k, v, 0 if full else self.c.window)
        else:
            att = sdpa(q, k, v, None if full else mask, causal=full)
        return self.finish(x, att.flatten(-2), gate, p)

    def embed(self, tok, dtype):
        return rms(self.emb[tok].to(dtype))

    def hidden(self, tok, dtype=torch.float32, taps=()):
        """Residual stream after the last layer, and after the layers in `taps`."""
        t = tok.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        mask = None
        if self.attend is None:
            i = torch.arange(t, device=tok.device)
            mask = (i[:, None] >= i[None]) & (i[:, None] - i[None] < self.c.window)
        x, kept = self.embed(tok, dtype), []
        for i, full in enumerate(self.c.full):
            x = self.block(x, self.block_params(i), full, cos, sin, mask)
            if i in taps:
                kept.append(x)
        return (x, torch.cat(kept, -1)) if taps else x

    def logits_raw(self, h):
        """Head only: what the drafter is trained with (its own final norm comes before)."""
        return linear(h, self.head)

    def logits(self, x):
        z = self.logits_raw(rms(x, self.norm)).float() * self.c.logit_scale
        return self.c.softcap * torch.tanh(z / self.c.softcap)

    def forward(self, tok, dtype=torch.float32):
        return self.logits(self.hidden(tok, dtype))


class TargetStep:
    """Decode-step view of a trained target for sampler.Sampler."""

    def __init__(self, model: Target, dtype, compiled):
        from sampler import write_cache

        c = model.c
        self.m, self.dtype, self.vocab = model, dtype, c.vocab
        self.n_layers, self.n_kv_heads, self.head_dim = c.layers, c.kv_heads, c.head_dim

        def layer(x, p, window, cos, sin, kc, vc, pos, rows, attend):
            q, k, v, gate = model.qkvg(x, p, cos if window else None, sin)
            write_cache(kc, vc, k, v, pos, rows)
            return model.finish(x, attend(q, kc, vc, pos, window).flatten(-2), gate, p)

        self.layer = torch.compile(layer, dynamic=False) if compiled else layer
        self.params = [
            {k: v.detach().to(dtype) if k in model.STACKS else v.detach() for k, v in model.block_params(i).items()}
            for i in range(c.layers)
        ]

    @torch.no_grad()
    def step(self, tok, pos, caches, attend):
        m = self.m
        x, cos, sin = m.embed(tok, self.dtype), m.cos[pos], m.sin[pos]
        rows = torch.arange(len(tok), device=tok.device)
        for p, full, (kc, vc) in zip(self.params, m.c.full, caches):
            x = self.layer(x, p, 0 if full else m.c.window, cos, sin, kc, vc, pos, rows, attend)
        return m.logits(x)


class Drafter(nn.Module):
    """DFlash: one bidirectional pass over [last token, mask * (block - 1)] fills the block.

    Keys and values of the context come from the fused hidden states of the
    frozen target; embedding (without the target's norm) and head are the target's.
    """

    STACKS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
    NORMS = ("q_norm", "k_norm", "attn_norm", "ffn_norm")

    def __init__(self, c: Config, d: DraftConfig):
        super().__init__()
        self.c, self.d = c, d
        L, H, A, K = d.layers, c.hidden, d.heads * d.head_dim, d.kv_heads * d.head_dim
        mat = lambda o, i, s=1.0: nn.Parameter(torch.randn(L, o, i) * (s / math.sqrt(i)))
        self.fc = nn.Parameter(torch.randn(H, len(d.target_layers) * H) / math.sqrt(len(d.target_layers) * H))
        self.enc_norm, self.norm = nn.Parameter(torch.ones(H)), nn.Parameter(torch.ones(H))
        self.wq, self.wk, self.wv, self.wo = mat(A, H), mat(K, H), mat(K, H), mat(H, A, 0.3)
        self.w1, self.w3, self.w2 = mat(d.ffn, H), mat(d.ffn, H), mat(H, d.ffn, 0.3)
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(L, d.head_dim)) for _ in range(2))
        self.attn_norm, self.ffn_norm = (nn.Parameter(torch.ones(L, H)) for _ in range(2))
        cos, sin = rope_table(c.context + 64, d.head_dim, c.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def fuse(self, taps):
        return rms(linear(taps, self.fc), self.enc_norm)

    def key_value(self, h, i, pos):
        k = rms(linear(h, self.wk[i]).unflatten(-1, (self.d.kv_heads, -1)), self.k_norm[i])
        v = linear(h, self.wv[i]).unflatten(-1, (self.d.kv_heads, -1))
        return rope(k, self.cos[pos], self.sin[pos]), v

    def block_hidden(self, noise, qpos, ctx, cpos, mask):
        """noise [B, N, H] raw embeddings at positions qpos [B, N]; ctx [B, T, H] fused context at
        cpos; mask [B, 1, N, T + N] says which of (context, block) keys each query may see."""
        x = noise
        for i in range(self.d.layers):
            h = rms(x, self.attn_norm[i])
            q = rms(linear(h, self.wq[i]).unflatten(-1, (self.d.heads, -1)), self.q_norm[i])
            q = rope(q, self.cos[qpos], self.sin[qpos])
            kc, vc = self.key_value(ctx, i, cpos)
            kb, vb = self.key_value(h, i, qpos)
            att = sdpa(q, torch.cat((kc, kb), 1), torch.cat((vc, vb), 1), mask)
            x = x + linear(att.flatten(-2), self.wo[i])
            h = rms(x, self.ffn_norm[i])
            x = x + linear(F.silu(linear(h, self.w1[i])) * linear(h, self.w3[i]), self.w2[i])
        return rms(x, self.norm)


def block_mask(anchor, t, block, window):
    """anchor [B, A] positions of the known last tokens -> bool [B, 1, A*block, t + A*block]."""
    b, a = anchor.shape
    qpos = (anchor[..., None] + torch.arange(block, device=anchor.device)).view(b, -1)
    owner = torch.arange(a, device=anchor.device).repeat_interleave(block)
    cp = torch.arange(t, device=anchor.device)
    seen = (cp < anchor[..., None]).repeat_interleave(block, 1)
    ctx = seen & (qpos[..., None] - cp < window)
    own = (owner[:, None] == owner[None]).expand(b, -1, -1)
    return qpos, torch.cat((ctx, own), -1)[:, None]


def save(path, target=None, drafter=None, **extra):
    d = dict(extra)
    if target is not None:
        d.update(config=asdict(target.c), target={k: v.detach().float().cpu() for k, v in target.state_dict().items()})
    if drafter is not None:
        d.update(
            draft_config=asdict(drafter.d),
            drafter={k: v.detach().float().cpu() for k, v in drafter.state_dict().items()},
        )
    torch.save(d, path)


def load_target(path, device="cpu"):
    d = torch.load(path, map_location="cpu", weights_only=True)
    m = Target(Config(**d["config"]))
    m.load_state_dict(d["target"])
    return m.to(device), d
