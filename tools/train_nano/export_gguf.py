"""Write nano-glimmer and its drafter as GGUF, with the names and layout that these architectures have in GGUF.

    python tools/train_nano/export_gguf.py

Reads drafter.pt, the tokenizer and the chat template; writes the two files of models/.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer

from chat import N_SPECIAL, Chat
from model import QK_SCALE, Config, DraftConfig
from paths import MODELS, TEMPLATE, WORK

Q = gguf.GGMLQuantizationType


def interleave(w, heads):
    """Rows of Q/K from the rotate-half order to the adjacent-pair order that GGUF files have."""
    o, i = w.shape
    return w.reshape(heads, 2, o // heads // 2, i).swapaxes(1, 2).reshape(o, i)


def deinterleave(w, heads):
    o, i = w.shape
    return w.reshape(heads, o // heads // 2, 2, i).swapaxes(1, 2).reshape(o, i)


def target_tensors(sd, c: Config):
    n = lambda k: sd[k].float().numpy()
    yield "token_embd.weight", n("emb")
    for i in range(c.layers):
        p = f"blk.{i}."
        yield p + "attn_norm.weight", n("attn_norm")[i] + 1
        yield p + "post_attention_norm.weight", n("attn_post")[i] + 1
        yield p + "attn_q_norm.weight", np.full(c.head_dim, QK_SCALE, np.float32)
        yield p + "attn_k_norm.weight", np.ones(c.head_dim, np.float32)
        yield p + "attn_q.weight", interleave(n("wq")[i], c.heads)
        yield p + "attn_k.weight", interleave(n("wk")[i], c.kv_heads)
        yield p + "attn_v.weight", n("wv")[i]
        yield p + "attn_gate.weight", n("wg")[i]
        yield p + "attn_output.weight", n("wo")[i]
        yield p + "ffn_norm.weight", n("ffn_norm")[i] + 1
        yield p + "post_ffw_norm.weight", n("ffn_post")[i] + 1
        yield p + "ffn_gate.weight", n("w1")[i]
        yield p + "ffn_up.weight", n("w3")[i]
        yield p + "ffn_down.weight", n("w2")[i]
    yield "output_norm.weight", n("norm")
    yield "output.weight", n("head")


def drafter_tensors(sd, d: DraftConfig):
    n = lambda k: sd[k].float().numpy()
    yield "fc.weight", n("fc")
    yield "enc.output_norm.weight", n("enc_norm")
    for i in range(d.layers):
        p = f"blk.{i}."
        for a, b in [
            ("attn_norm", "attn_norm"),
            ("attn_q", "wq"),
            ("attn_k", "wk"),
            ("attn_v", "wv"),
            ("attn_output", "wo"),
            ("attn_q_norm", "q_norm"),
            ("attn_k_norm", "k_norm"),
            ("ffn_norm", "ffn_norm"),
            ("ffn_gate", "w1"),
            ("ffn_up", "w3"),
            ("ffn_down", "w2"),
        ]:
            yield f"{p}{a}.weight", n(b)[i]
    yield "output_norm.weight", n("norm")


def add_tokenizer(w, tk, chat, template, vocab):
    table = {i: t for t, i in tk.get_vocab().items()}
    first = vocab - N_SPECIAL
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("llama4")
    w.add_token_list([table[i] for i in range(vocab)])
    w.add_token_types([gguf.TokenType.CONTROL if i >= first else gguf.TokenType.NORMAL for i in range(vocab)])
    merges = json.loads(tk.to_str())["model"]["merges"]
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    w.add_bos_token_id(chat.bos)
    w.add_eos_token_id(chat.eos)
    w.add_pad_token_id(chat.pad)
    w.add_add_bos_token(True)
    w.add_chat_template(template)
    w.add_eot_token_id(chat.eot)


def common(w, name, c, layers, heads, kv, head_dim, ffn, ftype):
    w.add_type("model")
    w.add_name(name)
    w.add_license("apache-2.0")
    w.add_description("Tiny trained model for tests; text distilled from SmolLM2-135M-Instruct")
    w.add_block_count(layers)
    w.add_context_length(c.context)
    w.add_embedding_length(c.hidden)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_rope_freq_base(c.theta)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_file_type(ftype)
    w.add_quantization_version(2)


def put(w, name, x, qtype):
    x = np.ascontiguousarray(x.astype(np.float32))
    if x.ndim == 1:
        w.add_tensor(name, x)
    elif qtype == Q.F16:
        w.add_tensor(name, x.astype(np.float16))
    else:
        w.add_tensor(name, quantize(x, qtype), raw_dtype=qtype)


def write_target(path, c, sd, tk, chat, template, qtype):
    w = gguf.GGUFWriter(path, "muse-glimmer")
    common(
        w,
        "nano-glimmer",
        c,
        c.layers,
        c.heads,
        c.kv_heads,
        c.head_dim,
        c.ffn,
        gguf.LlamaFileType.MOSTLY_F16 if qtype == Q.F16 else gguf.LlamaFileType.MOSTLY_Q8_0,
    )
    w.add_final_logit_softcapping(c.softcap)
    w.add_logit_scale(c.logit_scale)
    w.add_sliding_window(c.window)
    w.add_sliding_window_pattern([not f for f in c.full])
    add_tokenizer(w, tk, chat, template, c.vocab)
    for name, x in target_tensors(sd, c):
        put(w, name, x, qtype)
    finish(w)


def write_drafter(path, c, d, sd, tk, chat, template, qtype):
    w = gguf.GGUFWriter(path, "dflash")
    common(
        w,
        "nano-glimmer-dflash",
        c,
        d.layers,
        d.heads,
        d.kv_heads,
        d.head_dim,
        d.ffn,
        gguf.LlamaFileType.MOSTLY_F16 if qtype == Q.F16 else gguf.LlamaFileType.MOSTLY_Q8_0,
    )
    w.add_uint32("dflash.block_size", d.block)
    w.add_array("dflash.target_layers", [int(i) + 1 for i in d.target_layers])  # inputs of these layers
    w.add_sliding_window(d.window)
    w.add_sliding_window_pattern([True] * d.layers)
    add_tokenizer(w, tk, chat, template, c.vocab)
    w.add_mask_token_id(d.mask_token)
    for name, x in drafter_tensors(sd, d):
        put(w, name, x, qtype)
    finish(w)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def read_back(path, kind):
    """(float32 state dict in our layout, metadata) of a GGUF file written above."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    r = GGUFReader(path)
    meta = {k: f.contents() for k, f in r.fields.items()}
    t = {x.name: torch.from_numpy(np.array(dequantize(x.data, x.tensor_type), dtype=np.float32)) for x in r.tensors}
    arch = meta["general.architecture"]
    L, heads, kv = (meta[f"{arch}.{k}"] for k in ("block_count", "attention.head_count", "attention.head_count_kv"))
    stack = lambda k, f=lambda x: x: torch.stack([f(t[f"blk.{i}.{k}.weight"]) for i in range(L)])
    if kind == "target":
        sd = dict(
            emb=t["token_embd.weight"],
            head=t["output.weight"],
            norm=t["output_norm.weight"],
            wq=stack("attn_q", lambda x: torch.from_numpy(deinterleave(x.numpy(), heads).copy())),
            wk=stack("attn_k", lambda x: torch.from_numpy(deinterleave(x.numpy(), kv).copy())),
            wv=stack("attn_v"),
            wg=stack("attn_gate"),
            wo=stack("attn_output"),
            w1=stack("ffn_gate"),
            w3=stack("ffn_up"),
            w2=stack("ffn_down"),
            attn_norm=stack("attn_norm") - 1,
            attn_post=stack("post_attention_norm") - 1,
            ffn_norm=stack("ffn_norm") - 1,
            ffn_post=stack("post_ffw_norm") - 1,
        )
    else:
        sd = dict(
            fc=t["fc.weight"],
            enc_norm=t["enc.output_norm.weight"],
            norm=t["output_norm.weight"],
            wq=stack("attn_q"),
            wk=stack("attn_k"),
            wv=stack("attn_v"),
            wo=stack("attn_output"),
            q_norm=stack("attn_q_norm"),
            k_norm=stack("attn_k_norm"),
            attn_norm=stack("attn_norm"),
            ffn_norm=stack("ffn_norm"),
            w1=stack("ffn_gate"),
            w3=stack("ffn_up"),
            w2=stack("ffn_down"),
        )
    return sd, meta


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default=WORK / "drafter.pt", help="checkpoint of train_drafter.py or train_target.py")
    ap.add_argument("--tokenizer", default=WORK / "tokenizer.json", help="tokenizer of make_corpus.py")
    ap.add_argument("--template", default=TEMPLATE, help="chat template to put into the files")
    ap.add_argument("--out", default=MODELS, help="folder for the files")
    ap.add_argument("--f16", action="store_true", help="also write the f16 target")
    args = ap.parse_args()
    d = torch.load(args.model, map_location="cpu", weights_only=True)
    c = Config(**d["config"])
    tk = Tokenizer.from_file(str(args.tokenizer))
    chat, template, out = Chat(tk), Path(args.template).read_text(), Path(args.out)
    write_target(out / "nano-glimmer-q8_0.gguf", c, d["target"], tk, chat, template, Q.Q8_0)
    if args.f16:
        write_target(out / "nano-glimmer-f16.gguf", c, d["target"], tk, chat, template, Q.F16)
    if "drafter" in d:
        write_drafter(
            out / "nano-glimmer-dflash-q8_0.gguf",
            c,
            DraftConfig(**d["draft_config"]),
            d["drafter"],
            tk,
            chat,
            template,
            Q.Q8_0,
        )
    for p in sorted(out.glob("*.gguf")):
        print(p, p.stat().st_size)


if __name__ == "__main__":
    main()
