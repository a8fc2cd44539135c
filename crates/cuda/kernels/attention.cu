// Attention over pages in logical order, in f32, in the order of crates/cpu/src/attention.rs and block.rs, bit for bit.
//
// Absolute blocks of 64 keys give each query a maximum, a sum and an output from that block alone; blocks merge
// ascending into their segment, segments ascending. A segment is 256 positions for rows before 16,384, else 2,048; the
// pass's own rows, where a drafter's block sees them, are a last segment. A score is a dot product in 16 lanes and the
// tree 8-4-2-1: the four threads of a quad hold four lanes each. What a reader would get wrong: every thread of a query
// keeps its maximum and its sum, so that no thread waits for another's.
#if ELEMENT == 0
typedef float Element;
#else
typedef u16 Element;
#endif
DEV float4 four_of(const float* x) { return *(const float4*)x; }
DEV float4 four_of(const u16* x) {
    const uint2 h = *(const uint2*)x;
    return make_float4(low_half(h.x), high_half(h.x), low_half(h.y), high_half(h.y));
}

constexpr u32 BLOCK_KEYS = 64, LONG_CONTEXT = 16384;
constexpr u32 CAUSAL = 0, BLOCK_BELOW = 2, BLOCK_WITHIN = 3;  // 1: all keys

struct Job {
    const float* q;  // [row][head][dim]
    const Row* rows;
    Place place;
    const float *own_k, *own_v;  // [row][head][dim], for a drafter's block
    float* out;                  // [row][head][dim]
    float* states;               // [row][head][slot][2 + dim]
    u32 n_slots;                 // where the blocks that a row sees fit, there is a state for each of them, else for each segment
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
    u32 segment_len;
    u32 unit_len;    // positions that give one state: a block or a segment
    u32 first_unit;  // number of the first stored one
    u32 n_stored, n_units;  // stored ones; all, with the pass's own rows as the last

    // The first position of a stored unit that is seen.
    __device__ __forceinline__ u32 first_position(u32 unit) const { return max(stored.lo, (first_unit + unit) * unit_len); }
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
    const u32 n_blocks = v.stored.lo < v.stored.hi ? (v.stored.hi - 1) / BLOCK_KEYS - v.stored.lo / BLOCK_KEYS + 1 : 0;
    v.unit_len = n_blocks < job.n_slots ? BLOCK_KEYS : v.segment_len;
    v.first_unit = v.stored.lo / v.unit_len;
    v.n_stored = v.stored.lo < v.stored.hi ? (v.stored.hi - 1) / v.unit_len - v.first_unit + 1 : 0;
    v.n_units = v.n_stored + (job.sight == CAUSAL ? 0 : 1);
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

// ---- shared memory --------------------------------------------------------------------------------------------------
// A block's keys and values as they are stored, rows `pitch` elements apart; queries as floats, rows `dim` rounded up to
// sixteens apart; scores, and behind them their maxima. A pitch of sixteen more than a row keeps quads off each other's
// banks.
struct Shared {
    Element *keys, *values;
    float *q, *scores;
    u32 padded, pitch;
};

DEV void copy_16_bytes(void* to, const void* from, bool is_there) {
    const u32 at = (u32)__cvta_generic_to_shared(to), bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
DEV void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of the newest groups are on their way.
template <u32 N> DEV void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Asks for `n` rows of `dim` elements, `stride` apart; other rows and padded elements become 0. Ends a group.
template <u32 THREADS> DEV void ask_for_rows(Element* to, const Element* from, u32 n, u32 dim, u32 stride, const Shared& s) {
    constexpr u32 PER_COPY = 16 / sizeof(Element);
    const u32 per_row = s.padded / PER_COPY;
    if (dim % PER_COPY == 0) {
        const u32 rows = THREADS / per_row, d = threadIdx.x % per_row * PER_COPY;
        for (u32 r = threadIdx.x / per_row; threadIdx.x < rows * per_row && r < BLOCK_KEYS; r += rows) {
            const bool is_there = r < n && d < dim;
            copy_16_bytes(to + r * s.pitch + d, is_there ? from + (size_t)r * stride + d : from, is_there);
        }
    } else {
        for (u32 i = threadIdx.x; i < BLOCK_KEYS * s.padded; i += THREADS) {
            const u32 r = i / s.padded, d = i % s.padded;
            to[r * s.pitch + d] = r < n && d < dim ? from[(size_t)r * stride + d] : (Element)0;
        }
    }
    end_group();
}

// ---- a block of keys ------------------------------------------------------------------------------------------------
DEV float four_lanes(float v[4]) {  // lanes 4t.. of a quad's thread t: 8-15 onto 0-7, 4-7 onto 0-3, and so on
#pragma unroll
    for (u32 l = 0; l < 4; l++) v[l] = v[l] + __shfl_xor_sync(ALL, v[l], 2);
#pragma unroll
    for (u32 l = 0; l < 4; l++) v[l] = v[l] + __shfl_xor_sync(ALL, v[l], 1);
    return (v[0] + v[2]) + (v[1] + v[3]);
}

// Scores of the keys that are seen; minus infinity of the others. A quad takes four queries and some keys.
template <class E, u32 QUERIES, u32 THREADS>
DEV void score(const E* keys_of_block, u32 pitch, const Shared& s, Keys keys, float scale) {
    constexpr u32 KEY_GROUPS = THREADS / 4 / (QUERIES / 4), OWN = BLOCK_KEYS / KEY_GROUPS;
    const u32 quad = threadIdx.x / 4, t = threadIdx.x % 4, first_key = quad % KEY_GROUPS, first_query = quad / KEY_GROUPS * 4;
    constexpr u32 AT_ONCE = 2;  // keys whose sums fit the registers
#pragma unroll 1
    for (u32 k0 = 0; k0 < OWN; k0 += AT_ONCE) {
        float acc[AT_ONCE][4][4] = {};
        const E* from = keys_of_block + (first_key + k0 * KEY_GROUPS) * pitch;
        for (u32 d = 4 * t; d < s.padded; d += 16) {
            float4 q[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) q[i] = *(const float4*)(s.q + (first_query + i) * s.padded + d);
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++) {
                const float4 x = four_of(from + k * KEY_GROUPS * pitch + d);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float(&a)[4] = acc[k][i];
                    a[0] = fmaf(q[i].x, x.x, a[0]), a[1] = fmaf(q[i].y, x.y, a[1]);
                    a[2] = fmaf(q[i].z, x.z, a[2]), a[3] = fmaf(q[i].w, x.w, a[3]);
                }
            }
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const float dot = four_lanes(acc[k][i]);
                const u32 key = first_key + (k0 + k) * KEY_GROUPS;
                const bool is_seen = key >= keys.lo && key < keys.hi;
                if (t == i) s.scores[(first_query + i) * BLOCK_KEYS + key] = is_seen ? dot * scale : -infinity();
            }
    }
}

// Scores to exponentials against the largest, which goes behind the scores; a warp a query.
template <u32 QUERIES, u32 THREADS> DEV void exponentials(const Shared& s, u32 n) {
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
}

// Sums and outputs of the keys that are seen, merged into the states; a warp has OWN queries, a lane four dims in each 128.
template <class E, u32 QUERIES, u32 OWN, u32 DIMS>
DEV void weigh(const E* values, u32 pitch, const Shared& s, Keys keys, u32 n, State<4 * DIMS> (&state)[OWN]) {
    const u32 first = threadIdx.x / 32 * OWN, d = threadIdx.x % 32 * 4;
    State<4 * DIMS> part[OWN];
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        part[i] = State<4 * DIMS>::empty();
        part[i].max = s.scores[QUERIES * BLOCK_KEYS + first + i];
    }
#pragma unroll 4
    for (u32 k = keys.lo; k < keys.hi; k++) {
        float w[OWN];
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            w[i] = s.scores[(first + i) * BLOCK_KEYS + k];
            part[i].sum = part[i].sum + w[i];
        }
#pragma unroll
        for (u32 e = 0; e < DIMS; e++) {
            if (d + e * 128 >= s.padded) continue;
            const float4 v = four_of(values + k * pitch + d + e * 128);
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                float* out = part[i].out + 4 * e;
                out[0] = fmaf(w[i], v.x, out[0]), out[1] = fmaf(w[i], v.y, out[1]);
                out[2] = fmaf(w[i], v.z, out[2]), out[3] = fmaf(w[i], v.w, out[3]);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < OWN; i++)
        if (first + i < n) state[i].merge(part[i]);
}

// ---- rows -----------------------------------------------------------------------------------------------------------
// A row and some heads of one key/value head.
struct Task {
    Row row;
    u32 head_kv, n;
};

// The stored keys of a unit, block by block: the next keys are on their way while values are weighed, the next values
// while keys are scored.
template <u32 QUERIES, u32 THREADS, u32 OWN, u32 DIMS>
DEV void stored_unit(const Job& job, const Task& task, const View& view, u32 unit, const u8* page, const Shared& s,
                     State<4 * DIMS> (&state)[OWN]) {
    const u32 dim = job.dim, stride = job.n_head_kv * dim, hi = min(view.stored.hi, (view.first_unit + unit + 1) * view.unit_len);
    const u32 lo = view.first_position(unit);
    auto ask = [&](Element* to, u32 at, u32 half) {
        const Element* rows = (const Element*)page + row_in_page(job.place, at, half) + task.head_kv * dim;
        ask_for_rows<THREADS>(to, rows, min(BLOCK_KEYS, hi - at), dim, stride, s);
    };
    u32 at = lo / BLOCK_KEYS * BLOCK_KEYS;
    ask(s.keys, at, 0);
    ask(s.values, at, 1);
    for (; at < hi; at += BLOCK_KEYS) {
        const Keys keys = {less(lo, at), min(BLOCK_KEYS, hi - at)};
        const bool has_next = at + BLOCK_KEYS < hi;
        wait_groups<1>();
        __syncthreads();
        score<Element, QUERIES, THREADS>(s.keys, s.pitch, s, keys, job.scale);
        __syncthreads();
        if (has_next) {
            if ((at + BLOCK_KEYS) % PAGE_ROWS == 0) page = page_of(job.place, task.row, at + BLOCK_KEYS);
            ask(s.keys, at + BLOCK_KEYS, 0);
        } else {
            end_group();
        }
        exponentials<QUERIES, THREADS>(s, task.n);
        wait_groups<1>();
        __syncthreads();
        weigh<Element, QUERIES, OWN, DIMS>(s.values, s.pitch, s, keys, task.n, state);
        __syncthreads();
        if (has_next) ask(s.values, at + BLOCK_KEYS, 1);
        else end_group();
    }
}

// The pass's own rows, read where they lie: few, and only in a drafter's block.
template <u32 QUERIES, u32 THREADS, u32 OWN, u32 DIMS>
DEV void own_unit(const Job& job, const Task& task, const View& view, const Shared& s, State<4 * DIMS> (&state)[OWN]) {
    float* floats = (float*)s.keys;  // keys and values together have room for as many floats
    const u32 dim = job.dim, stride = job.n_head_kv * dim, pitch = s.padded;
    for (u32 at = view.own.lo / BLOCK_KEYS * BLOCK_KEYS; at < view.own.hi; at += BLOCK_KEYS) {
        const Keys keys = {less(view.own.lo, at), min(BLOCK_KEYS, view.own.hi - at)};
        const size_t from = (size_t)(task.row.first + at) * stride + task.head_kv * dim;
        auto read = [&](const float* x) {
            __syncthreads();  // what lay there is done with
            for (u32 i = threadIdx.x; i < BLOCK_KEYS * pitch; i += THREADS) {
                const u32 r = i / pitch, d = i % pitch;
                floats[i] = r < keys.hi && d < dim ? x[from + (size_t)r * stride + d] : 0.0f;
            }
            __syncthreads();
        };
        read(job.own_k);
        score<float, QUERIES, THREADS>(floats, pitch, s, keys, job.scale);
        __syncthreads();
        exponentials<QUERIES, THREADS>(s, task.n);
        read(job.own_v);
        weigh<float, QUERIES, OWN, DIMS>(floats, pitch, s, keys, task.n, state);
    }
    __syncthreads();
}

// Grid: workers over units (one if not SPLIT), groups of QUERIES query heads of a key/value head, rows. SPLIT leaves the
// units' states for `merge_states`; else a worker does all segments of a row and divides.
template <u32 QUERIES, u32 THREADS, u32 DIMS, bool SPLIT> DEV void attend(const Job& job) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr u32 OWN = QUERIES / (THREADS / 32);
    const u32 group = job.n_head / job.n_head_kv, per_kv = (group + QUERIES - 1) / QUERIES, r = blockIdx.z;
    const u32 first = blockIdx.y % per_kv * QUERIES, dim = job.dim;
    Shared s;
    s.padded = (dim + 15) / 16 * 16, s.pitch = s.padded + 16;
    s.keys = (Element*)memory, s.values = s.keys + BLOCK_KEYS * s.pitch;
    s.q = (float*)(s.values + BLOCK_KEYS * s.pitch), s.scores = s.q + QUERIES * s.padded;
    const Task task = {job.rows[r], blockIdx.y / per_kv, min(QUERIES, group - first)};  // the step's: no need to wait for it
    const u32 head0 = task.head_kv * group + first;
    const bool is_padding = task.row.seq == NO_SEQUENCE;
    const View view = view_of(job, task.row, r);
    const bool is_stored = !is_padding && blockIdx.x < view.n_stored;
    const u8* page = is_stored ? page_of(job.place, task.row, view.first_position(blockIdx.x)) : 0;
    wait_for_predecessor();
    let_dependents_start();
    if (is_padding && !SPLIT)
        for (u32 i = threadIdx.x; i < task.n * dim; i += THREADS) job.out[((size_t)r * job.n_head + head0) * dim + i] = 0.0f;
    if (is_padding || blockIdx.x >= view.n_units) return;
    for (u32 i = threadIdx.x; i < QUERIES * s.padded; i += THREADS) {
        const u32 query = i / s.padded, d = i % s.padded;
        s.q[i] = query < task.n && d < dim ? job.q[((size_t)r * job.n_head + head0 + query) * dim + d] : 0.0f;
    }
    const u32 own = threadIdx.x / 32 * OWN, d0 = threadIdx.x % 32 * 4;
    State<4 * DIMS> total[OWN];
#pragma unroll
    for (u32 i = 0; i < OWN; i++) total[i] = State<4 * DIMS>::empty();
    for (u32 unit = blockIdx.x; unit < view.n_units; unit += gridDim.x) {
        State<4 * DIMS> state[OWN];
#pragma unroll
        for (u32 i = 0; i < OWN; i++) state[i] = State<4 * DIMS>::empty();
        if (unit < view.n_stored) {
            if (unit != blockIdx.x) page = page_of(job.place, task.row, view.first_position(unit));
            stored_unit<QUERIES, THREADS, OWN, DIMS>(job, task, view, unit, page, s, state);
        } else {
            own_unit<QUERIES, THREADS, OWN, DIMS>(job, task, view, s, state);
        }
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            if (!SPLIT) total[i].merge(state[i]);
            if (!SPLIT || own + i >= task.n) continue;
            float* to = job.states + (((size_t)r * job.n_head + head0 + own + i) * job.n_slots + unit) * (2 + dim);
            if (threadIdx.x % 32 == 0) to[0] = state[i].max, to[1] = state[i].sum;
#pragma unroll
            for (u32 e = 0; e < 4 * DIMS; e++) {
                const u32 d = d0 + e / 4 * 128 + e % 4;
                if (d < dim) to[2 + d] = state[i].out[e];
            }
        }
    }
    if constexpr (!SPLIT) {
#pragma unroll
        for (u32 i = 0; i < OWN; i++)
#pragma unroll
            for (u32 e = 0; e < 4 * DIMS; e++) {
                const u32 d = d0 + e / 4 * 128 + e % 4;
                if (own + i < task.n && d < dim)
                    job.out[((size_t)r * job.n_head + head0 + own + i) * dim + d] = total[i].out[e] / total[i].sum;
            }
    }
}

#define ATTEND(name, QUERIES, THREADS, DIMS, SPLIT, RESIDENT) \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) name(Job job) { attend<QUERIES, THREADS, DIMS, SPLIT>(job); }
ATTEND(attend_split, 4, 128, 1, true, 4)
ATTEND(attend_split_wide, 4, 128, 2, true, 2)
ATTEND(attend_whole, 16, 256, 1, false, 2)
ATTEND(attend_whole_wide, 16, 256, 2, false, 1)

// How a state joins what was there: fmaf(there, old, state * fresh); an `old` below 0 marks the first, taken as it is.
struct Join {
    float old, fresh;

    __device__ __forceinline__ float operator()(float there, float state) const {
        return old < 0.0f ? state : fmaf(there, old, state * fresh);
    }
};
DEV Join join_of(float max, float max_of_state, bool is_first) {
    const float larger = max > max_of_state ? max : max_of_state;
    return {is_first ? -1.0f : exp_of(max - larger), exp_of(max_of_state - larger)};
}

// How the units of a head join their segments and these the whole, and the sum; a warp, a lane a segment. The largest
// score so far is a running maximum, so all exponentials are computed at once; only sums are chains.
DEV float joins_of_head(Join* units, Join* segments, const float* states, u32 stride, const View& view, u32 n_segments) {
    const u32 lane = threadIdx.x % 32, per_segment = view.segment_len / view.unit_len, skipped = view.first_unit % per_segment;
    float max_so_far = -infinity(), total = 0.0f;
    for (u32 s0 = 0; s0 < n_segments; s0 += 32) {
        const u32 segment = s0 + lane;
        // The pass's own rows are the last segment, if there are any.
        const bool is_own = segment >= n_segments - (view.n_units - view.n_stored);
        const u32 first = is_own ? view.n_stored : less(segment * per_segment, skipped);
        const u32 end = segment >= n_segments ? first : is_own ? view.n_units : min(view.n_stored, (segment + 1) * per_segment - skipped);
        float max = -infinity(), sum = 0.0f;
        for (u32 unit = first; unit < end; unit++) {
            const float* state = states + (size_t)unit * stride;
            const Join join = join_of(max, state[0], unit == first);
            units[unit] = join;
            sum = join(sum, state[1]);
            max = max > state[0] ? max : state[0];
        }
        float running = max;
#pragma unroll
        for (u32 o = 1; o < 32; o *= 2) {
            const float below = __shfl_up_sync(ALL, running, o);
            if (lane >= o) running = below > running ? below : running;
        }
        running = max_so_far > running ? max_so_far : running;
        const float before = __shfl_up_sync(ALL, running, 1);
        const Join join = join_of(lane ? before : max_so_far, max, segment == 0);
        if (segment < n_segments) segments[segment] = join;
        for (u32 i = 0; i < min(32, n_segments - s0); i++) {
            const Join other = {__shfl_sync(ALL, join.old, i), __shfl_sync(ALL, join.fresh, i)};
            total = other(total, __shfl_sync(ALL, sum, i));
        }
        max_so_far = __shfl_sync(ALL, running, 31);
    }
    return total;
}

constexpr u32 PARTS = 4, RUN = 4;  // parts of a merge, segments that each takes in a round

// Merges the states of a row and divides; then, if there is a gate, multiplies by its sigmoid and leaves the int8 form
// of the result. Grid: groups of 256 columns, rows; four threads a column, which take segments by turns. Shared memory:
// joins of the heads in the group.
extern "C" __global__ void __launch_bounds__(PARTS* GROUP) merge_states(Job job, const float* gate, Activations a) {
    extern __shared__ __align__(16) u8 joins[];
    __shared__ float merged[PARTS * RUN][GROUP];
    const u32 column = threadIdx.x % GROUP, part = threadIdx.x / GROUP;
    const u32 r = blockIdx.y, dim = job.dim, cols = job.n_head * dim, c = min(blockIdx.x * GROUP + column, cols - 1);
    const u32 head0 = blockIdx.x * GROUP / dim, n_heads = (min(cols, (blockIdx.x + 1) * GROUP) - 1) / dim - head0 + 1;
    Join* units = (Join*)joins;
    Join* segments = units + n_heads * job.n_slots;
    float* sums = (float*)(segments + n_heads * job.n_slots);
    const Row row = job.rows[r];
    View view = view_of(job, row, r);
    const bool is_padding = row.seq == NO_SEQUENCE;
    if (is_padding) view.n_stored = view.n_units = 0;
    const u32 per_segment = view.segment_len / view.unit_len, skipped = view.first_unit % per_segment;
    const u32 n_stored = view.n_stored ? (skipped + view.n_stored - 1) / per_segment + 1 : 0;
    const u32 n_segments = n_stored + view.n_units - view.n_stored;  // the pass's own rows are one of their own
    const u32 stride = 2 + dim;
    wait_for_predecessor();
    let_dependents_start();
    const float* states = job.states + (size_t)r * job.n_head * job.n_slots * stride;
    for (u32 h = threadIdx.x / 32; h < n_heads; h += PARTS * GROUP / 32) {
        const float* of_head = states + (size_t)(head0 + h) * job.n_slots * stride;
        const float sum = joins_of_head(units + h * job.n_slots, segments + h * job.n_slots, of_head, stride, view, n_segments);
        if (threadIdx.x % 32 == 0) sums[h] = sum;
    }
    __syncthreads();
    const u32 head = c / dim, h = head - head0;
    const float* from = states + (size_t)head * job.n_slots * stride + 2 + c % dim;
    float x = 0.0f;
    for (u32 s0 = 0; s0 < n_segments; s0 += PARTS * RUN) {
#pragma unroll
        for (u32 k = 0; k < RUN; k++) {
            const u32 segment = s0 + part * RUN + k;
            const u32 first = segment < n_stored ? less(segment * per_segment, skipped) : view.n_stored;
            const u32 end = segment < n_stored ? min(view.n_stored, (segment + 1) * per_segment - skipped) : segment < n_segments ? view.n_units : first;
            float y = 0.0f;
#pragma unroll 8
            for (u32 unit = first; unit < end; unit++) y = units[h * job.n_slots + unit](y, from[(size_t)unit * stride]);
            merged[part * RUN + k][column] = y;
        }
        __syncthreads();
        if (part == 0)
            for (u32 i = 0; i < min(PARTS * RUN, n_segments - s0); i++) x = segments[h * job.n_slots + s0 + i](x, merged[i][column]);
        __syncthreads();
    }
    if (part == 0) {
        if (n_segments) x = x / sums[h];
        if (gate) x = x * sigmoid(gate[(size_t)r * cols + c]);
        const bool is_column = blockIdx.x * GROUP + column < cols;
        if (is_column) job.out[(size_t)r * cols + c] = x;
        merged[0][column] = is_column ? x : 0.0f;
    }
    if (a.kind == FLOATS) return;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float v[16];  // the upper half-warp repeats the lower one and stores nothing
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = merged[0][i * 16 + half_lane()];
    store_codes(v, a, blockIdx.x, r, cols, threadIdx.x < 16);
}
