"""Fast batched text sampler with continuous slot refilling.

One decode step is captured in a CUDA graph and replayed; every slot of the
batch has its own length, so a finished slot starts its next prompt in the very
next step.  Prompts are fed through the same step (one token at a time, the
sampled token being ignored), which removes the need for a prefill path.  A
prefix that all prompts share is computed once and stays in every slot's cache.

A model gives: `n_layers, n_kv_heads, head_dim, vocab`, `windows` (0 = full
attention) and `step(tok, pos, caches, attend) -> logits`.
"""

import math
import time

import torch

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # CPU-only machine
    HAVE_TRITON = False

if HAVE_TRITON:

    @triton.jit
    def _decode_attention(
        q_ptr,
        k_ptr,
        v_ptr,
        o_ptr,
        pos_ptr,
        T,
        window,
        SCALE: tl.constexpr,
        HKV: tl.constexpr,
        G: tl.constexpr,
        GP: tl.constexpr,
        D: tl.constexpr,
        BN: tl.constexpr,
    ):
        """One program per (slot, kv head): G query heads against the slot's keys."""
        b = tl.program_id(0)
        h = tl.program_id(1)
        n = tl.load(pos_ptr + b).to(tl.int32) + 1
        first = tl.maximum(n - window, 0)
        g = tl.arange(0, GP)
        d = tl.arange(0, D)
        r = tl.arange(0, BN)
        qoff = (b * HKV * G + h * G + g[:, None]) * D + d[None, :]
        q = tl.load(q_ptr + qoff, mask=g[:, None] < G, other=0.0)
        base = (b.to(tl.int64) * HKV + h) * T * D
        m = tl.full([GP], -1e30, tl.float32)
        l = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        for j in range((first // BN) * BN, n, BN):
            t = j + r
            ok = (t < n) & (t >= first)
            k = tl.load(k_ptr + base + t[None, :] * D + d[:, None], mask=ok[None, :], other=0.0)
            s = tl.dot(q, k) * SCALE
            s = tl.where(ok[None, :], s, -1e30)
            m2 = tl.maximum(m, tl.max(s, 1))
            p = tl.exp(s - m2[:, None])
            c = tl.exp(m - m2)
            l = l * c + tl.sum(p, 1)
            v = tl.load(v_ptr + base + t[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
            acc = acc * c[:, None] + tl.dot(p.to(v.dtype), v)
            m = m2
        out = acc / l[:, None]
        tl.store(o_ptr + qoff, out.to(o_ptr.dtype.element_ty), mask=g[:, None] < G)


def attend_triton(q, kc, vc, pos, window):
    b, hq, d = q.shape
    hkv, t = kc.shape[1], kc.shape[2]
    o = torch.empty_like(q)
    _decode_attention[(b, hkv)](
        q,
        kc,
        vc,
        o,
        pos,
        t,
        window or (1 << 30),
        SCALE=1.0 / math.sqrt(d),
        HKV=hkv,
        G=hq // hkv,
        GP=16,
        D=d,
        BN=64,
        num_warps=4,
    )
    return o


def attend_plain(q, kc, vc, pos, window):
    """Reference for the kernel above, and what the CPU uses."""
    b, hq, d = q.shape
    hkv, t = kc.shape[1], kc.shape[2]
    s = torch.einsum("bhgd,bhtd->bhgt", q.view(b, hkv, hq // hkv, d).float(), kc.float()) / math.sqrt(d)
    i = torch.arange(t, device=q.device)[None, :]
    ok = (i <= pos[:, None]) & (i > pos[:, None] - (window or (1 << 30)))
    s = s.masked_fill(~ok[:, None, None, :], float("-inf")).softmax(-1)
    return torch.einsum("bhgt,bhtd->bhgd", s, vc.float()).reshape(b, hq, d).to(q.dtype)


def write_cache(kc, vc, k, v, pos, rows):
    kc[rows, :, pos] = k
    vc[rows, :, pos] = v


def pick(logits, temp, noise, log_min_p):
    """Gumbel-max sampling at a per-slot temperature with a min-p cut; temp 0 = greedy."""
    z = logits.float()
    top = z.amax(-1, keepdim=True)
    z = torch.where(z < top + temp[:, None] * log_min_p, float("-inf"), z)
    return (z - temp[:, None] * torch.log(noise)).argmax(-1)


class Sampler:
    def __init__(
        self,
        model,
        prefix,
        prompts,
        eos,
        slots,
        max_len,
        temp,
        min_p=0.05,
        device="cuda",
        dtype=torch.bfloat16,
        max_steps=60000,
        compiled=True,
    ):
        self.model, self.eos, self.B, self.T, self.dev = model, eos, slots, max_len, device
        self.P = len(prefix)
        lens = torch.tensor([len(p) for p in prompts])
        self.ptab = torch.zeros(len(prompts), int(lens.max()) + 1, dtype=torch.int32)
        for i, p in enumerate(prompts):
            self.ptab[i, : len(p)] = torch.tensor(p, dtype=torch.int32)
        self.ptab, self.plen = self.ptab.to(device), lens.to(device)
        self.n_prompts = len(prompts)
        self.cuda = device == "cuda"
        self.attend = attend_triton if self.cuda else attend_plain
        self.caches = [
            tuple(
                torch.zeros(slots, model.n_kv_heads, max_len, model.head_dim, device=device, dtype=dtype)
                for _ in range(2)
            )
            for _ in range(model.n_layers)
        ]
        self.temp = temp.to(device) if torch.is_tensor(temp) else torch.full((slots,), float(temp), device=device)
        self.log_min_p = math.log(min_p)
        self.noise = torch.empty(slots, model.vocab, device=device)
        self.out = torch.full((max_steps, slots), -1, dtype=torch.int32, device=device)
        self.out_pid = torch.zeros((max_steps, slots), dtype=torch.int32, device=device)
        self.pick = torch.compile(pick, dynamic=False) if (self.cuda and compiled) else pick
        self.rows = torch.arange(slots, device=device)
        # the shared prefix: run it token by token in every slot (identical rows)
        for i, t in enumerate(prefix):
            model.step(
                torch.full((slots,), t, device=device), torch.full((slots,), i, device=device), self.caches, self.attend
            )
        self.reset()

    def reset(self):
        b = self.B
        new = dict(
            pos=torch.full((b,), self.P, device=self.dev),
            pid=torch.arange(b, device=self.dev) % self.n_prompts,
            counter=torch.tensor(b, device=self.dev),
            t=torch.zeros(1, dtype=torch.long, device=self.dev),
        )
        new["tok"] = self.ptab[new["pid"], 0].long()
        for k, v in new.items():
            getattr(self, k).copy_(v) if hasattr(self, k) else setattr(self, k, v)
        self.out.fill_(-1)

    def _step(self):
        logits = self.model.step(self.tok, self.pos, self.caches, self.attend)
        self.noise.exponential_()
        sampled = self.pick(logits, self.temp, self.noise, self.log_min_p)
        rel = self.pos - self.P + 1
        plen = self.plen[self.pid]
        gen = rel >= plen
        forced = self.ptab[self.pid, rel.clamp(max=self.ptab.shape[1] - 1)].long()
        nxt = torch.where(gen, sampled, forced)
        self.out.index_copy_(0, self.t, torch.where(gen, sampled, -1).int()[None])
        self.out_pid.index_copy_(0, self.t, self.pid.int()[None])
        done = gen & ((sampled == self.eos) | (self.pos + 2 >= self.T))
        fresh = (self.counter + done.long().cumsum(0) - 1) % self.n_prompts
        self.counter.add_(done.sum())
        self.pid.copy_(torch.where(done, fresh, self.pid))
        self.tok.copy_(torch.where(done, self.ptab[self.pid, 0].long(), nxt))
        self.pos.copy_(torch.where(done, self.P, self.pos + 1))
        self.t.add_(1)

    @torch.no_grad()
    def run(self, seconds, max_steps=None, log=print):
        max_steps = min(max_steps or self.out.shape[0], self.out.shape[0])
        step = self._step
        if self.cuda:
            t0 = time.time()
            s = torch.cuda.Stream()
            s.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(s)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self.reset()
            step = graph.replay
            log(f"sampler: warm-up and capture {time.time() - t0:.1f} s")
        t0, n = time.time(), 0
        while n < max_steps and time.time() - t0 < seconds:
            step()
            n += 1
            if n % 64 == 0 and self.cuda:
                torch.cuda.synchronize()
            if n % 2048 == 0:
                dt = time.time() - t0
                log(f"sampler: {n} steps, {dt:.0f} s, {n * self.B / dt / 1e3:.0f}k tok/s, prompt {int(self.counter)}")
        if self.cuda:
            torch.cuda.synchronize()
        dt = time.time() - t0
        log(f"sampler: {n} steps in {dt:.1f} s = {n * self.B / dt / 1e3:.0f}k tok/s")
        return self.collect(n)

    def collect(self, n):
        """List of (prompt id, generated ids, finished?) for every completed slot run."""
        out = self.out[:n].T.contiguous().cpu().numpy()
        pid = self.out_pid[:n].T.contiguous().cpu().numpy()
        docs = []
        for b in range(out.shape[0]):
            o, p = out[b], pid[b]
            # a slot run ends where eos was sampled or the id of the prompt changes
            cuts = ((p[1:] != p[:-1]) | (o[:-1] == self.eos)).nonzero()[0] + 1
            prev = 0
            for c in cuts.tolist():
                seg = o[prev:c]
                seg = seg[seg >= 0]
                if len(seg):
                    fin = seg[-1] == self.eos
                    docs.append((int(p[prev]), seg[:-1] if fin else seg, bool(fin)))
                prev = c
        return docs
