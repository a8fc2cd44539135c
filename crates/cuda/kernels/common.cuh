// What every kernel shares: types, the functions of docs/numerics.md, programmatic launches, integer activations.
//
// Compiled with --fmad=false: a product and a sum are two roundings unless fmaf says otherwise. No header is included,
// so that NVRTC needs none.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
#define DEV static __device__ __forceinline__
#define ALL 0xffffffffu

// A row of the step. `seq` is NO_SEQUENCE in a padding row, which has no page, token or position.
constexpr u32 NO_SEQUENCE = 0xffffffffu;
struct Row {
    u32 token, pos, seq;
    u32 first;     // first row of its sequence in the pass
    u32 n_own;     // rows of its sequence in the pass
    u32 table[3];  // where the page table of each class begins in the list of page ids
};

// Where a layer's keys and values lie. A page is [layer][K, V][row][head][dim], as in its canonical form; ids count the
// places of slabs.
constexpr u32 PAGE_ROWS = 256;
struct Place {
    const u64* slabs;
    const u32* pages;  // ids, of all tables
    u64 page_bytes;
    u32 per_slab;
    u32 class_index, layer;
    u32 n_kv;  // elements of a row: heads times dims
};
// The page that holds position `pos` of the sequence of `row`.
DEV u8* page_of(const Place& place, const Row& row, u32 pos) {
    // Not by index, which would copy the row to local memory.
    const u32 c = place.class_index, table = c == 0 ? row.table[0] : c == 1 ? row.table[1] : row.table[2];
    const u32 id = place.pages[table + pos / PAGE_ROWS];
    return (u8*)place.slabs[id / place.per_slab] + id % place.per_slab * place.page_bytes;
}
// Index of the first element of a row of keys (half 0) or values (half 1) in its page.
DEV size_t row_in_page(const Place& place, u32 pos, u32 half) {
    return (((size_t)place.layer * 2 + half) * PAGE_ROWS + pos % PAGE_ROWS) * place.n_kv;
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------
// A kernel waits before it touches what its predecessor wrote, and every block waits: "my predecessor is done" then
// implies that its predecessor is done. Small kernels let the next one start only when they have waited: the product
// before has left the multiprocessors then, and the blocks of the next one, with their first weights, settle evenly. (The
// other order: 6.4 instead of 6.0 ms a token on an H200.)
DEV void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- numbers --------------------------------------------------------------------------------------------------------
DEV u32 bits(float x) { return __float_as_uint(x); }
DEV float from_bits(u32 x) { return __uint_as_float(x); }
DEV float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
DEV u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
DEV float low_half(u32 pair) { return half_to_float((u16)pair); }
DEV float high_half(u32 pair) { return half_to_float((u16)(pair >> 16)); }
DEV float infinity() { return from_bits(0x7f800000u); }
DEV float not_a_number() { return from_bits(0x7fc00000u); }

// exp, sigmoid, SiLU and tanh are the programs of crates/cpu/src/math.rs, step by step.
constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23
struct Reduced {
    float t, e;
};
DEV Reduced reduced(float x) {
    const float t = fmaf(x, 1.44269504088896340736f, ROUNDING);
    const float n = t - ROUNDING;
    float r = fmaf(n, -0.693147180559945309417f, x);
    r = fmaf(n, 1.9046542e-9f, r);
    float q = 0.0013814538f;
    q = fmaf(q, r, 0.008368745f);
    q = fmaf(q, r, 0.04166839f);
    q = fmaf(q, r, 0.16666521f);
    q = fmaf(q, r, 0.49999994f);
    return {t, fmaf(r * r, q, r)};
}
DEV float add_to_exponent(float y, float t) { return from_bits(bits(y) + (bits(t) << 23)); }
DEV float exp_of(float x) {
    const Reduced a = reduced(x);
    float y = add_to_exponent(1.0f + a.e, a.t);
    y = x > 88.72283f ? infinity() : y;
    y = -87.33654f > x ? 0.0f : y;
    return x != x ? x : y;
}
DEV float sigmoid(float x) { return 1.0f / (1.0f + exp_of(0.0f - x)); }
DEV float silu(float x) { return x * sigmoid(x); }
DEV float tanh_of(float x) {
    float z = x > 10.0f ? 10.0f : x;
    z = -10.0f > z ? -10.0f : z;
    const Reduced a = reduced(z + z);
    const float power = add_to_exponent(1.0f, a.t);
    const float m = fmaf(power, a.e, power - 1.0f);
    const float y = m / (m + 2.0f);
    return x != x ? x : y;
}
// The cap must not hide what is not finite.
DEV float softcap_of(float x, float scale, float cap, bool has_cap) {
    x = x * scale;
    if (!has_cap) return x;
    const float capped = cap * tanh_of(x / cap);
    return (x - x) != (x - x) ? x : capped;
}

// ---- half-warps -----------------------------------------------------------------------------------------------------
// Sixteen lanes own a group of 256 elements: lane l holds the elements l mod 16, ascending. That is the order of sums
// of docs/numerics.md and, a byte each, the order in which products read activations.
constexpr u32 GROUP = 256;
DEV u32 half_lane() { return threadIdx.x & 15; }

// The tree 8-4-2-1, in every lane.
DEV float sum_of_lanes(float v) {
    v += __shfl_xor_sync(ALL, v, 8);
    v += __shfl_xor_sync(ALL, v, 4);
    v += __shfl_xor_sync(ALL, v, 2);
    v += __shfl_xor_sync(ALL, v, 1);
    return v;
}
DEV u32 max_of_lanes(u32 v) {
#pragma unroll
    for (u32 o = 8; o; o >>= 1) v = max(v, __shfl_xor_sync(ALL, v, o));
    return v;
}
DEV int sum_of_quads(int v) {
    v += __shfl_xor_sync(ALL, v, 4);
    return v + __shfl_xor_sync(ALL, v, 8);
}

// The elements of group `g` of a row of `n`; 0 beyond its end.
DEV void load_group(float (&v)[16], const float* row, u32 g, u32 n) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const u32 k = g * GROUP + i * 16 + half_lane();
        v[i] = k < n ? row[k] : 0.0f;
    }
}
DEV void store_group(const float (&v)[16], float* row, u32 g, u32 n) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const u32 k = g * GROUP + i * 16 + half_lane();
        if (k < n) row[k] = v[i];
    }
}
// Sum of the squares of a group, in every lane.
DEV float squares(const float (&v)[16]) {
    float s = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 16; i++) s = fmaf(v[i], v[i], s);
    return sum_of_lanes(s);
}
DEV float inverse_rms(float squares, u32 n, float eps) { return 1.0f / sqrtf(squares / (float)n + eps); }

// ---- integer activations --------------------------------------------------------------------------------------------
// Of `n_col` rows ("columns" of the product). Blocks of 256 (kind 1): codes [b][unit of 64][col][64], byte
// 16t + 4i + j is element 64 unit + 16i + 4t + j; digits [b][col][32], for t = 0..3 four low and four high digits of the
// sums of 16 codes, sum = 64 high + low; scales [b][col]. Blocks of 32 (kind 2): codes [b][col][32], byte 8t + 4i + j is
// element 16i + 4t + j; scales and sums [b][col]. Kind 3 is kind 1 with other codes, [b][half][col][128] in order, but that
// pieces of 16 are exchanged by the column's number: what asynchronous products read.
constexpr u32 FLOATS = 0, PER_256 = 1, PER_32 = 2, PER_256_IN_ORDER = 3;
struct Activations {
    u8* codes;
    u8* digits;
    float* scales;
    float* sums;
    u32 n_col;
    u32 kind;
};

// Scale of a block whose largest magnitude has these bits; `inverse` is 0 where all codes are 0.
DEV float block_scale(u32 largest, float& inverse) {
    const u32 inf = 0x7f800000u;
    const float max = from_bits(largest);
    inverse = 127.0f / max;
    if (largest >= inf || bits(inverse) == inf) {
        inverse = 0.0f;
        return largest >= inf ? not_a_number() : 0.0f;
    }
    return max / 127.0f;
}
DEV u32 magnitude(float x) { return bits(x) & 0x7fffffffu; }
// The codes of four neighbouring lanes as a word, in each of them.
DEV u32 code_word(float x, float inverse) {
    const u32 code = inverse == 0.0f ? 0 : bits(x * inverse + ROUNDING) & 0xff;
    u32 w = code << 8 * (threadIdx.x & 3);
    w |= __shfl_xor_sync(ALL, w, 1);
    return w | __shfl_xor_sync(ALL, w, 2);
}
DEV u32 pick(u32 j, u32 a, u32 b, u32 c, u32 d) { return j < 2 ? (j == 0 ? a : b) : (j == 2 ? c : d); }

// Group `b` of row `col`, in blocks of 256. All lanes take part; those that are not `on` store nothing.
DEV void store_per_256(const float (&v)[16], const Activations& a, u32 b, u32 col, bool on) {
    const u32 t = half_lane() >> 2, j = half_lane() & 3;
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < 16; i++) largest = max(largest, magnitude(v[i]));
    float inverse;
    const float scale = block_scale(max_of_lanes(largest), inverse);
    u32 w[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) w[i] = code_word(v[i], inverse);
    u32 unit[4], low = 0, high = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        unit[i] = pick(j, w[i], w[4 + i], w[8 + i], w[12 + i]);
        const int sum = sum_of_quads(__dp4a((int)unit[i], 0x01010101, 0));
        low |= (u32)(sum & 63) << 8 * i;
        high |= (u32)((sum >> 6) & 255) << 8 * i;
    }
    if (!on) return;
    const size_t at = (size_t)b * a.n_col + col;
    if (a.kind == PER_256) {
        *(uint4*)(a.codes + (((size_t)b * 4 + j) * a.n_col + col) * 64 + t * 16) = make_uint4(unit[0], unit[1], unit[2], unit[3]);
    } else {
        u8* half = a.codes + (((size_t)b * 2 + j / 2) * a.n_col + col) * 128 + t * 4;
#pragma unroll
        for (u32 i = 0; i < 4; i++) *(u32*)(half + ((j % 2 * 4 + i) ^ (col & 7)) * 16) = unit[i];
    }
    if (t == 0) *(uint2*)(a.digits + at * 32 + j * 8) = make_uint2(low, high);
    if (half_lane() == 0) a.scales[at] = scale;
}

// The same in blocks of 32; `n` is the length of the row.
DEV void store_per_32(const float (&v)[16], const Activations& a, u32 g, u32 col, u32 n, bool on) {
    const u32 t = half_lane() >> 2, j = half_lane() & 3;
    float scale[8];
    u32 w[16];
#pragma unroll
    for (u32 c = 0; c < 8; c++) {
        float inverse;
        scale[c] = block_scale(max_of_lanes(max(magnitude(v[2 * c]), magnitude(v[2 * c + 1]))), inverse);
        w[2 * c] = code_word(v[2 * c], inverse);
        w[2 * c + 1] = code_word(v[2 * c + 1], inverse);
    }
#pragma unroll
    for (u32 h = 0; h < 2; h++) {  // lane j of a quad stores the blocks j and j + 4
        const u32 first = pick(j, w[8 * h], w[8 * h + 2], w[8 * h + 4], w[8 * h + 6]);
        const u32 second = pick(j, w[8 * h + 1], w[8 * h + 3], w[8 * h + 5], w[8 * h + 7]);
        const int sum = sum_of_quads(__dp4a((int)second, 0x01010101, __dp4a((int)first, 0x01010101, 0)));
        const u32 b = g * 8 + h * 4 + j;
        const u32 s = pick(j, bits(scale[4 * h]), bits(scale[4 * h + 1]), bits(scale[4 * h + 2]), bits(scale[4 * h + 3]));
        if (!on || b * 32 >= n) continue;
        const size_t at = (size_t)b * a.n_col + col;
        *(uint2*)(a.codes + at * 32 + t * 8) = make_uint2(first, second);
        if (t == 0) {
            a.scales[at] = from_bits(s);
            a.sums[at] = (float)sum;
        }
    }
}

// Group `g` of row `col` of `n` elements in the form that `a` asks for, if any.
DEV void store_codes(const float (&v)[16], const Activations& a, u32 g, u32 col, u32 n, bool on) {
    if (a.kind == PER_256 || a.kind == PER_256_IN_ORDER) store_per_256(v, a, g, col, on);
    if (a.kind == PER_32) store_per_32(v, a, g, col, n, on);
}
