// Operations on the elements of rows: norms, gates, sums, the cap, rotation, and the conversion of activations.
//
// Half-warps own groups of 256 elements (common.cuh); a row's groups lie in one block of threads. What a reader would
// get wrong: a fused kernel stores its f32 result as well as the codes made of it, so that the buffer can be read.

constexpr u32 MAX_GROUPS = 1024;  // of a row: 262,144 columns

// Sum of the squares of a row whose groups the half-warps of the block hold in `v` (the first of each) or reread.
struct RowSum {
    __align__(16) float part[MAX_GROUPS];

    __device__ __forceinline__ float of(const float (&v)[16], const float* row, u32 n) {
        const u32 n_groups = (n + GROUP - 1) / GROUP, per_round = blockDim.x / 16, own = threadIdx.x / 16;
        __syncthreads();  // the sums of the norm before have been read
        const float first = squares(v);
        if (half_lane() == 0 && own < n_groups) part[own] = first;
        if (threadIdx.x < 16 && n_groups + threadIdx.x < MAX_GROUPS) part[n_groups + threadIdx.x] = 0.0f;
        for (u32 g0 = per_round; g0 < n_groups; g0 += per_round) {
            float w[16];
            load_group(w, row, g0 + own, n);
            const float s = squares(w);
            if (half_lane() == 0 && g0 + own < n_groups) part[g0 + own] = s;
        }
        __syncthreads();
        // Ascending; zeros behind the last one change nothing. Many are fetched at a time, for the chain is long.
        float total = 0.0f;
        for (u32 g = 0; g < n_groups; g += 16) {
            float4 p[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) p[i] = *(const float4*)(part + g + 4 * i);
#pragma unroll
            for (u32 i = 0; i < 4; i++) total = (((total + p[i].x) + p[i].y) + p[i].z) + p[i].w;
        }
        return total;
    }
};

// out = x / rms(x) * w, one block a row; `out` may be `x`.
extern "C" __global__ void __launch_bounds__(512) norm_rows(float* out, const float* x, const float* w, u32 n, float eps, Activations a) {
    __shared__ RowSum sum;
    const u32 row = blockIdx.x, own = threadIdx.x / 16, per_round = blockDim.x / 16;
    float v[16], weights[16];
    load_weights(weights, w, own, n);
    wait_for_predecessor();
    let_dependents_start();
    x += (size_t)row * n;
    out += (size_t)row * n;
    load_group(v, x, own, n);
    const float s = inverse_rms(sum.of(v, x, n), n, eps);
    for (u32 g0 = 0; g0 * GROUP < n; g0 += per_round) {
        if (g0) {
            load_group(v, x, g0 + own, n);
            load_weights(weights, w, g0 + own, n);
        }
        scale_group(v, s, weights, w);
        store_group(v, out, g0 + own, n);
        store_codes(v, a, g0 + own, row, n, (g0 + own) * GROUP < n);
    }
}

// x += y / rms(y) * w; then out = x / rms(x) * next, if there is a next.
extern "C" __global__ void __launch_bounds__(512) add_norm_rows(float* x, const float* y, const float* w, float eps, float* out,
                                                                const float* next, float next_eps, u32 n, Activations a) {
    __shared__ RowSum sum;
    const u32 row = blockIdx.x, own = threadIdx.x / 16, per_round = blockDim.x / 16;
    float v[16], h[16], weights[16], next_weights[16];
    load_weights(weights, w, own, n);
    load_weights(next_weights, next, own, n);
    wait_for_predecessor();
    let_dependents_start();
    x += (size_t)row * n;
    y += (size_t)row * n;
    load_group(v, y, own, n);
    load_group(h, x, own, n);
    const float s = inverse_rms(sum.of(v, y, n), n, eps);
    for (u32 g0 = 0; g0 * GROUP < n; g0 += per_round) {
        if (g0) {
            load_group(v, y, g0 + own, n);
            load_group(h, x, g0 + own, n);
            load_weights(weights, w, g0 + own, n);
        }
        scale_group(v, s, weights, true);
#pragma unroll
        for (u32 i = 0; i < 16; i++) v[i] = h[i] + v[i];
        store_group(v, x, g0 + own, n);
    }
    if (!next) return;
    out += (size_t)row * n;
    if (per_round * GROUP < n) load_group(v, x, own, n);  // `v` is the last round's; each half-warp reads what it stored
    const float s2 = inverse_rms(sum.of(v, x, n), n, next_eps);
    for (u32 g0 = 0; g0 * GROUP < n; g0 += per_round) {
        if (g0) {
            load_group(v, x, g0 + own, n);
            load_weights(next_weights, next, g0 + own, n);
        }
        scale_group(v, s2, next_weights, true);
        store_group(v, out, g0 + own, n);
        store_codes(v, a, g0 + own, row, n, (g0 + own) * GROUP < n);
    }
}

// x = x / rms(x) * w over heads of `dim` <= 256 elements, a half-warp a head.
extern "C" __global__ void norm_heads(float* x, const float* w, u32 dim, u32 n_heads, float eps) {
    wait_for_predecessor();
    let_dependents_start();
    const u32 head = (blockIdx.x * blockDim.x + threadIdx.x) / 16;
    const u32 n = head < n_heads ? dim : 0;
    x += (size_t)(head < n_heads ? head : 0) * dim;
    float v[16], weights[16];
    load_weights(weights, w, 0, n);
    load_group(v, x, 0, n);
    const float s = inverse_rms(squares(v), dim, eps);
    scale_group(v, s, weights, true);
    store_group(v, x, 0, n);
}

// One block a head; `dim` floats of shared memory.
extern "C" __global__ void rope(float* x, u32 cols, u32 dim, Turn turn) {
    extern __shared__ float head[];
    wait_for_predecessor();
    let_dependents_start();
    const u32 row = blockIdx.y;
    x += (size_t)row * cols + blockIdx.x * dim;
    for (u32 k = threadIdx.x; k < dim; k += blockDim.x) head[k] = x[k];
    __syncthreads();
    for (u32 k = threadIdx.x; k < dim; k += blockDim.x) x[k] = turned(turn, head, row, k);
}

extern "C" __global__ void store_kv(const float* k, const float* v, const Row* rows, Place place, u32 is_half) {
    wait_for_predecessor();
    let_dependents_start();
    const u32 r = blockIdx.x, half = blockIdx.y;
    const float* x = (half ? v : k) + (size_t)r * place.n_kv;
    u8* to = stored_row(place, rows[r], rows[r].pos, half, is_half);
    if (!to) return;
    for (u32 i = threadIdx.x; i < place.n_kv; i += blockDim.x) store_element(to, is_half, i, x[i]);
}

// Norm and turn of the heads of q and k (in place), store of k and v; a half-warp a head, heads of q, then of k, then of v.
// Weights, sines and places are of the step: they are asked for before the predecessor is waited for.
extern "C" __global__ void __launch_bounds__(128) norm_turn_store(float* q, float* k, const float* v, const float* q_norm,
                                                                  const float* k_norm, float eps, u32 dim, u32 n_head, u32 n_head_kv,
                                                                  const Row* rows, Turn turn, Place place, u32 is_half) {
    __shared__ float heads[8][GROUP];
    const u32 head = (blockIdx.x * blockDim.x + threadIdx.x) / 16, r = blockIdx.y;
    const u32 n = head < n_head + 2 * n_head_kv ? dim : 0;
    const bool is_q = head < n_head, is_v = head >= n_head + n_head_kv;
    const u32 own = is_q ? head : is_v ? head - n_head - n_head_kv : head - n_head;
    float* buffer = is_q ? q : k;
    const size_t at = n ? ((size_t)r * (is_q ? n_head : n_head_kv) + own) * dim : 0;
    float x[16], weights[16];
    load_weights(weights, is_v ? 0 : is_q ? q_norm : k_norm, 0, n);
    u8* to = !n || is_q ? 0 : stored_row(place, rows[r], rows[r].pos, is_v, is_half);
    wait_for_predecessor();
    let_dependents_start();
    load_group(x, is_v ? v + at : buffer + at, 0, n);
    const float s = inverse_rms(squares(x), dim, eps);
    if (!is_v) scale_group(x, s, weights, true);
    float* shared = heads[threadIdx.x / 16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) shared[i * 16 + half_lane()] = x[i];
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const u32 d = i * 16 + half_lane();
        if (d >= n) continue;
        const float y = is_v ? x[i] : turned(turn, shared, r, d);
        if (!is_v) buffer[at + d] = y;
        if (to) store_element(to, is_half, own * dim + d, y);
    }
}

// ---- element by element ---------------------------------------------------------------------------------------------
#define EACH(i, n) for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (n); i += (size_t)gridDim.x * blockDim.x)

extern "C" __global__ void add(float* x, const float* y, size_t n) {
    wait_for_predecessor();
    let_dependents_start();
    EACH(i, n) x[i] = x[i] + y[i];
}
extern "C" __global__ void add_bias(float* x, const float* bias, u32 cols, size_t n) {
    wait_for_predecessor();
    let_dependents_start();
    EACH(i, n) x[i] = x[i] + bias[i % cols];
}
extern "C" __global__ void softcap(float* x, float scale, float cap, u32 has_cap, size_t n) {
    wait_for_predecessor();
    let_dependents_start();
    EACH(i, n) x[i] = softcap_of(x[i], scale, cap, has_cap);
}
// Row r of out = row wanted[r] of x; a padding row is 0.
extern "C" __global__ void gather(float* out, const float* x, const u32* wanted, u32 cols) {
    wait_for_predecessor();
    let_dependents_start();
    const u32 from = wanted[blockIdx.y];
    EACH(i, cols) out[(size_t)blockIdx.y * cols + i] = from == NO_SEQUENCE ? 0.0f : x[(size_t)from * cols + i];
}
extern "C" __global__ void copy_columns(float* out, u32 out_cols, u32 first, const float* x, u32 cols) {
    wait_for_predecessor();
    let_dependents_start();
    EACH(i, cols) out[(size_t)blockIdx.y * out_cols + first + i] = x[(size_t)blockIdx.y * cols + i];
}

// What is done with two elements, group by group, before the result is converted.
struct Keep {
    DEV float of(float x, float) { return x; }
};
struct Swiglu {
    DEV float of(float x, float y) { return silu(x) * y; }
};
struct MulSigmoid {
    DEV float of(float x, float y) { return x * sigmoid(y); }
};
// x = f(x, y); grid: half-warps over groups, rows.
template <class F, bool WRITES>
DEV void zip_groups(float* x, const float* y, u32 n, const Activations& a) {
    wait_for_predecessor();
    let_dependents_start();
    const u32 g = (blockIdx.x * blockDim.x + threadIdx.x) / 16, row = blockIdx.y;
    float v[16], w[16] = {};
    load_group(v, x + (size_t)row * n, g, n);
    if (WRITES) load_group(w, y + (size_t)row * n, g, n);
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = g * GROUP + i * 16 + half_lane() < n ? F::of(v[i], w[i]) : 0.0f;
    if (WRITES) store_group(v, x + (size_t)row * n, g, n);
    store_codes(v, a, g, row, n, g * GROUP < n);
}
// The same for few rows: a block of threads takes a group, a thread an element.
template <class F> DEV void zip_elements(float* x, const float* y, u32 n, const Activations& a) {
    __shared__ float z[GROUP];
    wait_for_predecessor();
    let_dependents_start();
    const u32 g = blockIdx.x, row = blockIdx.y, k = g * GROUP + threadIdx.x;
    x += (size_t)row * n, y += (size_t)row * n;
    const float result = k < n ? F::of(x[k], y[k]) : 0.0f;
    if (k < n) x[k] = result;
    z[threadIdx.x] = result;
    if (a.kind == FLOATS) return;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float v[16];  // the upper half-warp repeats the lower one and stores nothing
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = z[i * 16 + half_lane()];
    store_codes(v, a, g, row, n, threadIdx.x < 16);
}
extern "C" __global__ void convert(float* x, u32 n, Activations a) { zip_groups<Keep, false>(x, 0, n, a); }
extern "C" __global__ void swiglu(float* x, const float* y, u32 n, Activations a) { zip_groups<Swiglu, true>(x, y, n, a); }
extern "C" __global__ void mul_sigmoid(float* x, const float* y, u32 n, Activations a) { zip_groups<MulSigmoid, true>(x, y, n, a); }
extern "C" __global__ void __launch_bounds__(256) swiglu_few(float* x, const float* y, u32 n, Activations a) { zip_elements<Swiglu>(x, y, n, a); }

// Reads n pieces of 16 bytes, to measure how fast; `out` keeps the compiler from leaving it out.
extern "C" __global__ void __launch_bounds__(512) read_all(u32* out, const uint4* x, size_t n) {
    u32 all = 0;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        const uint4 a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];
        all ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += step) all ^= x[i].x;
    if (all == 0x5eed5eedu) *out = all;
}
