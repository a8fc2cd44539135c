"""Let the trained target write text, then train its DFlash drafter on it.

    python tools/train_nano/train_drafter.py --gen-seconds 22 --seconds 62

Reads the corpus and target.pt; writes drafter.pt, which holds both models.
"""

import argparse
import pickle
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from chat import Chat
from model import DraftConfig, Drafter, TargetStep, block_mask, load_target, save
from optim import Optimizer
from paths import WORK
from sampler import Sampler
from train_target import schedule


def write_text(model, chat, pairs, slots, max_len, seconds, max_steps, device, log):
    """[(full ids, index of the first answer token)] of conversations written by the target itself:
    a third greedy, the rest at temperatures up to 0.8."""
    r = random.Random(3)
    systems = [chat.open_ids(chat.random_system(r)[1])[1:] for _ in range(1000)]
    asked = chat.tk.encode_batch([q for q, _ in pairs], add_special_tokens=False)
    prompts = [r.choice(systems) + chat.user_ids(e.ids) for e in asked]
    temp = torch.cat([torch.zeros(slots // 3), torch.linspace(0.2, 0.8, slots - slots // 3)])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    s = Sampler(
        TargetStep(model, dtype, device == "cuda"),
        [chat.bos],
        prompts,
        chat.eot,
        slots,
        max_len,
        temp,
        device=device,
        dtype=dtype,
        max_steps=max_steps,
    )
    docs = s.run(seconds, max_steps=max_steps, log=log)
    out = []
    for pid, ids, fin in docs:
        full = [chat.bos] + prompts[pid] + ids.tolist() + ([chat.eot] if fin else [])
        out.append((full, 1 + len(prompts[pid])))
    log(
        f"target wrote {len(out)} answers, {np.mean([f for _, _, f in docs]):.3f} finished, mean {np.mean([len(d) for _, d, _ in docs]):.0f} tokens"
    )
    return out


def to_rows(docs, length, pad):
    tok = np.full((len(docs), length), pad, np.int16)
    span = np.zeros((len(docs), 2), np.int32)  # first and one-past-last answer position
    for i, (ids, s) in enumerate(docs):
        ids = ids[:length]
        tok[i, : len(ids)] = ids
        span[i] = s, len(ids)
    return torch.from_numpy(tok), torch.from_numpy(span)


def draft_logits(target, drafter, taps, tok, anchor):
    """Logits of every block position for the given anchors: [B, A, block, vocab] (position 0 unused)."""
    d = drafter.d
    b, a = anchor.shape
    t = taps.shape[1]
    qpos, mask = block_mask(anchor, t, d.block, d.window)
    noise_ids = torch.full((b, a, d.block), d.mask_token, device=tok.device)
    noise_ids[:, :, 0] = tok.gather(1, anchor)
    noise = target.emb[noise_ids.view(b, -1)].to(taps.dtype)
    cpos = torch.arange(t, device=tok.device).expand(b, -1)
    h = drafter.block_hidden(noise, qpos, drafter.fuse(taps), cpos, mask)
    return target.logits_raw(h).view(b, a, d.block, -1)


def loss_and_hits(target, drafter, taps, tok, anchor, end, weights):
    d = drafter.d
    b, a = anchor.shape
    logits = draft_logits(target, drafter, taps, tok, anchor)[:, :, 1:]
    where = anchor[..., None] + torch.arange(1, d.block, device=tok.device)
    ok = where < end[:, None, None]
    label = tok.gather(1, where.clamp(max=tok.shape[1] - 1).view(b, -1)).view(b, a, -1)
    ce = F.cross_entropy(logits.flatten(0, 2).float(), label.flatten(), reduction="none").view(label.shape)
    w = weights * ok
    hit = (logits.argmax(-1) == label) & ok
    run = hit.int().cumprod(-1)
    return (
        (ce * w).sum() / w.sum(),
        run.sum(-1).float().mean(),
        hit.float().sum((0, 1)) / ok.float().sum((0, 1)).clamp(min=1),
    )


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", default=WORK, help="folder that make_corpus.py wrote")
    ap.add_argument("--target", default=WORK / "target.pt", help="checkpoint of train_target.py")
    ap.add_argument("--out", default=WORK / "drafter.pt", help="checkpoint to write")
    ap.add_argument("--gen-seconds", type=float, default=60, help="how long the target writes")
    ap.add_argument("--seconds", type=float, default=180, help="how long the drafter is trained")
    ap.add_argument("--slots", type=int, default=4096, help="texts written side by side")
    ap.add_argument("--max-len", type=int, default=768, help="tokens of a conversation")
    ap.add_argument("--batch", type=int, default=48, help="rows of one step")
    ap.add_argument("--anchors", type=int, default=40, help="drafted blocks of one row")
    ap.add_argument("--block", type=int, default=16, help="tokens of a block: the known one and the drafted ones")
    ap.add_argument("--layers", type=int, default=2, help="layers of the drafter")
    ap.add_argument("--gamma", type=float, default=7.0, help="the loss weight of drafted token j is exp(-(j-1)/gamma)")
    ap.add_argument("--muon-lr", type=float, default=0.01, help="learning rate of the matrices")
    ap.add_argument("--adam-lr", type=float, default=3e-3, help="learning rate of everything else")
    ap.add_argument("--max-steps", type=int, default=10**9, help="end after this many steps")
    ap.add_argument(
        "--gen-steps", type=int, default=20000, help="end the target's writing after this many decode steps"
    )
    ap.add_argument("--device", default="cuda", help="torch device")
    args = ap.parse_args()
    log = lambda *a: print(*a, flush=True)
    dev, cuda = args.device, args.device == "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if cuda else torch.float32
    target, _ = load_target(args.target, dev)
    target.requires_grad_(False)
    chat = Chat(Tokenizer.from_file(str(Path(args.data) / "tokenizer.json")))
    meta = pickle.load(open(Path(args.data) / "meta.pkl", "rb"))
    pairs = meta["prompts"][:80000]
    docs = write_text(target, chat, pairs, args.slots, args.max_len, args.gen_seconds, args.gen_steps, dev, log)
    docs = [x for x in docs if len(x[0]) - x[1] >= 24]
    random.Random(5).shuffle(docs)
    for ids, s in docs[:3]:
        log("----", chat.tk.decode(ids[s - 30 : s + 200], skip_special_tokens=False))
    tok, span = to_rows(docs, args.max_len, chat.pad)
    tok, span = tok.to(dev), span.to(dev)
    c = target.c
    d = DraftConfig(
        layers=args.layers,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        ffn=c.ffn,
        window=c.window,
        block=args.block,
        target_layers=[1, 4, 6] if c.layers == 8 else list(range(c.layers - 1)),
        mask_token=chat.mask,
    )
    drafter = Drafter(c, d).to(dev)
    log(f"drafter {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f}M parameters, {len(tok)} rows")
    opt = Optimizer(drafter, Drafter.STACKS, args.muon_lr, args.adam_lr)
    weights = torch.exp(-torch.arange(args.block - 1, device=dev) / args.gamma)
    if cuda:
        from train_target import flex_attend

        target.attend = flex_attend(args.max_len, c.window, dev)

    def taps_of(x):
        return target.hidden(x, dtype, tuple(d.target_layers))[1]

    step_fn = loss_and_hits
    if cuda:
        taps_of, step_fn = torch.compile(taps_of, dynamic=False), torch.compile(loss_and_hits, dynamic=False)
    nval = max(min(len(tok) // 50, 4 * args.batch), 1)
    t0, step = time.time(), 0
    bs = min(args.batch, len(tok) - nval)

    def batch(idx):
        x, s = tok[idx].long(), span[idx]
        with torch.no_grad():
            taps = taps_of(x)
        lo, hi = s[:, :1] - 1, s[:, 1:] - 2  # the first anchor is the last prompt token
        a = (lo + (torch.rand(len(idx), args.anchors, device=dev) * (hi - lo + 1)).long()).clamp(min=0)
        return taps, x, torch.minimum(a, hi), s[:, 1]

    while step < args.max_steps:
        f = (time.time() - t0) / args.seconds
        if f >= 1:
            break
        idx = torch.randint(nval, len(tok), (bs,), device=dev)
        loss, run, _ = step_fn(target, drafter, *batch(idx), weights)
        loss.backward()
        opt.step(schedule(f, step))
        step += 1
        if step in (1, 10) or step % 250 == 0:
            log(
                f"step {step} f {f:.2f} loss {loss.item():.4f} run {run.item():.3f} {step / (time.time() - t0):.1f} steps/s"
            )
        elif step % 8 == 0 and cuda:
            torch.cuda.synchronize()
        if step % 2500 == 0:
            save(args.out, target, drafter)
    res = []
    for i in range(0, max(nval - bs + 1, 1), bs):  # gradients stay enabled to reuse the compiled graph
        idx = torch.arange(i, i + bs, device=dev) % nval
        res.append([x.detach() for x in step_fn(target, drafter, *batch(idx), weights)])
    log(
        f"done: {step} steps, {time.time() - t0:.0f} s; held-out loss {np.mean([x[0].item() for x in res]):.4f}, "
        f"mean accepted run (mixed temperatures) {np.mean([x[1].item() for x in res]):.3f}"
    )
    log("hit rate by position", [round(float(v), 3) for v in torch.stack([x[2] for x in res]).mean(0)])
    save(args.out, target, drafter, draft_steps=step)


if __name__ == "__main__":
    main()
