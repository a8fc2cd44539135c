// Attention over pages of f16 on tensor cores, heads of DIM elements: f16 products, f32 sums.
//
// A query and a probability are two f16 each, upper and lower half, so that only keys and values are as coarse as they
// are stored. Sixteen query heads of a key/value head are the rows of a tile. Absolute blocks of 64 keys give each query
// a maximum, a sum and an output from that block alone; blocks merge ascending into their segment of 512 positions,
// segments into their span of 4,096, spans into the whole. What a reader would get wrong: one function computes a block
// for every kernel, and who merges is nowhere in the order, so few rows shared by many blocks of threads and many rows
// side by side give the same bits. Values of keys that are not seen count as 0, whatever lies there. Few rows are a
// matter of microseconds, most of which is fetching instructions: the code is kept short, not only the work.
constexpr u32 BLOCK_KEYS = 64, SEGMENT_KEYS = 512, SPAN_KEYS = 4096;
constexpr u32 HEADS = 16, WARPS = 8, THREADS = 32 * WARPS;
constexpr u32 RUNS = DIM / 32;                     // of a head: 32 dimensions, two steps of a product
constexpr u32 HALVES = DIM < 64 ? 1 : DIM / 64;    // parts of an output that are computed together
constexpr u32 TILES = DIM / HALVES / 8;            // of eight dimensions, in such a part
constexpr u32 OWN = HALVES * TILES * 2;            // elements of a query's output that a thread holds

struct Job {
    const float* q;  // [row][head][dim]
    const Row* rows;
    Place place;
    float* out;      // [row][head][dim]
    float* states;   // [row][tile of heads][slot][STATE]: slots of segments, then of spans; of many rows two slots
    u32* arrivals;   // [row][tile of heads][span, then the whole], 0 between launches
    u32 n_segments;  // slots of segments
    u32 n_spans;     // slots of spans
    u32 n_head, n_head_kv;
    u32 first_row;  // of the launch, where rows are few
    u32 window;     // 0: none
    float scale;    // on the scores, times log2(e): exponentials are powers of two here
};
// Norm and rotation of q and of the pass's own keys, and the store of these, if they have not been done.
struct Fresh {
    const float *k, *v;  // [row][head][dim]; null if done
    const float *q_norm, *k_norm;
    float eps;
    Turn turn;
};
// A state in memory: outputs of all heads, their maxima, their sums.
constexpr u32 STATE = HEADS * DIM + 2 * HEADS;

DEV u32 less(u32 a, u32 b) { return a > b ? a - b : 0; }

// ---- instructions ---------------------------------------------------------------------------------------------------
DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV u32 halves_of(float x, float y) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}
// Two numbers as pairs of f16: what the first cannot hold is in the second.
DEV void split(float x, float y, u32& upper, u32& lower) {
    upper = halves_of(x, y);
    lower = halves_of(x - low_half(upper), y - high_half(upper));
}
DEV float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV void ask_cache(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// ---- queries --------------------------------------------------------------------------------------------------------
// Sixteen heads as f16, upper halves and lower ones, as A operands of the steps: [run][step of it][lane][word].
struct Queries {
    uint4 upper[2 * RUNS][32], lower[2 * RUNS][32];

    __device__ __forceinline__ void put(u32 head, u32 d, float x) {
        const u32 step = d / 32 * 2 + d % 8 / 4, lane = head % 8 * 4 + d % 32 / 8, word = d % 4 / 2 * 2 + head / 8;
        const u32 at = ((step * 32 + lane) * 4 + word) * 2 + d % 2;
        const u16 a = float_to_half(x);
        ((u16*)upper)[at] = a;
        ((u16*)lower)[at] = float_to_half(x - half_to_float(a));
    }
};

// ---- a block of keys ------------------------------------------------------------------------------------------------
// Keys and values of a block, rows so many elements apart; keys lo .. hi - 1 are seen, at least one.
struct Block {
    const u16 *keys, *values;
    u32 key_pitch, value_pitch;
    u32 lo, hi;

    __device__ __forceinline__ bool sees(u32 key) const { return key >= lo && key < hi; }
    // Of this thread's keys 16 i + 2t + (0, 1, 8, 9) a bit each.
    __device__ __forceinline__ u32 own_keys() const {
        u32 seen = 0;
#pragma unroll
        for (u32 i = 0; i < 16; i++) seen |= (u32)sees(16 * (i / 4) + threadIdx.x % 4 * 2 + i % 2 + i % 4 / 2 * 8) << i;
        return seen;
    }
};

// Maximum, sum and output of two queries, of heads g and g + 8 with g = lane / 4. A thread's outputs: [part][tile][e], e =
// 0, 1 of head g, 2, 3 of head g + 8; dimension (part * 8 + 2t + e % 2) * TILES + tile.
struct State {
    float max[2], sum[2];
    float out[HALVES][TILES][4];
};
// What two parts of the keys give together, from their maxima: factors of the first and of the second.
DEV void join(float& max, float max_of_part, float& old, float& fresh) {
    const float larger = max > max_of_part ? max : max_of_part;
    old = power_of_two(max - larger), fresh = power_of_two(max_of_part - larger);
    max = larger;
}
DEV float joined(float x, float part, float old, float fresh) { return fmaf(x, old, part * fresh); }

DEV u32 word_of(const uint4& w, u32 i) { return i < 2 ? (i == 0 ? w.x : w.y) : (i == 2 ? w.z : w.w); }

// Probabilities against the block's largest score, as A operands of the product with the values; maxima and sums. FAR: keys
// lie where a load takes long, and all are asked for at once.
template <bool FAR> DEV void weights_of_block(const Queries& q, const Block& block, float scale, u32 (&upper)[8][2], u32 (&lower)[8][2], float (&max)[2], float (&sum)[2]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float s[8][4] = {};
    uint4 w[FAR ? RUNS : 1][8];
    auto load = [&](u32 j) {
#pragma unroll
        for (u32 n = 0; n < 8; n++) w[FAR ? j : 0][n] = *(const uint4*)(block.keys + (8 * n + g) * block.key_pitch + 32 * j + 8 * t);
    };
    if (FAR)
#pragma unroll
        for (u32 j = 0; j < RUNS; j++) load(j);
#pragma unroll
    for (u32 j = 0; j < RUNS; j++) {
        const uint4 a = q.upper[2 * j][lane], b = q.upper[2 * j + 1][lane];
        const uint4 c = q.lower[2 * j][lane], e = q.lower[2 * j + 1][lane];
        if (!FAR) load(j);
        // Eight products in a row do not wait for each other.
        const uint4(&key)[8] = w[FAR ? j : 0];
#pragma unroll
        for (u32 n = 0; n < 8; n++) mma(s[n], c.x, c.y, c.z, c.w, key[n].x, key[n].y);
#pragma unroll
        for (u32 n = 0; n < 8; n++) mma(s[n], a.x, a.y, a.z, a.w, key[n].x, key[n].y);
#pragma unroll
        for (u32 n = 0; n < 8; n++) mma(s[n], e.x, e.y, e.z, e.w, key[n].z, key[n].w);
#pragma unroll
        for (u32 n = 0; n < 8; n++) mma(s[n], b.x, b.y, b.z, b.w, key[n].z, key[n].w);
    }
    max[0] = max[1] = -infinity();
#pragma unroll
    for (u32 n = 0; n < 8; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            s[n][e] = block.sees(8 * n + 2 * t + e % 2) ? s[n][e] * scale : -infinity();
            max[e / 2] = fmaxf(max[e / 2], s[n][e]);
        }
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        max[h] = fmaxf(max[h], __shfl_xor_sync(ALL, max[h], 1));
        max[h] = fmaxf(max[h], __shfl_xor_sync(ALL, max[h], 2));
        sum[h] = 0.0f;
    }
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            s[n][e] = power_of_two(s[n][e] - max[e / 2]);
            sum[e / 2] = sum[e / 2] + s[n][e];
        }
        split(s[n][0], s[n][1], upper[n][0], lower[n][0]);
        split(s[n][2], s[n][3], upper[n][1], lower[n][1]);
    }
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        sum[h] = sum[h] + __shfl_xor_sync(ALL, sum[h], 1);
        sum[h] = sum[h] + __shfl_xor_sync(ALL, sum[h], 2);
    }
}

// Eight or four neighbouring values of a key; 0 if it is not seen.
DEV uint4 values_at(const u16* at, bool is_seen) {
    uint4 w = make_uint4(0, 0, 0, 0);
    if (TILES == 8) {
        if (is_seen) w = *(const uint4*)at;
    } else if (is_seen) {
        const uint2 few = *(const uint2*)at;
        w.x = few.x, w.y = few.y;
    }
    return w;
}

// Part `half` of the outputs.
DEV void weigh_block(const Block& block, u32 half, u32 seen, const u32 (&upper)[8][2], const u32 (&lower)[8][2], float (&out)[TILES][4]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pitch = block.value_pitch;
    const u16* at = block.values + 2 * t * pitch + (half * 8 + g) * TILES;
#pragma unroll
    for (u32 j = 0; j < TILES; j++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) out[j][e] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const uint4 a = values_at(at, seen >> 4 * i & 1), b = values_at(at + pitch, seen >> 4 * i & 2);
        const uint4 c = values_at(at + 8 * pitch, seen >> 4 * i & 4), e = values_at(at + 9 * pitch, seen >> 4 * i & 8);
        at += 16 * pitch;
        u32 b0[TILES], b1[TILES];
#pragma unroll
        for (u32 j = 0; j < TILES; j++) {
            const u32 order = j % 2 ? 0x7632 : 0x5410;
            b0[j] = __byte_perm(word_of(a, j / 2), word_of(b, j / 2), order), b1[j] = __byte_perm(word_of(c, j / 2), word_of(e, j / 2), order);
        }
#pragma unroll
        for (u32 j = 0; j < TILES; j++) mma(out[j], lower[2 * i][0], lower[2 * i][1], lower[2 * i + 1][0], lower[2 * i + 1][1], b0[j], b1[j]);
#pragma unroll
        for (u32 j = 0; j < TILES; j++) mma(out[j], upper[2 * i][0], upper[2 * i][1], upper[2 * i + 1][0], upper[2 * i + 1][1], b0[j], b1[j]);
    }
}

// ---- few rows -------------------------------------------------------------------------------------------------------
// What a thread holds when all of a block of threads merge: a sixteenth of a head.
constexpr u32 SHARE = DIM / 16;
struct Share {
    float max, sum, out[SHARE];

    __device__ __forceinline__ void merge(const Share& part) {
        float old, fresh;
        join(max, part.max, old, fresh);
        sum = joined(sum, part.sum, old, fresh);
#pragma unroll
        for (u32 i = 0; i < SHARE; i++) out[i] = joined(out[i], part.out[i], old, fresh);
    }
};
constexpr u32 PITCH = DIM + 4;
struct FewMemory {
    Queries q;
    float out[WARPS][HEADS][PITCH];
    float max[WARPS][HEADS], sum[WARPS][HEADS];
    u32 is_last;
};

// The state of block `i` of the segment.
DEV Share share_of(const FewMemory& m, u32 i) {
    const u32 head = threadIdx.x / 16, d = threadIdx.x % 16 * SHARE;
    Share s = {m.max[i][head], m.sum[i][head]};
#pragma unroll
    for (u32 k = 0; k < SHARE; k++) s.out[k] = m.out[i][head][d + k];
    return s;
}
// A state in memory; past the first cache, which knows nothing of other blocks of threads.
DEV Share read_share(const float* state) {
    const u32 head = threadIdx.x / 16, d = threadIdx.x % 16 * SHARE;
    Share s = {__ldcg(state + HEADS * DIM + head), __ldcg(state + HEADS * DIM + HEADS + head)};
#pragma unroll
    for (u32 k = 0; k < SHARE; k += 2) {
        const float2 x = __ldcg((const float2*)(state + head * DIM + d + k));
        s.out[k] = x.x, s.out[k + 1] = x.y;
    }
    return s;
}
DEV void write_share(float* state, const Share& s) {
    const u32 head = threadIdx.x / 16, part = threadIdx.x % 16, d = part * SHARE;
#pragma unroll
    for (u32 k = 0; k < SHARE; k += 2) *(float2*)(state + head * DIM + d + k) = make_float2(s.out[k], s.out[k + 1]);
    if (part == 0) state[HEADS * DIM + head] = s.max, state[HEADS * DIM + HEADS + head] = s.sum;
}
DEV Share merged(const float* states, u32 n) {
    Share s = read_share(states);
#pragma unroll 2
    for (u32 i = 1; i < n; i++) s.merge(read_share(states + (size_t)i * STATE));
    return s;
}
// Is this block of threads the last of `n` to come here? What it and the others wrote before is seen by all its threads then.
DEV bool is_last_of(u32* arrivals, u32 n, FewMemory& m) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        m.is_last = atomicAdd(arrivals, 1) == n - 1;
        if (m.is_last) *arrivals = 0;  // for the next launch
    }
    __syncthreads();
    __threadfence();
    return m.is_last;
}

// A thread's elements of a head, every sixteenth.
constexpr u32 EACH = DIM / 16;
DEV void load_head(float (&x)[EACH], const float* head) {
#pragma unroll
    for (u32 i = 0; i < EACH; i++) x[i] = head[i * 16 + half_lane()];
}
// The head of a half-warp, normed, in `to`.
DEV void norm_head(const float (&x)[EACH], const float (&weights)[EACH], float eps, float* to) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) sum = fmaf(x[i], x[i], sum);
    const float s = inverse_rms(sum_of_lanes(sum), DIM, eps);
#pragma unroll
    for (u32 i = 0; i < EACH; i++) to[i * 16 + half_lane()] = x[i] * s * weights[i];
    __syncwarp();
}
// Cosines and sines of a thread's pairs in a row.
struct Angles {
    float cos[EACH / 2], sin[EACH / 2];

    DEV Angles load(const Turn& turn, u32 row) {
        Angles a;
        const float* cos = turn.table + row * 2 * turn.n_pairs;
#pragma unroll
        for (u32 i = 0; i < EACH / 2; i++) {
            const u32 j = i * 16 + half_lane();
            a.cos[i] = j < turn.n_pairs ? cos[j] : 1.0f, a.sin[i] = j < turn.n_pairs ? cos[turn.n_pairs + j] : 0.0f;
        }
        return a;
    }
};
// Turns a normed head, pair by pair, and puts its elements where they belong.
template <class Put> DEV void turn_head(const Turn& turn, const Angles& angles, const float* head, Put put) {
#pragma unroll
    for (u32 i = 0; i < EACH / 2; i++) {
        const u32 j = i * 16 + half_lane();
        const bool turns = j < turn.n_pairs, apart = turns && turn.is_halves;
        const u32 first = apart ? j : 2 * j, second = apart ? j + turn.n_pairs : 2 * j + 1;
        const float a = head[first], b = head[second], c = angles.cos[i], s = angles.sin[i];
        put(first, turns ? a * c - b * s : a);
        put(second, turns ? a * s + b * c : b);
    }
    __syncwarp();
}

// A row's queries, normed and turned if they have not been; half-warps own heads.
DEV void put_queries(const Fresh& fresh, const float (&x)[EACH], const float (&weights)[EACH], const Angles& angles, float* space, Queries& q) {
    const u32 head = threadIdx.x / 16;
    if (fresh.k) {
        norm_head(x, weights, fresh.eps, space);
        turn_head(fresh.turn, angles, space, [&](u32 d, float y) { q.put(head, d, y); });
    } else {
#pragma unroll
        for (u32 i = 0; i < EACH; i++) q.put(head, i * 16 + half_lane(), x[i]);
    }
}

// The pass's own keys and values, normed, turned and stored; a warp takes a key and its value. Blocks of threads that need
// the same ones store the same bits.
struct FreshKeys {
    const float* from;  // head of the pass's first row of the sequence
    u32 stride;         // elements of a row
    float weights[EACH];

    DEV FreshKeys of(const Job& job, const Fresh& fresh, const Row& row, u32 head_kv) {
        FreshKeys f;
        f.stride = job.n_head_kv * DIM;
        f.from = (threadIdx.x / 16 % 2 ? fresh.v : fresh.k) + (size_t)row.first * f.stride + head_kv * DIM;
        load_head(f.weights, fresh.k_norm);
        return f;
    }
    // Of row `r` of the sequence in the pass.
    __device__ __forceinline__ void load(float (&x)[EACH], u32 r) const { load_head(x, from + (size_t)r * stride); }
    __device__ __forceinline__ void store(const Fresh& fresh, const float (&x)[EACH], const Angles& angles, u16* to, float* space) const {
        const bool is_value = threadIdx.x / 16 % 2;
        norm_head(x, weights, fresh.eps, space);
        if (is_value) {
#pragma unroll
            for (u32 i = 0; i < EACH; i++) to[i * 16 + half_lane()] = float_to_half(x[i]);
        }
        turn_head(fresh.turn, angles, space, [&](u32 d, float y) {
            if (!is_value) to[d] = float_to_half(y);
        });
    }
};

// Divides, multiplies by the sigmoid of the gate if there is one, and leaves the result and its int8 form.
DEV void finish_row(const Job& job, const Share& s, u32 r, u32 head0, u32 n, const float (&gate)[SHARE], bool has_gate, const Activations& a,
                    FewMemory& m) {
    const u32 head = threadIdx.x / 16, d = threadIdx.x % 16 * SHARE;
    float* x = m.out[0][0];  // [head][dim]; the blocks' outputs have been read
    __syncthreads();
    if (head < n) {
        const size_t at = ((size_t)r * job.n_head + head0 + head) * DIM + d;
        const float inverse = 1.0f / s.sum;
#pragma unroll
        for (u32 k = 0; k < SHARE; k++) {
            float y = s.out[k] * inverse;
            if (has_gate) y = y * sigmoid(gate[k]);
            job.out[at + k] = y;
            x[head * DIM + d + k] = y;
        }
    }
    if (a.kind == FLOATS) return;
    __syncthreads();
    const u32 group = threadIdx.x / 16, n_groups = n * DIM / GROUP;
    if (threadIdx.x / 32 * 2 >= n_groups) return;
    const bool is_on = group < n_groups;
    float v[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = is_on ? x[group * GROUP + i * 16 + half_lane()] : 0.0f;
    store_codes(v, a, head0 * DIM / GROUP + group, r, job.n_head * DIM, is_on);
}

// Grid: workers over segments, tiles of query heads, rows. A warp takes a block of its segment's eight; who comes last
// merges.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_few(Job job, Fresh fresh, const float* gate, Activations a) {
    extern __shared__ __align__(128) u8 memory[];
    FewMemory& m = *(FewMemory*)memory;
    const u32 r = job.first_row + blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 per_kv = job.n_head / job.n_head_kv, tiles = (per_kv + HEADS - 1) / HEADS;
    const u32 head_kv = blockIdx.y / tiles, first = blockIdx.y % tiles * HEADS, n = min(HEADS, per_kv - first);
    const u32 head0 = head_kv * per_kv + first;
    const Row row = job.rows[r];  // the step's: no need to wait for it
    const bool is_padding = row.seq == NO_SEQUENCE;
    const u32 lo = job.window ? less(row.pos + 1, job.window) : 0, hi = row.pos + 1, start = row.pos - (r - row.first);
    const u32 first_segment = lo / SEGMENT_KEYS, n_segments = is_padding ? 0 : row.pos / SEGMENT_KEYS - first_segment + 1;
    auto keys_at = [&](u32 pos, u32 half) {
        return (const u16*)page_of(job.place, row, pos) + row_in_page(job.place, pos, half) + head_kv * DIM;
    };
    if (blockIdx.x < n_segments) {
        const u32 at = (first_segment + blockIdx.x) * SEGMENT_KEYS + warp * BLOCK_KEYS;
        if (at < start && at + BLOCK_KEYS > lo)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {  // a row of DIM f16 is two lines at most
                const u16 *k = keys_at(at, 0) + (i * 32 + lane) * job.place.n_kv, *v = keys_at(at, 1) + (i * 32 + lane) * job.place.n_kv;
                ask_cache(k), ask_cache(k + DIM / 2), ask_cache(v), ask_cache(v + DIM / 2);
            }
    }
    // What the predecessor does not write is fetched before it is waited for.
    const bool is_busy = blockIdx.x < n_segments, is_fresh = fresh.k && is_busy;
    const u32 half = threadIdx.x / 16;
    float q_norm[EACH] = {};
    Angles angles = {};
    FreshKeys keys = {};
    if (is_fresh) {
        load_head(q_norm, fresh.q_norm);
        angles = Angles::load(fresh.turn, r);
        keys = FreshKeys::of(job, fresh, row, head_kv);
    }
    // Where the last of the pass's own keys that this row sees goes: in decoding it is the only one.
    u16* own_place = is_fresh ? (u16*)keys_at(row.pos, half % 2) : 0;
    wait_for_predecessor();
    let_dependents_start();
    if (is_padding && blockIdx.x == 0)
        for (u32 i = threadIdx.x; i < n * DIM; i += THREADS) job.out[((size_t)r * job.n_head + head0) * DIM + i] = 0.0f;
    if (!is_busy) return;
    float x[EACH] = {}, own[EACH] = {}, own_gate[SHARE] = {};
    if (half < n) load_head(x, job.q + ((size_t)r * job.n_head + head0 + half) * DIM);
    if (is_fresh && warp == 0) keys.load(own, r - row.first);
    if (gate && half < n)
#pragma unroll
        for (u32 k = 0; k < SHARE; k++) own_gate[k] = gate[((size_t)r * job.n_head + head0 + half) * DIM + threadIdx.x % 16 * SHARE + k];
    put_queries(fresh, x, q_norm, angles, m.out[0][half], m.q);
    const size_t place = (size_t)blockIdx.z * gridDim.y + blockIdx.y;
    float* states = job.states + place * (job.n_segments + job.n_spans) * STATE;
    u32* arrivals = job.arrivals + place * (job.n_spans + 1);
    const u32 first_span = lo / SPAN_KEYS, n_spans = row.pos / SPAN_KEYS - first_span + 1;
    for (u32 i = blockIdx.x; i < n_segments; i += gridDim.x) {
        const u32 segment = first_segment + i, from = max(lo, segment * SEGMENT_KEYS), to = min(hi, (segment + 1) * SEGMENT_KEYS);
        if (is_fresh && to > start) {
            if (to == hi && warp == 0) keys.store(fresh, own, angles, own_place, m.out[1][half]);
#pragma unroll 1
            for (u32 pos = max(from, start) + warp; pos < min(to, row.pos); pos += WARPS) {
                float y[EACH];
                keys.load(y, pos - start);
                keys.store(fresh, y, Angles::load(fresh.turn, row.first + pos - start), (u16*)keys_at(pos, half % 2), m.out[1][half]);
            }
        }
        __syncthreads();  // queries and fresh keys are there; the outputs of the segment before have been read
        const u32 at = segment * SEGMENT_KEYS + warp * BLOCK_KEYS;
        if (at < to && at + BLOCK_KEYS > from) {
            const Block block = {keys_at(at, 0), keys_at(at, 1), job.place.n_kv, job.place.n_kv, less(from, at), min(BLOCK_KEYS, to - at)};
            u32 upper[8][2], lower[8][2];
            float max[2], sum[2];
            weights_of_block<true>(m.q, block, job.scale, upper, lower, max, sum);
            const u32 seen = block.own_keys();
#pragma unroll 1
            for (u32 half = 0; half < HALVES; half++) {
                float out[TILES][4];
                weigh_block(block, half, seen, upper, lower, out);
#pragma unroll
                for (u32 e = 0; e < 4; e++)
#pragma unroll
                    for (u32 j = 0; j < TILES; j++) m.out[warp][g + e / 2 * 8][(half * 8 + 2 * t + e % 2) * TILES + j] = out[j][e];
            }
            if (t == 0) m.max[warp][g] = max[0], m.max[warp][g + 8] = max[1], m.sum[warp][g] = sum[0], m.sum[warp][g + 8] = sum[1];
        }
        __syncthreads();
        const u32 first_block = (from - segment * SEGMENT_KEYS) / BLOCK_KEYS, last_block = (to - 1 - segment * SEGMENT_KEYS) / BLOCK_KEYS;
        Share s = share_of(m, first_block);
#pragma unroll 1
        for (u32 b = first_block + 1; b <= last_block; b++) s.merge(share_of(m, b));
        if (n_segments > 1) {
            write_share(states + (size_t)i * STATE, s);
            const u32 span = segment * SEGMENT_KEYS / SPAN_KEYS, per_span = SPAN_KEYS / SEGMENT_KEYS;
            const u32 span_first = max(first_segment, span * per_span), span_end = min(first_segment + n_segments, (span + 1) * per_span);
            if (!is_last_of(arrivals + (span - first_span), span_end - span_first, m)) continue;
            s = merged(states + (size_t)(span_first - first_segment) * STATE, span_end - span_first);
            if (n_spans > 1) {
                float* spans = states + (size_t)job.n_segments * STATE;
                write_share(spans + (size_t)(span - first_span) * STATE, s);
                if (!is_last_of(arrivals + job.n_spans, n_spans, m)) continue;
                s = merged(spans, n_spans);
            }
        }
        finish_row(job, s, r, head0, n, own_gate, gate, a, m);
    }
}

// ---- many rows ------------------------------------------------------------------------------------------------------
// Eight neighbouring rows of a sequence share the keys and values of a block; a warp owns a row.
constexpr u32 KEY_PITCH = DIM + 32, VALUE_PITCH = DIM + 8;  // so that rows lie in different banks
struct Stage {
    u16 keys[BLOCK_KEYS][KEY_PITCH], values[BLOCK_KEYS][VALUE_PITCH];
};
struct ManyMemory {
    Queries q[WARPS];
    Stage stages[2];
};

DEV void copy_16_bytes(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

// x = x and part together, or part if there is nothing yet; by element.
template <class Part, class At>
DEV void merge_into(float (&max)[2], float (&sum)[2], bool is_first, const float (&part_max)[2], const float (&part_sum)[2], Part part, At at) {
    float old[2] = {}, fresh[2] = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        if (is_first) {
            max[h] = part_max[h], sum[h] = part_sum[h];
        } else {
            join(max[h], part_max[h], old[h], fresh[h]);
            sum[h] = joined(sum[h], part_sum[h], old[h], fresh[h]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2 * OWN; i++) {
        const float y = part(i);
        at(i) = is_first ? y : joined(at(i), y, old[i % 4 / 2], fresh[i % 4 / 2]);
    }
}

// Grid: 1, tiles of query heads, rows; a block of threads for every eighth row of a sequence, from the last.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many(Job job) {
    extern __shared__ __align__(128) u8 memory[];
    ManyMemory& m = *(ManyMemory*)memory;
    const u32 r = gridDim.z - 1 - blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 per_kv = job.n_head / job.n_head_kv, tiles = (per_kv + HEADS - 1) / HEADS;
    const u32 head_kv = blockIdx.y / tiles, first = blockIdx.y % tiles * HEADS, n = min(HEADS, per_kv - first);
    const u32 head0 = head_kv * per_kv + first;
    const Row row = job.rows[r];
    wait_for_predecessor();
    let_dependents_start();
    if (row.seq == NO_SEQUENCE) {
        for (u32 i = threadIdx.x; i < n * DIM; i += THREADS) job.out[((size_t)r * job.n_head + head0) * DIM + i] = 0.0f;
        return;
    }
    if ((r - row.first) % WARPS) return;
    const u32 n_rows = min(WARPS, row.n_own - (r - row.first));
    const u32 all_lo = job.window ? less(row.pos + 1, job.window) : 0, all_hi = row.pos + n_rows;
    const u32 own_row = r + warp, pos = row.pos + warp, lo = job.window ? less(pos + 1, job.window) : 0, hi = warp < n_rows ? pos + 1 : 0;
    for (u32 i = lane; i < HEADS * DIM; i += 32) {
        const u32 head = i / DIM, d = i % DIM;
        m.q[warp].put(head, d, warp < n_rows && head < n ? job.q[((size_t)own_row * job.n_head + head0 + head) * DIM + d] : 0.0f);
    }
    auto ask = [&](u32 block) {
        if (block * BLOCK_KEYS < all_hi) {
            Stage& stage = m.stages[block % 2];
            constexpr u32 PIECES = DIM / 8;  // of a row
            const u16* page = (const u16*)page_of(job.place, row, block * BLOCK_KEYS) + head_kv * DIM;
            const u16 *k = page + row_in_page(job.place, block * BLOCK_KEYS, 0), *v = page + row_in_page(job.place, block * BLOCK_KEYS, 1);
#pragma unroll
            for (u32 i = threadIdx.x; i < BLOCK_KEYS * PIECES; i += THREADS) {
                const u32 key = i / PIECES, d = i % PIECES * 8;
                copy_16_bytes(&stage.keys[key][d], k + (size_t)key * job.place.n_kv + d);
                copy_16_bytes(&stage.values[key][d], v + (size_t)key * job.place.n_kv + d);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    State segment = {};
    float span_max[2], span_sum[2], max[2], sum[2];
    bool has_segment = false, has_span = false, has_total = false;
    // Each thread finds what it left there.
    float* total = job.states + ((size_t)own_row * gridDim.y + blockIdx.y) * 2 * STATE + lane;
    float* span = total + STATE;
    auto end_span = [&]() {
        merge_into(max, sum, !has_total, span_max, span_sum, [&](u32 i) { return span[i * 32]; }, [&](u32 i) -> float& { return total[i * 32]; });
        has_total = true, has_span = false;
    };
    auto end_segment = [&]() {
        merge_into(span_max, span_sum, !has_span, segment.max, segment.sum,
                   [&](u32 i) { return segment.out[i / (4 * TILES)][i / 4 % TILES][i % 4]; }, [&](u32 i) -> float& { return span[i * 32]; });
        has_span = true, has_segment = false;
    };
    u32 block = all_lo / BLOCK_KEYS;
    ask(block);
    for (; block * BLOCK_KEYS < all_hi; block++) {
        ask(block + 1);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        const u32 at = block * BLOCK_KEYS;
        if (at < hi && at + BLOCK_KEYS > lo) {
            const Stage& stage = m.stages[block % 2];
            const Block keys = {stage.keys[0], stage.values[0], KEY_PITCH, VALUE_PITCH, less(lo, at), min(BLOCK_KEYS, hi - at)};
            u32 upper[8][2], lower[8][2];
            float block_max[2], block_sum[2], old[2] = {}, fresh[2] = {};
            weights_of_block<false>(m.q[warp], keys, job.scale, upper, lower, block_max, block_sum);
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                if (has_segment) {
                    join(segment.max[h], block_max[h], old[h], fresh[h]);
                    segment.sum[h] = joined(segment.sum[h], block_sum[h], old[h], fresh[h]);
                } else {
                    segment.max[h] = block_max[h], segment.sum[h] = block_sum[h];
                }
            }
            const u32 seen = keys.own_keys();
#pragma unroll
            for (u32 half = 0; half < HALVES; half++) {
                float out[TILES][4];
                weigh_block(keys, half, seen, upper, lower, out);
#pragma unroll
                for (u32 j = 0; j < TILES; j++)
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        float& x = segment.out[half][j][e];
                        x = has_segment ? joined(x, out[j][e], old[e / 2], fresh[e / 2]) : out[j][e];
                    }
            }
            has_segment = true;
            const u32 next = at + BLOCK_KEYS;
            if (next % SEGMENT_KEYS == 0 || next >= hi) end_segment();
            if (next % SPAN_KEYS == 0 && next < hi) end_span();
        }
        __syncthreads();  // the stage may be filled anew
    }
    if (warp >= n_rows) return;
    if (has_total) end_span();
    const float inverse[2] = {1.0f / (has_total ? sum[0] : span_sum[0]), 1.0f / (has_total ? sum[1] : span_sum[1])};
#pragma unroll
    for (u32 i = 0; i < 2 * OWN; i++) {
        const u32 head = g + i % 4 / 2 * 8, d = (i / (4 * TILES) * 8 + 2 * t + i % 2) * TILES + i / 4 % TILES;
        const float x = has_total ? total[i * 32] : span[i * 32];
        if (head < n) job.out[((size_t)own_row * job.n_head + head0 + head) * DIM + d] = x * inverse[i % 4 / 2];
    }
}
