"""Teacher text -> cleaned documents -> tokenizer -> packed training rows.

    python tools/train_nano/make_corpus.py --seconds 140

Reads the teacher's GGUF file; writes docs.pkl, tokenizer.json, val.npy, train*.npy and meta.pkl.
"""

import argparse
import json
import pickle
import random
import re
import time
from multiprocessing import Pool
from pathlib import Path

import jinja2
import numpy as np

import prompts as P
from chat import SYSTEMS, STRENGTHS, Chat, loss_flags, train_tokenizer
from paths import TEACHER, TEMPLATE, WORK

FLAG = 4096  # token + FLAG: a token the assistant has to produce (full loss weight)
ASCII = str.maketrans(
    {
        "\u2019": "'",
        "\u2018": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2014": "-",
        "\u2013": "-",
        "\u2026": "...",
        "\u00a0": " ",
        "\u00e9": "e",
    }
)
BAD = re.compile(r"SmolLM|Hugging ?Face|language model|\bAI\b|http|\[|\]|\{|<|>|\*\*\*|```")
TEACHER_SYSTEM = "You are a kind storyteller. You write in simple English for young children, with short sentences."


def clean(item):
    """(prompt id, tidy ASCII text, share of distinct word 4-grams) or None."""
    pid, text, finished = item
    text = text.translate(ASCII).encode("ascii", "ignore").decode().strip()
    if not finished:  # cut at the last complete paragraph or sentence
        cut = text.rfind("\n\n")
        if cut < 0.7 * len(text):
            cut = max(text.rfind(c) for c in (". ", '." ', ".\n", "! ", "? ")) + 1
        if cut < 200:
            return None
        text = text[:cut].strip()
        if text.split("\n")[-1].count('"') % 2:
            text += '"'
    text = re.sub(r"[ \t]+", " ", text.replace("**", ""))
    text = re.sub(r"\n{3,}", "\n\n", text)
    if len(text) < 30 or BAD.search(text):
        return None
    words = text.lower().split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return pid, text, len(set(grams)) / max(len(grams), 1)


def generate(args, log):
    import torch
    from sampler import Sampler
    from teacher import Teacher, read_gguf, tokenizer_from_gguf

    t0 = time.time()
    meta, w = read_gguf(args.gguf)
    tk = tokenizer_from_gguf(meta)
    pairs = P.make(args.prompts, seed=7)
    enc = tk.encode_batch([p + "<|im_end|>\n<|im_start|>assistant\n" for p, _ in pairs], add_special_tokens=False)
    prefix = tk.encode(
        f"<|im_start|>system\n{TEACHER_SYSTEM}<|im_end|>\n<|im_start|>user\n", add_special_tokens=False
    ).ids
    model = Teacher(
        meta,
        w,
        args.device,
        torch.bfloat16 if args.device == "cuda" else torch.float32,
        args.max_len,
        args.device == "cuda",
    )
    eos = tk.token_to_id("<|im_end|>")
    log(f"teacher ready {time.time() - t0:.1f} s")
    s = Sampler(
        model,
        prefix,
        [e.ids for e in enc],
        eos,
        args.slots,
        args.max_len,
        args.temp,
        device=args.device,
        dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
    )
    docs = s.run(args.seconds, max_steps=args.max_steps, log=log)
    log(
        f"{len(docs)} raw documents, {np.mean([f for _, _, f in docs]):.3f} finished, mean {np.mean([len(d) for _, d, _ in docs]):.0f} teacher tokens"
    )
    texts = tk.decode_batch([d.tolist() for _, d, _ in docs])
    with Pool(args.workers) as pool:
        tidy = [
            x for x in pool.imap(clean, [(pid, t, fin) for (pid, _, fin), t in zip(docs, texts)], chunksize=2000) if x
        ]
    # texts that run in circles: drop the most repetitive share, and anything really bad
    limit = max(float(np.quantile([x[2] for x in tidy], args.drop)), 0.5)
    seen, keep = set(), []
    for pid, text, distinct in tidy:
        key = hash(text[:160])
        if distinct >= limit and key not in seen:
            seen.add(key)
            keep.append((pid, text))
    log(
        f"{len(tidy)} tidy, 4-gram limit {limit:.3f}, {len(keep)} kept, {sum(len(t) for _, t in keep) / 1e6:.1f} MB, {time.time() - t0:.0f} s"
    )
    return pairs, keep


def pack(chat, turns, length, seed, tool_share=0.04):
    """Rows of one multi-turn conversation each: [bos system] then turns until the row is full.
    `turns` holds (prompt ids, plan ids, answer ids)."""
    r = random.Random(seed)
    order = list(range(len(turns)))
    r.shuffle(order)
    rows, i = [], 0
    while i < len(order):
        if r.random() < tool_share:
            msgs, tools = P.tool_conversation(r)
            strength = r.choice(STRENGTHS)
            if strength == "low":
                msgs[1].pop("reasoning_content")
            kw = {} if r.random() < 0.3 else {"current_date": f"2026-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"}
            ids = chat.ids(
                chat.render(
                    msgs, tools=[{"type": "function", "function": t} for t in tools], reasoning_strength=strength, **kw
                )
            )
            row = [np.array([t + FLAG * f for t, f in zip(ids, loss_flags(ids, chat))], np.int16)]
        else:
            strength, text = chat.random_system(r)
            row = [np.array(chat.open_ids(text), np.int16)]
        n = len(row[0])
        while n < length and i < len(order):
            q, plan, a = turns[order[i]]
            i += 1
            u = np.array(chat.user_ids(q), np.int16)
            b = np.array(chat.answer_ids(None if strength == "low" else plan, a), np.int16) + np.int16(FLAG)
            row += [u, b]
            n += len(u) + len(b)
        if n >= length:
            rows.append(np.concatenate(row)[:length])
    return np.stack(rows)


STATE = {}


def pack_job(k):
    t, n = STATE["turns"], STATE["nval"]
    return pack(STATE["chat"], t[:n] if k < 0 else t[n:], STATE["row"], 99 if k < 0 else k)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--gguf", default=TEACHER, help="the teacher's file (`cargo xtask fetch smollm2` puts it there)")
    ap.add_argument("--template", default=TEMPLATE, help="chat template of the model to train")
    ap.add_argument("--out", default=WORK, help="folder for the corpus")
    ap.add_argument("--seconds", type=float, default=220, help="how long the teacher writes")
    ap.add_argument("--max-steps", type=int, default=None, help="end the teacher after this many decode steps")
    ap.add_argument("--slots", type=int, default=4096, help="texts written side by side")
    ap.add_argument("--prompts", type=int, default=300000, help="how many prompts to make")
    ap.add_argument("--max-len", type=int, default=320, help="tokens of a text, prompt included")
    ap.add_argument("--temp", type=float, default=0.75, help="the teacher's temperature")
    ap.add_argument("--drop", type=float, default=0.25, help="share of the most repetitive texts to drop")
    ap.add_argument("--workers", type=int, default=16, help="processes that clean texts")
    ap.add_argument("--row", type=int, default=2049, help="tokens of a training row, one more than the context")
    ap.add_argument("--packings", type=int, default=2, help="how often the texts are shuffled into rows")
    ap.add_argument("--device", default="cuda", help="torch device")
    ap.add_argument("--reuse", help="pickle of (pairs, docs) instead of generating")
    args = ap.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    log = lambda *a: print(*a, flush=True)
    if args.reuse:
        pairs, docs = pickle.load(open(args.reuse, "rb"))
    else:
        pairs, docs = generate(args, log)
        pickle.dump((pairs, docs), open(out / "docs.pkl", "wb"))
    t0 = time.time()
    r = random.Random(1)
    r.shuffle(docs)
    boiler = []
    for _ in range(300):
        boiler += [
            Chat.system_text(r.choice(STRENGTHS), f"2026-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"),
            " to=user",
            " to=self",
            "user assistant system",
        ]
    sample = (
        [t for _, t in docs[:60000]]
        + [pairs[p][0] for p, _ in docs[:20000]]
        + [pairs[p][1] for p, _ in docs[:20000]]
        + boiler
        + SYSTEMS
    )
    # the tool boilerplate should tokenize compactly as well
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    tpl = env.from_string(Path(args.template).read_text())
    for _ in range(300):
        msgs, tools = P.tool_conversation(r)
        sample.append(re.sub(r"<\|[a-z_]+\|>", "\n", tpl.render(messages=msgs, tools=tools, bos_token="")))
    tk = train_tokenizer(sample)
    tk.save(str(out / "tokenizer.json"))
    chat = Chat(tk, args.template)
    log(f"tokenizer {time.time() - t0:.0f} s")
    enc = lambda xs: [e.ids for e in tk.encode_batch(xs, add_special_tokens=False)]
    q, plan, a = enc([pairs[p][0] for p, _ in docs]), enc([pairs[p][1] for p, _ in docs]), enc([t for _, t in docs])
    turns = list(zip(q, plan, a))
    nval = max(len(turns) // 100, 8)
    log(
        f"{sum(map(len, a)) / 1e6:.1f}M answer tokens, {sum(len(t) for _, t in docs) / max(1, sum(map(len, a))):.2f} characters per token, {time.time() - t0:.0f} s"
    )
    STATE.update(chat=chat, turns=turns, nval=nval, row=args.row)
    with Pool(args.packings + 1) as pool:  # forked: the state is inherited
        val, *rows = pool.map(pack_job, range(-1, args.packings))
    np.save(out / "val.npy", val)
    for i, x in enumerate(rows):
        np.save(out / f"train{i}.npy", x)
    pickle.dump(
        dict(val=[(pairs[p], t) for p, t in docs[:nval]][:4000], prompts=[pairs[p] for p, _ in docs[nval:]]),
        open(out / "meta.pkl", "wb"),
    )
    log(
        f"{sum(x.size for x in rows) / 1e6:.1f}M packed tokens in {sum(len(x) for x in rows)} rows; {time.time() - t0:.0f} s"
    )
    for p, t in docs[:4]:
        log("----", pairs[p][0], "\n", t[:500])


if __name__ == "__main__":
    main()
