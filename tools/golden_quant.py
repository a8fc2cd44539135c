"""Golden data of the block encodings, made with the PyPI packages `gguf` and `numpy`.

    pip install gguf==0.19.0 numpy
    python tools/golden_quant.py testdata/quant    writes the files described in testdata/quant/README.md
    python tools/golden_quant.py --tables          prints the packed grids of crates/gguf/src/quant/codebook.rs
"""

import sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants

# Offsets of the f16 fields of a block. The one of IQ1_M is spread over the tops of its last four words.
F16_FIELDS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
    "IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [], "NVFP4": [],
}
# Scales of the edge blocks: zero, negative, smallest and largest subnormal, largest, infinite, not a number.
EDGE_SCALES = [0x0000, 0x8000, 0xA934, 0x0001, 0x83FF, 0x7BFF, 0xFC00, 0x7E01]
# Blocks whose values are stored one by one; a checksum covers the others.
STORED = 4
# More blocks for the types with large grids, so that every grid entry is read.
BLOCKS = {"IQ1_S": 84, "IQ1_M": 84, "IQ2_S": 52, "IQ2_XS": 36, "IQ3_S": 36}
ENCODED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def put_scale(name, block, bits, second_bits=None):
    for at, field in zip(F16_FIELDS[name], [bits, bits if second_bits is None else second_bits]):
        block[at : at + 2] = np.array([field], dtype="<u2").view(np.uint8)
    if name == "IQ1_M":
        for word in range(4):
            at = 48 + 2 * word + 1
            block[at] = (block[at] & 0x0F) | ((bits >> (4 * word)) & 15) << 4


def cover_grid(name, blocks):
    """Sets the grid indices of the blocks after the edge blocks to 0, 1, 2 ..."""
    rest = blocks[len(EDGE_SCALES) + 4 :]
    n_entries = {"IQ3_S": 64}.get(name, 32)
    index = np.arange(len(rest) * n_entries).reshape(len(rest), n_entries)
    if name == "IQ2_XS":
        words = rest[:, 2:66].view("<u2")
        words[:] = (words & 0xFE00) | (index % 512)
        return
    low_at = 0 if name == "IQ1_M" else 2
    rest[:, low_at : low_at + n_entries] = index % 256
    high = index // 256
    if name == "IQ1_S":
        words = rest[:, 34:50].view("<u2")
        words[:] = (words & 0xF000) | sum(((high[:, k::4] % 8) << (3 * k)) for k in range(4))
    elif name == "IQ1_M":
        rest[:, 32:48] = (rest[:, 32:48] & 0x88) | (high[:, 0::2] % 8) | (high[:, 1::2] % 8) << 4
    elif name == "IQ2_S":
        rest[:, 66:74] = sum(((high[:, k::4] % 4) << (2 * k)) for k in range(4))
    elif name == "IQ3_S":
        rest[:, 66:74] = sum(((high[:, k::8] % 2) << k) for k in range(8))


def random_blocks(name, rng):
    block_bytes = GGML_QUANT_SIZES[T[name]][1]
    n = BLOCKS.get(name, 20 if block_bytes < 40 else 16)
    blocks = rng.integers(0, 256, (n, block_bytes), dtype=np.uint8)
    for block in blocks:
        put_scale(name, block, *(int(bits) for bits in rng.normal(0, 0.02, 2).astype(np.float16).view(np.uint16)))
    # First an ordinary block, then all bits clear, all codes the largest, a negative scale.
    blocks[1] = 0
    blocks[2] = 255
    put_scale(name, blocks[2], 0x2A66)
    put_scale(name, blocks[3], 0xA934)
    for i, bits in enumerate(EDGE_SCALES):
        put_scale(name, blocks[4 + i], bits)
    if name == "MXFP4":
        blocks[4:14, 0] = [0, 1, 2, 3, 127, 128, 200, 253, 254, 255]
    if name == "NVFP4":
        blocks[4:8, 0:4] = [[0, 1, 7, 8], [126, 127, 128, 255], [119, 120, 121, 247], [56, 64, 15, 16]]
    if name in BLOCKS:
        cover_grid(name, blocks)
    return blocks


def plain(name, rng):
    """Bytes and values of the types without blocks."""
    if name == "F16":
        x = np.arange(0, 65536, 11, dtype=np.uint16).view(np.float16)
    elif name == "BF16":
        x = np.concatenate([rng.integers(0, 65536, 500, dtype=np.uint16), np.array([0, 0x8000, 1, 0x7F80, 0x7FC0], np.uint16)])
        return x.view(np.uint8), quants.dequantize(x.view(np.uint8), T.BF16)
    elif name in ("F32", "F64"):
        x = np.concatenate([rng.normal(0, 1e3, 100), [0.0, -0.0, 1e-42, -3e38, np.inf, np.nan]]).astype(f"<f{name[1] == '3' and 4 or 8}")
    else:
        info = np.iinfo(f"i{int(name[1:]) // 8}")
        x = np.concatenate([rng.integers(info.min, info.max, 100, dtype=info.dtype, endpoint=True), np.array([info.min, info.max, 0, -1], info.dtype)])
    return x.view(np.uint8), x.astype(np.float32)


def checksum(values):
    """64-bit FNV-1a of the little-endian f32 values, every NaN taken as 0x7fc00000."""
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.astype("<f4").view("<u4"))
    hash = 0xCBF29CE484222325
    for byte in bits.astype("<u4").tobytes():
        hash = (hash ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return hash


def encoder_input(rng):
    """256 blocks' worth of finite f32 with all kinds of blocks of 32, none that f16 scales cannot hold."""
    x = rng.normal(0, 1, (128, 32)) * 10.0 ** rng.uniform(-5, 3, (128, 1))
    x[0] = 0
    x[1] = -0.0
    x[2] = 1.5
    x[3] = -2.25
    x[4] = np.arange(32) - 15.5
    x[5] = np.abs(x[5])
    x[6] = -np.abs(x[6])
    x[7] = np.where(np.arange(32) == 9, 3.0, 0.0)
    x[8] = np.where(np.arange(32) % 2 == 0, 127.0, 0.5)
    x[9] = np.where(np.arange(32) % 2 == 0, 4.0, -4.0)
    x[10] *= 1e-6
    x[11] = 60000.0 * np.sin(np.arange(32))
    return x.astype("<f4")


def main(folder):
    rng = np.random.default_rng(20)
    checksums = []
    for qtype in sorted(T):
        name = qtype.name
        with np.errstate(invalid="ignore", over="ignore"):
            if name in F16_FIELDS:
                blocks = random_blocks(name, rng)
                values = quants.dequantize(blocks, qtype)
                stored = values[:STORED]
            elif name in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"):
                blocks, values = plain(name, rng)
                stored = values[:64]
            else:
                continue
        (folder / f"{name}.bin").write_bytes(blocks.tobytes())
        (folder / f"{name}.f32").write_bytes(stored.astype("<f4").tobytes())
        checksums.append(f"{name} {values.size} {checksum(values.reshape(-1)):016x}\n")
    (folder / "checksums.txt").write_text("".join(checksums))
    x = encoder_input(rng)
    (folder / "encode.f32").write_bytes(x.tobytes())
    for name in ENCODED:
        (folder / f"encode.{name}.bin").write_bytes(quants.quantize(x, T[name]).tobytes())


def tables():
    for name in ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]:
        q = getattr(quants, name)
        words = np.frombuffer(bytes.fromhex(q.grid_hex.decode()), dtype="<u2")
        print(f"const {name}_PACKED: [u16; {len(words)}] = [")
        for i in range(0, len(words), 12):
            print("    " + " ".join(f"0x{w:04x}," for w in words[i : i + 12]))
        print("];")


if __name__ == "__main__":
    if sys.argv[1:] == ["--tables"]:
        tables()
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        sys.exit(__doc__)
