"""Reference numbers for engine tests, computed in float32 from the exact Q8_0 weights of the GGUF files.

    python tools/train_nano/golden.py --taps target/train_nano/taps.npz

Reads the two files of models/; writes testdata/nano-glimmer/golden.json.
"""

import argparse
import hashlib
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import prompts as P
from acceptance import summary, walk
from chat import Chat
from export_gguf import read_back
from model import Config, DraftConfig, Drafter, Target, TargetStep
from paths import GOLDEN, MODELS, TEMPLATE
from sampler import Sampler

DATE = "2026-11-30"


def load(folder):
    sd, m = read_back(str(folder / "nano-glimmer-q8_0.gguf"), "target")
    g = lambda k: m["muse-glimmer." + k]
    c = Config(
        vocab=len(m["tokenizer.ggml.tokens"]),
        hidden=g("embedding_length"),
        layers=g("block_count"),
        heads=g("attention.head_count"),
        kv_heads=g("attention.head_count_kv"),
        head_dim=g("attention.key_length"),
        ffn=g("feed_forward_length"),
        window=g("attention.sliding_window"),
        context=g("context_length"),
        theta=g("rope.freq_base"),
        softcap=g("final_logit_softcapping"),
    )
    assert (
        g("attention.sliding_window_pattern") == [not f for f in c.full]
        and abs(g("logit_scale") - c.logit_scale) < 1e-6
    )
    t = Target(c)
    t.load_state_dict(sd)
    drafter = None
    p = folder / "nano-glimmer-dflash-q8_0.gguf"
    if p.exists():
        sd, n = read_back(str(p), "drafter")
        h = lambda k: n["dflash." + k]
        d = DraftConfig(
            layers=h("block_count"),
            heads=h("attention.head_count"),
            kv_heads=h("attention.head_count_kv"),
            head_dim=h("attention.key_length"),
            ffn=h("feed_forward_length"),
            window=h("attention.sliding_window"),
            block=h("block_size"),
            target_layers=[i - 1 for i in h("target_layers")],
            mask_token=n["tokenizer.ggml.mask_token_id"],
        )
        drafter = Drafter(c, d)
        drafter.load_state_dict(sd)
    return t.eval(), drafter, m


def tokenizer_of(meta):
    """A tokenizers.Tokenizer rebuilt from the GGUF's own fields."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from chat import SPLIT

    toks, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    tk = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(toks) if types[i] == 1},
            merges=[tuple(x.split(" ")) for x in meta["tokenizer.ggml.merges"]],
        )
    )
    tk.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, y in zip(toks, types) if y == 3])
    return tk


def cases():
    u = lambda t: {"role": "user", "content": t}
    story = "Once upon a time, a small bear lived in the forest. He loved honey and he loved his friend, the bee. " * 9
    tool_msgs, tools = P.tool_conversation(random.Random(4))
    fn = [{"type": "function", "function": t} for t in tools]
    low = dict(reasoning_strength="low", current_date=DATE)
    return [
        ("story-low", [u("Tell me a story about a brave rabbit named Lily who finds a lost key in the forest.")], low),
        (
            "story-high",
            [u("Write a short story about a small bear by the sea.")],
            dict(reasoning_strength="high", current_date=DATE),
        ),
        ("default-system", [u("Write a funny story about a happy duck who lost a kite.")], {}),
        ("explain", [u("Explain rain in simple words.")], low),
        (
            "own-system",
            [
                {"role": "system", "content": "You are a kind storyteller for children."},
                u("Write a dialogue in which a fox asks an owl about the moon."),
            ],
            dict(reasoning_strength="low"),
        ),
        ("list", [u("Give me three tips for making a new friend.")], low),
        (
            "long-multi-turn",
            [
                u("Tell me a story about a small bear and a honey pot."),
                {"role": "assistant", "content": story.strip()},
                u("Why do bees make honey?"),
                {"role": "assistant", "content": "Bees make honey because they need food in winter. " * 12},
                u("Write a short story about a lonely giant on a mountain."),
            ],
            low,
        ),
        ("tool-call", tool_msgs[:1], dict(tools=fn, **low)),
        ("tool-result", tool_msgs[:3], dict(tools=fn, **low)),
    ]


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", default=MODELS, help="folder with the two files")
    ap.add_argument("--template", default=TEMPLATE, help="chat template; must be the one inside the files")
    ap.add_argument("--out", default=GOLDEN, help="reference values to write")
    ap.add_argument("--new", type=int, default=64, help="greedy tokens of every prompt")
    ap.add_argument(
        "--taps", help="also write the target features of every prompt to this .npz (for check_llamacpp_drafter.py)"
    )
    args = ap.parse_args()
    folder = Path(args.models)
    target, drafter, meta = load(folder)
    assert meta["tokenizer.chat_template"] == Path(args.template).read_text()
    chat = Chat(tokenizer_of(meta), args.template)
    out = dict(
        note="float32 forward over the dequantized Q8_0 weights; top5 = [token id, log-probability after scale and softcap]; "
        "draft = one entry per greedy round: anchor = position of the newest known token, draft = the 15 proposed ids, "
        "accepted = how many of them equal the target's greedy text (cut at the end of the turn or of greedy_ids)",
        files={p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.gguf"))},
        prompts=[],
    )
    runs, taps = [], {}
    for name, messages, kw in cases():
        t0 = time.time()
        text = chat.render(messages, add_generation_prompt=True, **kw)
        ids = chat.ids(text)
        s = Sampler(
            TargetStep(target, torch.float32, False),
            ids[:1],
            [ids[1:]],
            -1,
            1,
            len(ids) + args.new + 64,
            0.0,
            device="cpu",
            dtype=torch.float32,
            max_steps=len(ids) + args.new,
            compiled=False,
        )
        s.run(600, max_steps=len(ids) - 2 + args.new, log=lambda *a: None)
        new = s.out[: len(ids) - 2 + args.new, 0]
        new = new[new >= 0].tolist()
        assert len(new) == args.new
        full = ids + new
        logits = target(torch.tensor([full]))[0, len(ids) - 1 : -1]
        lp = logits.log_softmax(-1)
        top = lp.topk(5)
        # greedy text continues past <|eot|> here on purpose: every step is a check
        agree = [int(a) == b for a, b in zip(top.indices[:, 0], new)]
        assert all(agree), (name, agree)
        item = dict(
            name=name,
            messages=messages,
            template_args=kw,
            prompt_text=text,
            prompt_ids=ids,
            greedy_ids=new,
            greedy_text=chat.tk.decode(new, skip_special_tokens=False),
            top5=[[[int(i), round(float(v), 5)] for i, v in zip(a, b)] for a, b in zip(top.indices, top.values)],
        )
        if drafter is not None:
            turn = (
                full[: len(ids) + new.index(chat.eot) + 1] if chat.eot in new else full
            )  # drafting ends with the turn
            r, trace = walk(target, drafter, turn, len(ids), "cpu")
            feats = target.hidden(torch.tensor([full]), torch.float32, tuple(drafter.d.target_layers))[1][0]
            taps[name] = feats.numpy()
            if name == "story-low":  # what the drafter is fed: concatenated inputs of the target layers
                item["features_at_last_prompt_token"] = [round(float(v), 5) for v in feats[len(ids) - 1]]
            item["draft"] = [dict(anchor=a, draft=d, accepted=n) for a, d, n in trace]
            runs += r
        out["prompts"].append(item)
        print(
            f"{name}: {len(ids)} + {len(new)} tokens, {time.time() - t0:.1f} s:",
            item["greedy_text"][:300].replace("\n", " | "),
        )
    if drafter is not None:
        out["draft_summary_these_prompts"] = summary(runs, drafter.d.block)
        print(json.dumps(out["draft_summary_these_prompts"]))
    Path(args.out).write_text(json.dumps(out, ensure_ascii=False))
    if args.taps:
        np.savez(args.taps, **taps)


if __name__ == "__main__":
    main()
