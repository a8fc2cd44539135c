"""SmolLM2-135M-Instruct (llama architecture) read from its Q4_1 GGUF file, as a decode-step model."""

import numpy as np
import torch
import torch.nn.functional as F

from sampler import write_cache


def read_gguf(path):
    """(metadata, {name: float32 numpy array})."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    r = GGUFReader(str(path))
    return {k: f.contents() for k, f in r.fields.items()}, {
        t.name: dequantize(t.data, t.tensor_type) for t in r.tensors
    }


def tokenizer_from_gguf(meta):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    toks, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tk = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(toks)}, merges=merges))
    tk.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, y in zip(toks, types) if y == 3])
    return tk


def _rms(x, w, eps):
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * w).to(x.dtype)


def _rope_pairs(x, cos, sin):
    """Interleaved rotary layout, which is how llama-arch GGUF files store Q and K."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[:, None], sin[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


def _layer(x, n1, wqkv, wo, n2, wgu, wd, kc, vc, cos, sin, pos, rows, hq, hkv, d, eps, attend):
    q, k, v = F.linear(_rms(x, n1, eps), wqkv).split([hq * d, hkv * d, hkv * d], -1)
    q, k = _rope_pairs(q.view(-1, hq, d), cos, sin), _rope_pairs(k.view(-1, hkv, d), cos, sin)
    write_cache(kc, vc, k, v.reshape(-1, hkv, d), pos, rows)
    x = x + F.linear(attend(q, kc, vc, pos, 0).flatten(1), wo)
    g, u = F.linear(_rms(x, n2, eps), wgu).chunk(2, -1)
    return x + F.linear(F.silu(g) * u, wd)


class Teacher:
    def __init__(self, meta, w, device="cuda", dtype=torch.bfloat16, max_len=512, compiled=True):
        g = lambda k: meta["llama." + k]
        self.n_layers, self.hq, self.n_kv_heads = (
            g("block_count"),
            g("attention.head_count"),
            g("attention.head_count_kv"),
        )
        self.hidden, self.eps = g("embedding_length"), g("attention.layer_norm_rms_epsilon")
        self.head_dim = self.hidden // self.hq
        t = lambda n: torch.from_numpy(np.ascontiguousarray(w[n])).to(device, dtype)
        f = lambda n: torch.from_numpy(np.ascontiguousarray(w[n])).to(device, torch.float32)
        self.emb = t("token_embd.weight")
        self.vocab = self.emb.shape[0]
        self.head = t("output.weight") if "output.weight" in w else self.emb
        self.norm = f("output_norm.weight")
        self.layers = []
        for i in range(self.n_layers):
            p = f"blk.{i}."
            self.layers.append(
                (
                    f(p + "attn_norm.weight"),
                    torch.cat([t(p + f"attn_{c}.weight") for c in "qkv"]),
                    t(p + "attn_output.weight"),
                    f(p + "ffn_norm.weight"),
                    torch.cat([t(p + "ffn_gate.weight"), t(p + "ffn_up.weight")]),
                    t(p + "ffn_down.weight"),
                )
            )
        inv = 1.0 / (float(g("rope.freq_base")) ** (torch.arange(0, self.head_dim, 2).double() / self.head_dim))
        ang = torch.arange(max_len).double()[:, None] * inv[None]
        self.cos, self.sin = ang.cos().float().to(device), ang.sin().float().to(device)
        self.layer = torch.compile(_layer, dynamic=False) if compiled else _layer
        self.rows = None

    @torch.no_grad()
    def step(self, tok, pos, caches, attend):
        if self.rows is None or len(self.rows) != len(tok):
            self.rows = torch.arange(len(tok), device=tok.device)
        x, cos, sin = self.emb[tok], self.cos[pos], self.sin[pos]
        for w, (kc, vc) in zip(self.layers, caches):
            x = self.layer(
                x, *w, kc, vc, cos, sin, pos, self.rows, self.hq, self.n_kv_heads, self.head_dim, self.eps, attend
            )
        return F.linear(_rms(x, self.norm, self.eps), self.head)
