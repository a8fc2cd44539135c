// Attention over pages in logical order, in f32, in the order of crates/cpu/src/attention.rs and block.rs, bit for bit.
//
// Absolute blocks of 64 keys give each query a maximum, a sum and an output from that block alone; blocks merge
// ascending into their segment, segments ascending. A segment is 256 positions for rows before 16,384, else 2,048; the
// pass's own rows, where a drafter's block sees them, are a last segment. A score is a dot product in 16 lanes and the
// tree 8-4-2-1. What a reader would get wrong: every thread of a query keeps its maximum and its sum, so that no thread
// waits for another's.
#if ELEMENT == 0
typedef float Element;
DEV float to_float(float x) { return x; }
#else
typedef u16 Element;
DEV float to_float(u16 x) { return half_to_float(x); }
DEV float to_float(float x) { return x; }
#endif

constexpr u32 BLOCK_KEYS = 64, THREADS = 256, LONG_CONTEXT = 16384;
constexpr u32 CAUSAL = 0, BLOCK_ALL = 1, BLOCK_BELOW = 2, BLOCK_WITHIN = 3;

struct Job {
    const float* q;  // [row][head][dim]
    const Row* rows;
    Place place;
    const float *own_k, *own_v;  // [row][head][dim], for a drafter's block
    float* out;                  // [row][head][dim]
    float* states;               // [row][head][slot][2 + dim]
    u32 n_slots;
    u32 n_head, n_head_kv, dim;
    u32 sight, window;  // a causal window of 0: none
    float scale;
};

struct Keys {
    u32 lo, hi;
};
DEV u32 less(u32 a, u32 b) { return a > b ? a - b : 0; }

// What row `r` sees: stored positions, then rows of the pass counted from its sequence's first.
struct View {
    Keys stored, own;
    u32 segment_len, first_segment, n_stored, n_segments;
};
DEV View view_of(const Job& job, const Row& row, u32 r) {
    View v;
    u32 lo = 0, hi = 0xffffffffu;
    const u32 w = job.window;
    if (job.sight == CAUSAL) lo = w ? less(row.pos + 1, w) : 0, hi = row.pos + 1;
    if (job.sight == BLOCK_BELOW) lo = less(row.pos + 1, w);
    if (job.sight == BLOCK_WITHIN) lo = less(row.pos, w), hi = row.pos + w < row.pos ? hi : row.pos + w + 1;
    v.stored = {lo, hi}, v.own = {0, 0};
    if (job.sight != CAUSAL) {
        const u32 start = row.pos - (r - row.first);  // the sequence's first position in the pass
        v.stored = {min(lo, start), min(hi, start)};
        v.own = {min(less(lo, start), row.n_own), min(less(hi, start), row.n_own)};
    }
    v.segment_len = row.pos < LONG_CONTEXT ? PAGE_ROWS : 8 * PAGE_ROWS;
    v.first_segment = v.stored.lo / v.segment_len;
    v.n_stored = v.stored.lo < v.stored.hi ? (v.stored.hi - 1) / v.segment_len - v.first_segment + 1 : 0;
    v.n_segments = v.n_stored + (job.sight == CAUSAL ? 0 : 1);
    return v;
}

// What the keys so far give a query: maximum, sum, and a thread's elements of the output.
template <u32 DIMS> struct State {
    float max, sum, out[DIMS];

    DEV State empty() {
        State s = {-infinity(), 0.0f, {}};
        return s;
    }
    // A sum of 0 means "nothing yet"; the first part is taken as it is.
    __device__ __forceinline__ void merge(const State& part) {
        if (part.sum == 0.0f) return;
        if (sum == 0.0f) {
            *this = part;
            return;
        }
        const float larger = max > part.max ? max : part.max;
        const float a = exp_of(max - larger), c = exp_of(part.max - larger);
        sum = fmaf(sum, a, part.sum * c);
#pragma unroll
        for (u32 i = 0; i < DIMS; i++) out[i] = fmaf(out[i], a, part.out[i] * c);
        max = larger;
    }
};

// A block's keys and values as floats, rows `pitch` apart; queries likewise; scores and, behind them, their maxima.
struct Shared {
    float *keys, *values, *q, *scores;
    u32 pitch;
};

// Reads `n` rows of `dim` elements, `stride` apart; other rows and padded dims become 0.
template <class T> DEV void load_block(float* to, const T* from, u32 n, u32 dim, u32 stride, u32 pitch) {
    const u32 per_row = pitch / 4;
    for (u32 i = threadIdx.x; i < BLOCK_KEYS * per_row; i += THREADS) {
        const u32 r = i / per_row, d = i % per_row * 4;
        float x[4] = {};
        if (r < n) {
            const T* at = from + (size_t)r * stride + d;
            __align__(16) T four[4] = {};
            if (dim % 4 == 0 && d < dim) {  // then rows begin at multiples of four elements
                if (sizeof(T) == 4) *(uint4*)four = *(const uint4*)at;
                else *(uint2*)four = *(const uint2*)at;
            } else {
#pragma unroll
                for (u32 j = 0; j < 4; j++)
                    if (d + j < dim) four[j] = at[j];
            }
#pragma unroll
            for (u32 j = 0; j < 4; j++) x[j] = to_float(four[j]);
        }
        *(float4*)(to + r * pitch + d) = make_float4(x[0], x[1], x[2], x[3]);
    }
}

// Lanes WIDTH .. 2 WIDTH onto the first WIDTH.
template <u32 WIDTH> DEV void add_upper(float (&lane)[16]) {
#pragma unroll
    for (u32 l = 0; l < WIDTH; l++) lane[l] = lane[l] + lane[l + WIDTH];
}

// Scores of a block's keys, then their exponentials against the largest.
template <u32 QUERIES> DEV void score_block(const Shared& s, Keys keys, u32 n, u32 dim, float scale) {
    const u32 key = threadIdx.x % BLOCK_KEYS;
#pragma unroll
    for (u32 i = 0; i < QUERIES / 4; i++) {
        const u32 query = threadIdx.x / BLOCK_KEYS + 4 * i;
        if (query >= n) break;
        float lane[16] = {};
        for (u32 d = 0; d < dim; d += 16)  // the pitch has room for whole sixteens, zeros beyond `dim`
#pragma unroll
            for (u32 l = 0; l < 16; l += 4) {
                const float4 a = *(const float4*)(s.q + query * s.pitch + d + l), b = *(const float4*)(s.keys + key * s.pitch + d + l);
                lane[l] = fmaf(a.x, b.x, lane[l]), lane[l + 1] = fmaf(a.y, b.y, lane[l + 1]);
                lane[l + 2] = fmaf(a.z, b.z, lane[l + 2]), lane[l + 3] = fmaf(a.w, b.w, lane[l + 3]);
            }
        add_upper<8>(lane);
        add_upper<4>(lane);
        add_upper<2>(lane);
        add_upper<1>(lane);
        const bool is_seen = key >= keys.lo && key < keys.hi;
        s.scores[query * BLOCK_KEYS + key] = is_seen ? lane[0] * scale : -infinity();
    }
    __syncthreads();
    for (u32 query = threadIdx.x / 32; query < n; query += THREADS / 32) {
        float* row = s.scores + query * BLOCK_KEYS;
        const u32 lane = threadIdx.x % 32;
        const float a = row[lane], b = row[lane + 32];
        float max = fmaxf(a, b);
#pragma unroll
        for (u32 o = 16; o; o >>= 1) max = fmaxf(max, __shfl_xor_sync(ALL, max, o));
        row[lane] = exp_of(a - max), row[lane + 32] = exp_of(b - max);
        if (lane == 0) s.scores[QUERIES * BLOCK_KEYS + query] = max;
    }
    __syncthreads();
}

// The block of whose keys the queries see `keys`, merged into their states; `n` of QUERIES are real.
template <u32 QUERIES, u32 DIMS>
DEV void merge_block(const Shared& s, Keys keys, u32 n, u32 dim, float scale, State<DIMS> (&state)[QUERIES / 2]) {
    score_block<QUERIES>(s, keys, n, dim, scale);
#pragma unroll
    for (u32 i = 0; i < QUERIES / 2; i++) {
        const u32 query = threadIdx.x / 128 + 2 * i;
        if (query >= n) break;
        State<DIMS> part = State<DIMS>::empty();
        part.max = s.scores[QUERIES * BLOCK_KEYS + query];
        for (u32 k = keys.lo; k < keys.hi; k++) {
            const float w = s.scores[query * BLOCK_KEYS + k];
            part.sum = part.sum + w;
#pragma unroll
            for (u32 e = 0; e < DIMS; e++) {
                const u32 d = threadIdx.x % 128 + e * 128;
                if (d < dim) part.out[e] = fmaf(w, s.values[k * s.pitch + d], part.out[e]);
            }
        }
        state[i].merge(part);
    }
    __syncthreads();  // keys, values and scores are done with
}

// The keys of a segment of a row, block by block.
template <u32 QUERIES, u32 DIMS>
DEV void merge_segment(const Job& job, const Row& row, const View& view, u32 segment, u32 head_kv, const Shared& s, u32 n,
                       State<DIMS> (&state)[QUERIES / 2]) {
    const bool is_own = segment >= view.n_stored;
    const u32 start = (view.first_segment + segment) * view.segment_len, dim = job.dim, stride = job.n_head_kv * dim;
    const u32 lo = is_own ? view.own.lo : max(view.stored.lo, start);
    const u32 hi = is_own ? view.own.hi : min(view.stored.hi, start + view.segment_len);
    for (u32 at = lo / BLOCK_KEYS * BLOCK_KEYS; at < hi; at += BLOCK_KEYS) {
        const u32 n_rows = min(BLOCK_KEYS, hi - at);
        if (is_own) {
            const size_t from = ((size_t)(row.first + at) * job.n_head_kv + head_kv) * dim;
            load_block(s.keys, job.own_k + from, n_rows, dim, stride, s.pitch);
            load_block(s.values, job.own_v + from, n_rows, dim, stride, s.pitch);
        } else {
            const Element* k = (const Element*)page_of(job.place, row, at) + row_in_page(job.place, at, 0) + head_kv * dim;
            load_block(s.keys, k, n_rows, dim, stride, s.pitch);
            load_block(s.values, k + (size_t)PAGE_ROWS * stride, n_rows, dim, stride, s.pitch);
        }
        __syncthreads();
        merge_block<QUERIES, DIMS>(s, {less(lo, at), n_rows}, n, dim, job.scale, state);
    }
}

// Grid: workers over segments (one if not SPLIT), groups of QUERIES query heads of a key/value head, rows. SPLIT leaves
// the segments' states for `merge_segments`; else a worker does all of a row's segments and divides.
template <u32 QUERIES, u32 DIMS, bool SPLIT> DEV void attend(const Job& job) {
    extern __shared__ __align__(16) float memory[];
    const u32 group = job.n_head / job.n_head_kv, per_kv = (group + QUERIES - 1) / QUERIES, r = blockIdx.z;
    const u32 head_kv = blockIdx.y / per_kv, first = blockIdx.y % per_kv * QUERIES, n = min(QUERIES, group - first);
    const u32 head0 = head_kv * group + first, dim = job.dim, pitch = (dim + 15) / 16 * 16 + 4;
    const Shared s = {memory, memory + BLOCK_KEYS * pitch, memory + 2 * BLOCK_KEYS * pitch, memory + (2 * BLOCK_KEYS + QUERIES) * pitch, pitch};
    const Row row = job.rows[r];  // the step's: it does not depend on the predecessor
    wait_for_predecessor();
    let_dependents_start();
    if (row.seq == NO_SEQUENCE) {
        if (!SPLIT)
            for (u32 i = threadIdx.x; i < n * dim; i += THREADS) job.out[((size_t)r * job.n_head + head0) * dim + i] = 0.0f;
        return;
    }
    const View view = view_of(job, row, r);
    if (SPLIT && blockIdx.x >= view.n_segments) return;
    for (u32 i = threadIdx.x; i < n * pitch; i += THREADS) {
        const u32 d = i % pitch;
        s.q[i] = d < dim ? job.q[((size_t)r * job.n_head + head0 + i / pitch) * dim + d] : 0.0f;
    }
    __syncthreads();
    State<DIMS> total[QUERIES / 2];
#pragma unroll
    for (u32 i = 0; i < QUERIES / 2; i++) total[i] = State<DIMS>::empty();
    for (u32 segment = blockIdx.x; segment < view.n_segments; segment += gridDim.x) {
        State<DIMS> state[QUERIES / 2];
#pragma unroll
        for (u32 i = 0; i < QUERIES / 2; i++) state[i] = State<DIMS>::empty();
        merge_segment<QUERIES, DIMS>(job, row, view, segment, head_kv, s, n, state);
#pragma unroll
        for (u32 i = 0; i < QUERIES / 2; i++) {
            const u32 query = threadIdx.x / 128 + 2 * i;
            if (!SPLIT) total[i].merge(state[i]);
            if (!SPLIT || query >= n) continue;
            float* to = job.states + (((size_t)r * job.n_head + head0 + query) * job.n_slots + segment) * (2 + dim);
            if (threadIdx.x % 128 == 0) to[0] = state[i].max, to[1] = state[i].sum;
#pragma unroll
            for (u32 e = 0; e < DIMS; e++) {
                const u32 d = threadIdx.x % 128 + e * 128;
                if (d < dim) to[2 + d] = state[i].out[e];
            }
        }
    }
    if constexpr (!SPLIT) {
#pragma unroll
        for (u32 i = 0; i < QUERIES / 2; i++) {
            const u32 query = threadIdx.x / 128 + 2 * i;
#pragma unroll
            for (u32 e = 0; e < DIMS; e++) {
                const u32 d = threadIdx.x % 128 + e * 128;
                if (query < n && d < dim) job.out[((size_t)r * job.n_head + head0 + query) * dim + d] = total[i].out[e] / total[i].sum;
            }
        }
    }
}

#define ATTEND(name, QUERIES, DIMS, SPLIT) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(Job job) { attend<QUERIES, DIMS, SPLIT>(job); }
ATTEND(attend_split, 4, 1, true)
ATTEND(attend_split_wide, 4, 2, true)
ATTEND(attend_whole, 16, 1, false)
ATTEND(attend_whole_wide, 8, 2, false)

// Merges the segments of a row and divides; then, if there is a gate, multiplies by its sigmoid and leaves the int8 form
// of the result. Grid: groups of 256 columns, rows; a thread a column.
extern "C" __global__ void __launch_bounds__(THREADS) merge_segments(Job job, const float* gate, Activations a) {
    __shared__ float group[GROUP];
    const u32 r = blockIdx.y, cols = job.n_head * job.dim, c = blockIdx.x * GROUP + threadIdx.x;
    const u32 head = min(c, cols - 1) / job.dim, d = min(c, cols - 1) % job.dim;
    const Row row = job.rows[r];
    const u32 n_segments = row.seq == NO_SEQUENCE ? 0 : view_of(job, row, r).n_segments;
    wait_for_predecessor();
    let_dependents_start();
    const float* from = job.states + ((size_t)r * job.n_head + head) * job.n_slots * (2 + job.dim);
    State<1> total = State<1>::empty();
    for (u32 segment = 0; segment < n_segments; segment++, from += 2 + job.dim) {
        const State<1> part = {from[0], from[1], {from[2 + d]}};
        total.merge(part);
    }
    float x = n_segments ? total.out[0] / total.sum : 0.0f;
    if (gate && c < cols) x = x * sigmoid(gate[(size_t)r * cols + c]);
    if (c < cols) job.out[(size_t)r * cols + c] = x;
    if (a.kind == FLOATS) return;
    group[threadIdx.x] = c < cols ? x : 0.0f;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float v[16];  // the upper half-warp repeats the lower one and stores nothing
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = group[i * 16 + half_lane()];
    store_codes(v, a, blockIdx.x, r, cols, threadIdx.x < 16);
}
