// Reading logits back: largest logits, the sum of exponentials, and whether all are finite.
//
// A logit and its token make a key of 64 bits whose order is that of model::select: larger logits first, then lower
// tokens. What a reader would get wrong: the two zeros are one value, so 0 is added before the bits are looked at; the
// logit itself is fetched from the row afterwards.

constexpr u32 CHUNK = 2048;  // keys that a block sorts
constexpr u32 THREADS = 512;

DEV u64 key_of(float logit, u32 token) {
    const u32 b = bits(logit + 0.0f);
    const u32 ordered = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)ordered << 32 | (u32)~token;
}

// Of each chunk of a row: largest key, first token whose logit is not finite (or 0xffffffff). Grid: chunks, rows.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_largest(u64* largest, u32* not_finite, const float* logits, u32 n) {
    __shared__ u64 best[THREADS / 32];
    __shared__ u32 bad[THREADS / 32];
    const u32 row = blockIdx.y, end = min((blockIdx.x + 1) * CHUNK, n);
    const float* x = logits + (size_t)row * n;
    u64 key = 0;
    u32 first_bad = 0xffffffffu;
    for (u32 i = blockIdx.x * CHUNK + threadIdx.x; i < end; i += THREADS) {
        const float v = x[i];
        if ((bits(v) & 0x7f800000u) == 0x7f800000u) first_bad = min(first_bad, i);
        key = max(key, key_of(v, i));
    }
#pragma unroll
    for (u32 o = 16; o; o >>= 1) {
        key = max(key, __shfl_xor_sync(ALL, key, o));
        first_bad = min(first_bad, __shfl_xor_sync(ALL, first_bad, o));
    }
    if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = key, bad[threadIdx.x / 32] = first_bad;
    __syncthreads();
    if (threadIdx.x) return;
    for (u32 i = 1; i < THREADS / 32; i++) key = max(key, best[i]), first_bad = min(first_bad, bad[i]);
    largest[(size_t)row * gridDim.x + blockIdx.x] = key;
    not_finite[(size_t)row * gridDim.x + blockIdx.x] = first_bad;
}

// Answer of a row: largest key, its logit, first token that is not finite.
struct Largest {
    u64 key;
    float logit;
    u32 not_finite;
};
// Over the chunks of a row; one block of 32 threads a row.
extern "C" __global__ void row_largest(Largest* out, const u64* largest, const u32* not_finite, const float* logits, u32 n, u32 n_chunks) {
    const u32 row = blockIdx.x;
    u64 key = 0;
    u32 first_bad = 0xffffffffu;
    for (u32 i = threadIdx.x; i < n_chunks; i += 32) {
        key = max(key, largest[(size_t)row * n_chunks + i]);
        first_bad = min(first_bad, not_finite[(size_t)row * n_chunks + i]);
    }
#pragma unroll
    for (u32 o = 16; o; o >>= 1) {
        key = max(key, __shfl_xor_sync(ALL, key, o));
        first_bad = min(first_bad, __shfl_xor_sync(ALL, first_bad, o));
    }
    if (threadIdx.x == 0) out[row] = {key, logits[(size_t)row * n + (u32)~(u32)key], first_bad};
}

// Sums of exp(x - max) of the chunks of rows, in f64: each thread ascending, then a tree. Grid: chunks, rows.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_exponentials(double* sums, const float* logits, const Largest* largest, u32 n) {
    __shared__ double part[THREADS / 32];
    const u32 row = blockIdx.y, end = min((blockIdx.x + 1) * CHUNK, n);
    const float max = largest[row].logit;
    double sum = 0.0;
    for (u32 i = blockIdx.x * CHUNK + threadIdx.x; i < end; i += THREADS) sum += exp((double)(logits[(size_t)row * n + i] - max));
#pragma unroll
    for (u32 o = 16; o; o >>= 1) sum += __shfl_xor_sync(ALL, sum, o);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (u32 i = 1; i < THREADS / 32; i++) sum += part[i];
    sums[(size_t)row * gridDim.x + blockIdx.x] = sum;
}
extern "C" __global__ void row_exponentials(double* out, const double* sums, u32 n_chunks) {
    double sum = 0.0;
    for (u32 i = 0; i < n_chunks; i++) sum += sums[(size_t)blockIdx.x * n_chunks + i];
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// Sorts CHUNK keys, largest first (Batcher 1968, bitonic).
DEV void sort_chunk(u64* keys) {
    for (u32 size = 2; size <= CHUNK; size *= 2)
        for (u32 step = size / 2; step; step /= 2) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < CHUNK / 2; i += THREADS) {
                const u32 a = i / step * 2 * step + i % step, b = a + step;
                const bool is_descending = (a & size) == 0;
                const u64 x = keys[a], y = keys[b];
                if ((x < y) == is_descending) keys[a] = y, keys[b] = x;
            }
        }
    __syncthreads();
}
// The k largest keys of each chunk of a row of logits, largest first, 0 where there are none. Grid: chunks, rows.
extern "C" __global__ void __launch_bounds__(THREADS) top_of_logits(u64* out, const float* logits, u32 n, u32 k) {
    __shared__ u64 keys[CHUNK];
    const u32 row = blockIdx.y;
    for (u32 i = threadIdx.x; i < CHUNK; i += THREADS) {
        const u32 token = blockIdx.x * CHUNK + i;
        keys[i] = token < n ? key_of(logits[(size_t)row * n + token], token) : 0;
    }
    sort_chunk(keys);
    for (u32 i = threadIdx.x; i < k; i += THREADS) out[((size_t)row * gridDim.x + blockIdx.x) * k + i] = keys[i];
}
// The same of a row of n keys.
extern "C" __global__ void __launch_bounds__(THREADS) top_of_keys(u64* out, const u64* in, u32 n, u32 k) {
    __shared__ u64 keys[CHUNK];
    const u32 row = blockIdx.y;
    for (u32 i = threadIdx.x; i < CHUNK; i += THREADS) {
        const u32 at = blockIdx.x * CHUNK + i;
        keys[i] = at < n ? in[(size_t)row * n + at] : 0;
    }
    sort_chunk(keys);
    for (u32 i = threadIdx.x; i < k; i += THREADS) out[((size_t)row * gridDim.x + blockIdx.x) * k + i] = keys[i];
}
// The logits that keys name.
extern "C" __global__ void logits_of_keys(float* out, const u64* keys, const float* logits, u32 n, u32 k) {
    const u32 row = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < k) out[(size_t)row * k + i] = logits[(size_t)row * n + (u32)~(u32)keys[(size_t)row * k + i]];
}
