"""Run the drafter through llama.cpp's own DFlash graph and compare with the drafts in golden.json.

    python tools/train_nano/check_llamacpp_drafter.py --taps target/train_nano/taps.npz

The target features come from golden.py --taps (float32), so only the drafter is checked here.
"""

import argparse
import ctypes
import json
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as C

from paths import GOLDEN, MODELS, WORK


def context(path, **kw):
    model = C.llama_model_load_from_file(str(path).encode(), C.llama_model_default_params())
    p = C.llama_context_default_params()
    p.n_ctx = p.n_batch = p.n_ubatch = 1024
    p.n_threads = 1
    for k, v in kw.items():
        setattr(p, k, v)
    return model, C.llama_init_from_model(model, p)


def decode(dft, n, embd, fill):
    b = C.llama_batch_init(n, embd, 1)
    b.n_tokens = n
    for i in range(n):
        b.n_seq_id[i], b.seq_id[i][0] = 1, 0
        fill(b, i)
    assert C.llama_decode(dft, b) == 0
    C.llama_batch_free(b)


def drafts(dft, vocab, p, x):
    """Yields (the draft of llama.cpp, the golden one) of every round of one prompt; `x`: its target features."""
    mask = vocab - 1
    full, done = p["prompt_ids"] + p["greedy_ids"], 0
    mem = C.llama_get_memory(dft)
    C.llama_memory_clear(mem, True)
    for r in p["draft"]:
        at, start = r["anchor"], done

        def features(b, i):
            ctypes.memmove(
                ctypes.addressof(b.embd.contents) + i * x.shape[1] * 4, x[start + i].ctypes.data, x.shape[1] * 4
            )
            b.pos[i], b.logits[i] = start + i, 0

        def noise(b, i):
            b.token[i], b.pos[i], b.logits[i] = full[at] if i == 0 else mask, at + i, 1

        decode(dft, at - start, x.shape[1], features)
        done = at
        n = len(r["draft"]) + 1
        decode(dft, n, 0, noise)
        rows = [np.ctypeslib.as_array(C.llama_get_logits_ith(dft, i), (vocab,)) for i in range(1, n)]
        yield [int(row.argmax()) for row in rows], r["draft"]
        C.llama_memory_seq_rm(mem, 0, at, -1)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", default=MODELS, help="folder with the two files")
    ap.add_argument("--golden", default=GOLDEN, help="reference values of golden.py")
    ap.add_argument("--taps", default=WORK / "taps.npz", help="target features of golden.py --taps")
    args = ap.parse_args()
    golden, taps = json.loads(Path(args.golden).read_text()), np.load(args.taps)
    C.llama_backend_init()
    _, tgt = context(Path(args.models) / "nano-glimmer-q8_0.gguf")
    model, dft = context(Path(args.models) / "nano-glimmer-dflash-q8_0.gguf", ctx_other=tgt, n_outputs_max=64)
    C.llama_set_causal_attn(dft, False)
    vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    same = total = whole = rounds = 0
    for p in golden["prompts"]:
        for got, wanted in drafts(dft, vocab, p, np.ascontiguousarray(taps[p["name"]])):
            same, total = same + sum(a == b for a, b in zip(got, wanted)), total + len(wanted)
            whole, rounds = whole + (got == wanted), rounds + 1
    print(f"drafted tokens equal to golden: {same}/{total}; whole drafts equal: {whole}/{rounds}")


if __name__ == "__main__":
    main()
