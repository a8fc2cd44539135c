"""Measures llama.cpp, through llama-cpp-python's bindings, as `muser bench` measures Muser.

Run by `cargo xtask rival`, which installs the package. Prints one JSON object whose lines have the
fields of `muser bench --json`, so that both can be read by one program. The same tokens go in, keys
and values are f16, flash attention is on unless told otherwise, and every decoded row gives its
logits.

    python rival_llama.py MODEL --threads 2 --prefill 512 --generate 64 --depth 0,2048 --batch 1
"""

import argparse
import json
import statistics
import sys
import time

import llama_cpp as ll

BATCH_ROWS = 512


def token(n_vocab, seq, pos):
    """Some token, another one at each place: as in muser's workload."""
    return (pos * 7919 + seq * 104_729 + 17) % n_vocab


class Runner:
    """A context with room for the longest work."""

    def __init__(self, path, threads, n_ctx, n_sequences, plain, flash):
        ll.llama_backend_init()
        start = time.perf_counter()
        params = ll.llama_model_default_params()
        params.use_extra_bufts = not plain
        self.model = ll.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        self.load_seconds = time.perf_counter() - start
        context = ll.llama_context_default_params()
        # Every sequence gets an equal part of the context.
        context.n_ctx = -(-n_ctx // 256) * 256 * n_sequences
        context.n_batch = context.n_ubatch = BATCH_ROWS
        context.n_seq_max = n_sequences
        context.n_threads = context.n_threads_batch = threads
        context.flash_attn_type = int(flash)
        self.context = ll.llama_init_from_model(self.model, context)
        if not self.context:
            sys.exit("llama.cpp cannot make a context")
        self.n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(BATCH_ROWS, 0, 1)

    def memory(self):
        return ll.llama_get_memory(self.context)

    def decode(self, rows):
        """One pass; a row is (seq, pos, are its logits wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (seq, pos, wanted) in enumerate(rows):
            batch.token[i] = token(self.n_vocab, seq, pos)
            batch.pos[i] = pos
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = wanted
        if ll.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        if rows[-1][2]:
            ll.llama_get_logits_ith(self.context, -1)

    def prompt(self, seq, n_tokens):
        for start in range(0, n_tokens, BATCH_ROWS):
            end = min(n_tokens, start + BATCH_ROWS)
            self.decode([(seq, pos, pos + 1 == n_tokens) for pos in range(start, end)])

    def prefill(self, n_tokens):
        ll.llama_memory_clear(self.memory(), True)
        start = time.perf_counter()
        self.prompt(0, n_tokens)
        return time.perf_counter() - start

    def generate(self, n_tokens, depth, n_sequences):
        """The sequences have their `depth` tokens already."""
        start = time.perf_counter()
        for i in range(n_tokens):
            self.decode([(seq, depth + i, True) for seq in range(n_sequences)])
        seconds = time.perf_counter() - start
        for seq in range(n_sequences):
            ll.llama_memory_seq_rm(self.memory(), seq, depth, -1)
        return seconds


def line(work, n_tokens, depth, n_sequences, seconds):
    """One line of the report."""
    return {
        "work": work,
        "n_tokens": n_tokens,
        "depth": depth,
        "n_sequences": n_sequences,
        "tokens_per_second": n_tokens * n_sequences / statistics.median(seconds),
    }


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prefill", type=numbers, default=[])
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--depth", type=numbers, default=[0])
    parser.add_argument("--batch", type=numbers, default=[1])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no re-packed weights and no AMX kernels, which crash on some machines",
    )
    parser.add_argument("--no-flash", action="store_true", help="without flash attention")
    args = parser.parse_args()

    longest = max(args.prefill + [max(d, 1) + args.generate for d in args.depth])
    flash = not args.no_flash
    runner = Runner(args.model, args.threads, longest, max(args.batch), args.plain, flash)
    lines = []
    for n_tokens in (n for n in args.prefill if n > 0):
        seconds = [runner.prefill(n_tokens) for _ in range(args.repetitions + 1)][1:]
        lines.append(line("prefill", n_tokens, 0, 1, seconds))
    for depth in args.depth if args.generate > 0 else []:
        for n_sequences in args.batch:
            ll.llama_memory_clear(runner.memory(), True)
            for seq in range(n_sequences):
                runner.prompt(seq, depth)
            seconds = [
                runner.generate(args.generate, depth, n_sequences)
                for _ in range(args.repetitions + 1)
            ][1:]
            lines.append(line("decode", args.generate, depth, n_sequences, seconds))
    print(json.dumps({"load_seconds": runner.load_seconds, "lines": lines}))


if __name__ == "__main__":
    main()
