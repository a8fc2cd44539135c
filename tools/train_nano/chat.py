"""Tokenizer and chat rendering in Muse Glimmer's format."""

import json
from pathlib import Path

# The split pattern of the GPT-4o / Llama 4 family, which is what `tokenizer.ggml.pre = llama4` selects.
SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
N_SPECIAL = 128
# control tokens keep the distance from <|begin_of_text|> that they have in the real vocabulary
SPECIAL = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    7: "<|eom|>",
    8: "<|eot|>",
    18: "<|finetune_right_pad|>",
    22: "<|start|>",
    23: "<|message|>",
    80: "<|image_start|>",
    81: "<|image_end|>",
    82: "<|vid_start|>",
    83: "<|vid_end|>",
    87: "<|vid_frame_separator|>",
    90: "<|image|>",
    91: "<|video|>",
    92: "<|patch|>",
}
MASK_OFFSET = 127  # a reserved token serves as DFlash's mask
STRENGTHS = ["low", "low", "medium", "high", "high", "xhigh"]
SYSTEMS = [
    "You are a helpful AI assistant.",
    "You are a kind storyteller for children.",
    "You answer in simple words.",
    "You are a friendly helper who likes animals.",
    "You are a patient teacher.",
    "Be brief and clear.",
]
RECIPIENTS = '# Valid recipients: "self", "user".'


def special_list():
    return [SPECIAL.get(i, f"<|reserved_special_token_{i}|>") for i in range(N_SPECIAL)]


def train_tokenizer(texts, vocab=4096):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tk.decoder = decoders.ByteLevel()
    tr = trainers.BpeTrainer(
        vocab_size=vocab - N_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tk.train_from_iterator(texts, tr)
    have = tk.get_vocab_size()
    assert have == vocab - N_SPECIAL, have
    tk.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special_list()])
    assert tk.get_vocab_size() == vocab
    return tk


class Chat:
    def __init__(self, tk, template=None):
        self.tk = tk
        g = tk.token_to_id
        self.bos, self.eos, self.start, self.msg = (
            g("<|begin_of_text|>"),
            g("<|end_of_text|>"),
            g("<|start|>"),
            g("<|message|>"),
        )
        self.eom, self.eot, self.pad = g("<|eom|>"), g("<|eot|>"), g("<|finetune_right_pad|>")
        self.mask = self.bos + MASK_OFFSET
        self.user, self.assistant, self.system = self.ids("user"), self.ids("assistant"), self.ids("system")
        self.to_self, self.to_user = self.ids(" to=self"), self.ids(" to=user")
        self.template = None
        if template:
            import jinja2

            env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
            env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
            env.globals["raise_exception"] = _raise
            self.template = env.from_string(Path(template).read_text())

    def ids(self, text):
        return self.tk.encode(text, add_special_tokens=False).ids

    @staticmethod
    def system_text(strength, date=None, text=None):
        if text is None:
            head = "You are a helpful AI assistant.\nKnowledge cutoff: 2026-01-04." + (
                f"\nCurrent date: {date}." if date else ""
            )
        else:
            head = text
        return f"{head}\n\nReasoning strength: {strength}.\n\n{RECIPIENTS}"

    def random_system(self, r):
        strength = r.choice(STRENGTHS)
        if r.random() < 0.3:
            return strength, self.system_text(strength, text=r.choice(SYSTEMS))
        date = (
            f"{r.choice([2025, 2026, 2026, 2026, 2027])}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"
            if r.random() < 0.8
            else None
        )
        return strength, self.system_text(strength, date)

    def open_ids(self, system_text):
        return [self.bos, self.start, *self.system, self.msg, *self.ids(system_text), self.eot]

    def user_ids(self, prompt_ids):
        return [self.start, *self.user, self.msg, *prompt_ids, self.eot, self.start, *self.assistant]

    def answer_ids(self, plan_ids, answer_ids):
        out = []
        if plan_ids is not None:
            out += [*self.to_self, self.msg, *plan_ids, self.eom, self.start, *self.assistant]
        return out + [*self.to_user, self.msg, *answer_ids, self.eot]

    def prompt_ids(self, messages, **kw):
        """Through the real template, up to and including the generation prompt."""
        text = self.template.render(messages=messages, bos_token="<|begin_of_text|>", add_generation_prompt=True, **kw)
        return self.ids(text)

    def render(self, messages, **kw):
        return self.template.render(messages=messages, bos_token="<|begin_of_text|>", **kw)


def _raise(m):
    raise ValueError(m)


def loss_flags(ids, chat):
    """True for tokens the assistant itself has to produce (used for templated tool conversations)."""
    flags, on, i, na = [], False, 0, len(chat.assistant)
    while i < len(ids):
        if ids[i] == chat.start and ids[i + 1 : i + 1 + na] == chat.assistant:
            own = i > 0 and ids[i - 1] == chat.eom  # the model itself opens its next message
            flags += [own] * (1 + na)
            i += 1 + na
            on = True
            continue
        flags.append(on)
        if ids[i] in (chat.eom, chat.eot):
            on = False
        i += 1
    return flags
