"""Compare golden.json with llama.cpp (the PyPI package llama-cpp-python) on the CPU, and let it tell a story.

    python tools/train_nano/check_llamacpp.py

Reads models/ and golden.json; prints agreement.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from llama_cpp import Llama

from paths import GOLDEN, MODELS


def compare(m, p):
    """(equal greedy tokens, differences of the golden log-probabilities) of one prompt."""
    ids, new = p["prompt_ids"], p["greedy_ids"]
    tokens_equal = m.tokenize(p["prompt_text"].encode(), add_bos=False, special=True) == ids
    m.reset()
    m.eval(ids + new)
    z = np.array(m.scores[len(ids) - 1 : len(ids) + len(new) - 1]).astype(np.float64)
    lp = z - z.max(-1, keepdims=True)
    lp -= np.log(np.exp(lp).sum(-1, keepdims=True))
    hit = int((z.argmax(-1) == np.array(new)).sum())
    d = [abs(lp[i, k] - v) for i, row in enumerate(p["top5"]) for k, v in row]
    gaps = [p["top5"][i][0][1] - p["top5"][i][1][1] for i in range(len(new)) if z[i].argmax() != new[i]]
    print(
        f"{p['name']}: tokenization {'equal' if tokens_equal else 'DIFFERENT'}, greedy {hit}/{len(new)}, "
        f"|dlogprob| top5 mean {np.mean(d):.4f} max {max(d):.4f}",
        f"gaps where different {gaps}" if gaps else "",
    )
    return hit, d


def story(m, p):
    m.reset()
    out = []
    for t in m.generate(p["prompt_ids"], temp=0.0, repeat_penalty=1.0):
        if t in (m.token_eos(), p["prompt_ids"][0] + 8) or len(out) > 400:
            break
        out.append(t)
    return m.detokenize(out, special=True).decode("utf-8", "replace")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", default=MODELS, help="folder with the two files")
    ap.add_argument("--golden", default=GOLDEN, help="reference values of golden.py")
    args = ap.parse_args()
    golden = json.loads(Path(args.golden).read_text())
    m = Llama(
        model_path=str(Path(args.models) / "nano-glimmer-q8_0.gguf"),
        n_ctx=2048,
        n_batch=2048,
        n_threads=1,
        verbose=False,
        logits_all=True,
    )
    total = same = 0
    diffs = []
    for p in golden["prompts"]:
        hit, d = compare(m, p)
        total, same, diffs = total + len(p["greedy_ids"]), same + hit, diffs + d
    print(f"greedy {same}/{total}; |dlogprob| mean {np.mean(diffs):.5f} max {max(diffs):.4f}")
    print(story(m, golden["prompts"][0]))


if __name__ == "__main__":
    main()
