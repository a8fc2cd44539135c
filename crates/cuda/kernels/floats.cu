// Products of F32, F16 and BF16 weights with f32 activations: lane l of 16 takes the elements l mod 16 by ascending
// fmaf, then the tree 8-4-2-1. `Element` is the weights' type as the options define it.
#if ELEMENT == 0
typedef float Element;
DEV float to_float(Element x) { return x; }
#elif ELEMENT == 1
typedef u16 Element;
DEV float to_float(Element x) { return half_to_float(x); }
#else
typedef u16 Element;
DEV float to_float(Element x) { return from_bits((u32)x << 16); }
#endif

constexpr u32 AT_ONCE = 8;  // columns that share a load of a weight

// y[c][j] = sum_k w[j][k] * x[c][k]; grid: rows of the weights by half-warps, columns by 8.
extern "C" __global__ void __launch_bounds__(128) dot(float* y, const Element* w, const float* x, u32 n_out, u32 n, u32 n_col) {
    wait_for_predecessor();
    let_dependents_start();
    const u32 j = (blockIdx.x * blockDim.x + threadIdx.x) / 16, c0 = blockIdx.y * AT_ONCE;
    const u32 n_own = min(AT_ONCE, n_col - c0);
    w += (size_t)min(j, n_out - 1) * n;
    float acc[AT_ONCE] = {};
    for (u32 k = half_lane(); k < n; k += 16) {
        const float a = to_float(w[k]);
#pragma unroll
        for (u32 c = 0; c < AT_ONCE; c++)
            if (c < n_own) acc[c] = fmaf(a, x[(size_t)(c0 + c) * n + k], acc[c]);
    }
#pragma unroll
    for (u32 c = 0; c < AT_ONCE; c++) {
        const float sum = sum_of_lanes(acc[c]);
        if (c < n_own && j < n_out && half_lane() == 0) y[(size_t)(c0 + c) * n_out + j] = sum;
    }
}

// out[r] = table[token of row r].
extern "C" __global__ void embed(float* out, const Element* table, const Row* rows, u32 n) {
    wait_for_predecessor();
    let_dependents_start();
    const Row row = rows[blockIdx.y];
    for (u32 k = blockIdx.x * blockDim.x + threadIdx.x; k < n; k += gridDim.x * blockDim.x)
        out[(size_t)blockIdx.y * n + k] = row.seq == NO_SEQUENCE ? 0.0f : to_float(table[(size_t)row.token * n + k]);
}
