"""Greedy speculative decoding, measured: how many drafted tokens the target accepts.

Greedy verification makes the output equal to the target's own greedy text, so
it is enough to write that text once and to ask, for the anchors that decoding
would visit, how far the draft agrees with it.

    python tools/train_nano/acceptance.py --prompts 32 --max-new 200 --device cpu   # the exported GGUF files
    python tools/train_nano/acceptance.py --model target/train_nano/drafter.pt --prompts 512 --out acceptance-512.json

Reads the corpus and the models; writes testdata/nano-glimmer/acceptance.json.
"""

import argparse
import json
import pickle
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer

from chat import Chat
from model import DraftConfig, Drafter, TargetStep, load_target
from paths import ACCEPTANCE, MODELS, WORK
from sampler import Sampler, attend_plain
from train_drafter import draft_logits


@torch.no_grad()
def walk(target, drafter, ids, start, device, chunk=32):
    """ids: prompt + greedy text, start: index of the first generated token.
    Returns the list of accepted draft lengths of each round, anchored on generated tokens."""
    d = drafter.d
    tok = torch.tensor([ids], device=device)
    taps = target.hidden(tok, torch.float32, tuple(d.target_layers))[1]
    anchors = torch.arange(start, len(ids) - 1, device=device)
    drafts = []
    for a in anchors.split(chunk):
        drafts.append(draft_logits(target, drafter, taps, tok, a[None])[0, :, 1:].argmax(-1))
    drafts = torch.cat(drafts).tolist()
    runs, at, trace = [], start, []
    while at < len(ids) - 1:
        dr, real = drafts[at - start], ids[at + 1 : at + d.block]
        n = 0
        while n < len(real) and dr[n] == real[n]:
            n += 1
        trace.append((at, dr, n))
        if len(real) == d.block - 1:  # rounds cut short by the end of the text are not counted
            runs.append(n)
        at += n + 1
    return runs, trace


def summary(runs, block):
    n = max(len(runs), 1)
    surv = [sum(r >= j for r in runs) / n for j in range(1, block)]
    cond = [surv[0]] + [surv[j] / surv[j - 1] if surv[j - 1] else 0.0 for j in range(1, block - 1)]
    return dict(
        rounds=len(runs),
        mean_accepted=sum(runs) / n,
        mean_tokens_per_round=1 + sum(runs) / n,
        accepted_at_least=[round(x, 4) for x in surv],
        conditional=[round(x, 4) for x in cond],
    )


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default=MODELS, help="folder with the GGUF files, or a checkpoint of train_drafter.py")
    ap.add_argument("--data", default=WORK, help="folder that make_corpus.py wrote")
    ap.add_argument("--out", default=ACCEPTANCE, help="figures to write")
    ap.add_argument("--prompts", type=int, default=512, help="how many held-out prompts")
    ap.add_argument("--max-new", type=int, default=300, help="tokens of an answer, about")
    ap.add_argument("--device", default="cuda", help="torch device")
    args = ap.parse_args()
    dev = args.device
    if Path(args.model).is_dir():
        from golden import load

        target, drafter, _ = load(Path(args.model))
        target.to(dev)
    else:
        target, saved = load_target(args.model, dev)
        drafter = Drafter(target.c, DraftConfig(**saved["draft_config"]))
        drafter.load_state_dict(saved["drafter"])
    drafter.to(dev)
    chat = Chat(Tokenizer.from_file(str(Path(args.data) / "tokenizer.json")))
    val = pickle.load(open(Path(args.data) / "meta.pkl", "rb"))["val"]
    r, prompts, texts = random.Random(11), [], []
    for (q, _), _ in val[: args.prompts]:
        strength = r.choice(["low", "high"])
        texts.append(q)
        prompts.append(chat.open_ids(chat.system_text(strength, "2026-11-30"))[1:] + chat.user_ids(chat.ids(q)))
    slots = len(prompts)
    s = Sampler(
        TargetStep(target, torch.float32, False),
        [chat.bos],
        prompts,
        chat.eot,
        slots,
        768,
        0.0,
        device=dev,
        dtype=torch.float32,
        max_steps=max(map(len, prompts)) + args.max_new,
        compiled=False,
    )
    s.attend = attend_plain  # exact float32
    docs, got = s.run(600), {}
    for pid, ids, fin in docs:
        if pid < slots and len(ids):
            got.setdefault(pid, ids.tolist() + ([chat.eot] if fin else []))
    for b in range(slots):  # slots still writing their first answer
        pid = int(s.pid[b])
        if pid not in got:
            col = s.out[:, b]
            ids = col[(col >= 0) & (s.out_pid[:, b] == pid)].tolist()
            if ids:
                got[pid] = ids
    runs = []
    for pid, ids in got.items():
        if len(ids) > 20:
            full = [chat.bos] + prompts[pid] + ids
            runs += walk(target, drafter, full, 1 + len(prompts[pid]), dev)[0]
    res = summary(runs, drafter.d.block)
    res["prompts"] = len(got)
    res["finished"] = sum(ids[-1] == chat.eot for ids in got.values())
    print(json.dumps(res))
    for pid in list(got)[:6]:
        print("----", texts[pid], "\n", chat.tk.decode(got[pid], skip_special_tokens=False))
    Path(args.out).write_text(json.dumps(res))


if __name__ == "__main__":
    main()
