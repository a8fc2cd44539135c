"""Train nano-glimmer on packed rows; the schedule follows the clock, so it ends within --seconds.

    python tools/train_nano/train_target.py --seconds 62

Reads the rows of make_corpus.py; writes target.pt.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from model import Config, Target, save
from optim import Optimizer
from paths import WORK

FLAG = 4096


def flex_attend(context, window, device):
    """FlexAttention with precomputed causal and sliding-window block masks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    causal = lambda b, h, q, k: q >= k
    local = lambda b, h, q, k: (q >= k) & (q - k < window)
    masks = {
        0: create_block_mask(causal, None, None, context, context, device=device),
        window: create_block_mask(local, None, None, context, context, device=device),
    }

    def attend(q, k, v, w):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return flex_attention(q, k, v, block_mask=masks[w], enable_gqa=True).transpose(1, 2)

    return attend


def batch_loss(model, rows, own_weight, dtype):
    tok = (rows & (FLAG - 1)).long()
    flag = (rows >= FLAG).float()
    x = model.hidden(tok[:, :-1], dtype)
    logits = model.logits(x)
    ce = F.cross_entropy(logits.flatten(0, 1), tok[:, 1:].flatten(), reduction="none")
    own = flag[:, 1:].flatten()
    w = own_weight + (1 - own_weight) * own
    return (ce * w).sum() / w.sum(), (ce * own).sum() / own.sum()


def schedule(f, step, warm=100):
    """Warm-up, flat, then linear to zero over the second half of the time."""
    return min((step + 1) / warm, 1.0) * (1.0 if f < 0.4 else max((1.0 - f) / 0.6, 0.0))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", default=WORK, help="folder that make_corpus.py wrote")
    ap.add_argument("--out", default=WORK / "target.pt", help="checkpoint to write")
    ap.add_argument("--seconds", type=float, default=300, help="length of the whole run, start-up included")
    ap.add_argument("--batch", type=int, default=32, help="rows of one step")
    ap.add_argument("--max-steps", type=int, default=10**9, help="end after this many steps")
    ap.add_argument("--muon-lr", type=float, default=0.01, help="learning rate of the matrices")
    ap.add_argument("--adam-lr", type=float, default=4e-3, help="learning rate of everything else")
    ap.add_argument("--own-weight", type=float, default=0.1, help="loss weight of tokens that are not the assistant's")
    ap.add_argument("--attention", default="flex", choices=["flex", "sdpa"], help="which attention of torch")
    ap.add_argument("--device", default="cuda", help="torch device")
    ap.add_argument("--tiny", action="store_true", help="microscopic model for a dry run")
    ap.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    args = ap.parse_args()
    log = lambda *a: print(*a, flush=True)
    t_begin = time.time()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dev, cuda = args.device, args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    rows = torch.from_numpy(np.concatenate([np.load(p) for p in sorted(Path(args.data).glob("train*.npy"))])).to(dev)
    val = torch.from_numpy(np.load(Path(args.data) / "val.npy")).to(dev)
    cfg = Config(hidden=64, layers=4, heads=2, kv_heads=1, head_dim=32, ffn=128, window=32) if args.tiny else Config()
    model = Target(cfg).to(dev)
    n = sum(p.numel() for p in model.parameters())
    log(
        f"{n / 1e6:.2f}M parameters, {rows.shape[0]} rows of {rows.shape[1]} = {rows.numel() / 1e6:.1f}M tokens, {len(val)} validation rows"
    )
    if args.attention == "flex":
        model.attend = flex_attend(rows.shape[1] - 1, cfg.window, dev)
    opt = Optimizer(model, Target.STACKS, args.muon_lr, args.adam_lr)
    loss_fn = batch_loss if args.no_compile or not cuda else torch.compile(batch_loss, dynamic=False)
    gen = torch.Generator().manual_seed(1)
    order, at = torch.randperm(len(rows), generator=gen), 0
    t0, step, seen = time.time(), 0, 0
    bs = min(args.batch, len(rows))
    first = None
    while step < args.max_steps:
        f = (time.time() - t_begin) / args.seconds
        if f >= 1:
            break
        if at + bs > len(order):
            order, at = torch.randperm(len(rows), generator=gen), 0
        batch = rows[order[at : at + bs].to(dev)]
        at += bs
        loss, own = loss_fn(model, batch, args.own_weight, dtype)
        loss.backward()
        opt.step(schedule(f, step))
        step += 1
        seen += batch.numel()
        if step in (1, 10) or step % 250 == 0:
            own_now = own.item()  # synchronises
            if first is None:
                first = time.time()
                log(f"first step after {first - t_begin:.1f} s")
            log(
                f"step {step} f {f:.2f} loss {loss.item():.4f} own {own_now:.4f} {seen / 1e6:.0f}M tokens {seen / (time.time() - t0) / 1e6:.2f}M tok/s"
            )
        elif step % 8 == 0 and cuda:
            torch.cuda.synchronize()  # keep the clock honest
        if step % 2500 == 0:
            save(args.out, model)
    tot, cnt = torch.zeros(2, dtype=torch.float64), 0
    for i in range(
        0, max(len(val) - bs + 1, 1), bs
    ):  # same batch shape, gradients enabled: the compiled graph is reused
        a, b = loss_fn(model, val[torch.arange(i, i + bs, device=dev) % len(val)], args.own_weight, dtype)
        tot += torch.tensor([a.item(), b.item()])
        cnt += 1
    tot /= max(cnt, 1)
    log(
        f"done: {step} steps, {seen / 1e6:.0f}M tokens, {time.time() - t_begin:.0f} s; validation: weighted {tot[0]:.4f}, assistant tokens {tot[1]:.4f} (perplexity {tot[1].exp():.2f})"
    )
    save(args.out, model, steps=step, tokens=seen, val_loss=float(tot[1]))


if __name__ == "__main__":
    main()
