"""Where the scripts read and write unless told otherwise: places of this repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
REFERENCE = ROOT / "testdata" / "nano-glimmer"
TEMPLATE = REFERENCE / "nano-glimmer.jinja"
GOLDEN = REFERENCE / "golden.json"
ACCEPTANCE = REFERENCE / "acceptance.json"
# Not committed: the corpus, the tokenizer, checkpoints.
WORK = ROOT / "target" / "train_nano"
TEACHER = ROOT / "target" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
