"""Exact log-probabilities of SmolLM2-135M-Instruct, in float64.

The answers of llama.cpp in testdata/oracle/smollm2-golden.json carry the noise
of 8-bit activations. This program walks the same tokens (each prompt, then
llama.cpp's greedy answer) with a plain numpy forward pass over the dequantized
weights and writes what an exact engine gives at each step.

    pip install numpy gguf
    cargo xtask fetch smollm2
    python tools/golden_smollm2.py
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
EXACT_TYPES = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)


class Llama:
    """The forward pass of the Llama family, written from its papers."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.tensors = {t.name: decoded(t) for t in reader.tensors}
        number = lambda key: reader.fields["llama." + key].contents()
        self.n_layer = number("block_count")
        self.n_head = number("attention.head_count")
        self.n_head_kv = number("attention.head_count_kv")
        self.head_dim = number("embedding_length") // self.n_head
        self.eps = number("attention.layer_norm_rms_epsilon")
        self.base = number("rope.freq_base")

    def logits(self, tokens):
        """[len(tokens), n_vocab]"""
        x = self.tensors["token_embd.weight"][tokens]
        for layer in range(self.n_layer):
            weight = lambda name: self.tensors[f"blk.{layer}.{name}.weight"]
            x = x + self.attention(self.norm(x, weight("attn_norm")), weight)
            h = self.norm(x, weight("ffn_norm"))
            gate = h @ weight("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ weight("ffn_up").T)) @ weight("ffn_down").T
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return self.norm(x, self.tensors["output_norm.weight"]) @ head.T

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def attention(self, h, weight):
        rows = len(h)
        heads = lambda name, n: (h @ weight(name).T).reshape(rows, n, self.head_dim)
        q = self.turned(heads("attn_q", self.n_head))
        k = self.turned(heads("attn_k", self.n_head_kv))
        v = heads("attn_v", self.n_head_kv)
        visible = np.tri(rows, dtype=bool)
        out = np.empty_like(q)
        for head in range(self.n_head):
            own = head // (self.n_head // self.n_head_kv)
            scores = q[:, head] @ k[:, own].T / np.sqrt(self.head_dim)
            scores = np.where(visible, scores, -np.inf)
            e = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = e / e.sum(-1, keepdims=True) @ v[:, own]
        return out.reshape(rows, -1) @ weight("attn_output").T

    def turned(self, x):
        """Rotary positions; neighbours turn together, as in GGUF files."""
        angle = np.arange(len(x))[:, None] * self.base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out


def decoded(tensor):
    data = np.asarray(tensor.data)
    if tensor.tensor_type not in EXACT_TYPES:
        data = gguf.quants.dequantize(data, tensor.tensor_type)
    return data.astype(np.float64).reshape([int(n) for n in reversed(tensor.shape)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "target/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--answers", type=Path, default=ROOT / "testdata/oracle/smollm2-golden.json")
    parser.add_argument("--out", type=Path, default=ROOT / "testdata/smollm2/exact.json")
    args = parser.parse_args()
    model = Llama(args.model)
    cases, differences = [], []
    for case in json.loads(args.answers.read_text())["cases"]:
        prompt, answer = case["prompt_ids"], case["greedy"]
        logits = model.logits(prompt + answer[:-1])[len(prompt) - 1 :]
        logprobs = logits - logits.max(-1, keepdims=True)
        logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
        steps = []
        for row, golden in zip(logprobs, case["top5_logprobs"]):
            best = np.argsort(-row)[:5]
            steps.append([[int(t), round(float(row[t]), 6)] for t in best])
            differences += [abs(row[t] - value) for t, value in golden]
        cases.append({"prompt_ids": prompt, "answer_ids": answer, "top5_logprobs": steps})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"cases": cases}) + "\n")
    print(f"llama.cpp differs by {np.mean(differences):.3f} on average, {max(differences):.3f} at most")


if __name__ == "__main__":
    main()
