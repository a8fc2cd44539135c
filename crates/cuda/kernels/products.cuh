// Products of one block encoding with int8 activations, in the canonical order of docs/numerics.md, for any number of
// rows ("columns" here: they are the columns of the tensor-core tile). `Format` and BLOCK_LEN come from quant/<type>.cuh.
//
//   y[c][r] = sum over blocks b of dy[b][c] * t(b, r, c): four chains of fmaf over consecutive quarters of the blocks,
//   added ascending. t is one or two roundings of exact integers.
//
// Integers come from mma.sync m16n8k32 / k16: 16 weight rows by 8 columns, also for one column. Warp w of a block
// streams quarter w of its tile's blocks through its own ring of bulk copies; before sm_90 it reads global memory.
// What a reader would get wrong: grid, columns and tile shape appear nowhere in the order of a sum, so one kernel for a
// row and another for 512 give the same bits.

constexpr u32 TILE_BYTES = 16 * Format::BYTES;

// ---- what a lane needs of a unit of activations, asked for before the weights are waited for ------------------------
#if BLOCK_LEN == 256
// Of more than 16 columns the codes are read when they are multiplied: they would not fit the registers.
template <u32 NT> struct Columns {
    static constexpr bool IS_EARLY = NT <= 2;
    uint4 x[4][IS_EARLY ? NT : 1];
    const u8* codes[IS_EARLY ? 1 : NT];
    u32 unit_stride;
    uint2 digits[NT];
    float dy[NT][2];

    __device__ __forceinline__ uint4 at(u32 p, u32 n) const {
        if constexpr (IS_EARLY) return x[p][n];
        else return *(const uint4*)(codes[n] + p * unit_stride);
    }

    DEV Columns load(const Activations& a, u32 b, u32, u32 c0, u32 n, u32 lane) {
        Columns c;
        const u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 i = 0; i < NT; i++) {
            const u32 col = c0 + min(i * 8 + g, n - 1);
            const u8* codes = a.codes + ((size_t)b * 4 * a.n_col + col) * 64 + t * 16;
            c.unit_stride = a.n_col * 64;
            if constexpr (IS_EARLY) {
#pragma unroll
                for (u32 p = 0; p < 4; p++) c.x[p][i] = *(const uint4*)(codes + p * c.unit_stride);
            } else {
                c.codes[i] = codes;
            }
            c.digits[i] = *(const uint2*)(a.digits + ((size_t)b * a.n_col + col) * 32 + t * 8);
#pragma unroll
            for (u32 e = 0; e < 2; e++) c.dy[i][e] = a.scales[(size_t)b * a.n_col + c0 + min(i * 8 + 2 * t + e, n - 1)];
        }
        return c;
    }
};

// One block of MT x 16 weight rows times NT x 8 columns. acc[m][n]: rows g, g + 8 of tile m, columns 8n + 2t and + 1, in
// the order (g, c) (g, c + 1) (g + 8, c) (g + 8, c + 1). Columns past the last repeat it; their results are dropped.
template <u32 NT, u32 MT>
DEV void multiply_unit(const u8* const (&w)[MT], const Columns<NT>& c, u32, u32 lane, float (&acc)[MT][NT][4]) {
    const u32 g = lane / 4, t = lane % 4;
    // Of many columns it pays to shift the high codes down at once, to have one sum.
    constexpr bool IS_SHIFTED = Format::HIGH_IS_16_TIMES && NT >= 4, HAS_SIXTEEN = Format::HIGH_IS_16_TIMES && !IS_SHIFTED;
    int sum[MT][NT][4] = {}, sixteen[MT][NT][4] = {};
    Head h[MT][2];
#pragma unroll
    for (u32 m = 0; m < MT; m++) h[m][0] = Format::head(w[m], g), h[m][1] = Format::head(w[m], g + 8);
#pragma unroll
    for (u32 p = 0; p < 4; p++)
#pragma unroll
        for (u32 m = 0; m < MT; m++) {
            u32 u[4], v[4];
            Format::codes(w[m], lane, p, u, v);
            if (IS_SHIFTED) u[2] >>= 4, u[3] >>= 4, v[2] >>= 4, v[3] >>= 4;
#pragma unroll
            for (u32 n = 0; n < NT; n++) {
                const uint4 x = c.at(p, n);
                if (Format::GROUP == 32) {
                    int low[4], high[4];
                    mma_k32<false>(low, u[0], v[0], u[1], v[1], x.x, x.y);
                    mma_k32<HAS_SIXTEEN>(high, u[2], v[2], u[3], v[3], x.z, x.w);
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        const u32 s = h[m][e / 2].scales[p / 2];
                        sum[m][n][e] += low[e] * byte_of(s, p % 2 * 2, Format::IS_SIGNED);
                        int& to = HAS_SIXTEEN ? sixteen[m][n][e] : sum[m][n][e];
                        to += high[e] * byte_of(s, p % 2 * 2 + 1, Format::IS_SIGNED);
                    }
                } else {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        int part[4];
                        mma_k16(part, u[i], v[i], i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w);
#pragma unroll
                        for (u32 e = 0; e < 4; e++) sum[m][n][e] += part[e] * byte_of(h[m][e / 2].scales[p], i, Format::IS_SIGNED);
                    }
                }
            }
        }
    // Minima, or an offset in every code, times the sums of 16 activations: one more small product, in two digits.
#pragma unroll
    for (u32 n = 0; n < NT; n++)
#pragma unroll
        for (u32 m = 0; m < MT; m++) {
            int other[4] = {};
            if (Format::HAS_MINIMA || Format::OFFSET) {
                const u32 a0 = Format::minima(h[m][0], t), a1 = Format::minima(h[m][1], t);
                mma_k16(other, a0, a1, c.digits[n].y);
#pragma unroll
                for (u32 e = 0; e < 4; e++) other[e] *= 64;
                mma_k16_add(other, a0, a1, c.digits[n].x);
            }
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const Head& head = h[m][e / 2];
                const int exact = sum[m][n][e] + (sixteen[m][n][e] >> 4) - (int)Format::OFFSET * (Format::HAS_MINIMA ? 0 : other[e]);
                const float y = Format::HAS_MINIMA ? fmaf(head.d, (float)exact, -(head.dmin * (float)other[e])) : head.d * (float)exact;
                acc[m][n][e] = fmaf(c.dy[n][e & 1], y, acc[m][n][e]);
            }
        }
}
#else
template <u32 NT> struct Columns {
    uint2 x[UNIT][NT];
    float dy[UNIT][NT][2], sum[UNIT][NT][2];

    DEV Columns load(const Activations& a, u32 b, u32 n_blocks, u32 c0, u32 n, u32 lane) {
        Columns c;
        const u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 k = 0; k < UNIT; k++)
#pragma unroll
            for (u32 i = 0; i < NT; i++) {
                const size_t at = (size_t)min(b + k, b + n_blocks - 1) * a.n_col + c0;
                c.x[k][i] = *(const uint2*)(a.codes + (at + min(i * 8 + g, n - 1)) * 32 + t * 8);
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    c.dy[k][i][e] = a.scales[at + min(i * 8 + 2 * t + e, n - 1)];
                    if (Format::HAS_MIN) c.sum[k][i][e] = a.sums[at + min(i * 8 + 2 * t + e, n - 1)];
                }
            }
        return c;
    }
};

// As above, `n_blocks` blocks of 32.
template <u32 NT, u32 MT>
DEV void multiply_unit(const u8* const (&w)[MT], const Columns<NT>& c, u32 n_blocks, u32 lane, float (&acc)[MT][NT][4]) {
    const u32 g = lane / 4;
#pragma unroll
    for (u32 k = 0; k < UNIT; k++) {
        if (k >= n_blocks) break;
#pragma unroll
        for (u32 m = 0; m < MT; m++) {
            const u8* tile = w[m] + k * TILE_BYTES;
            u32 a[4];
            Format::codes(tile, lane, a);
            const float2 f[2] = {Format::factors(tile, g), Format::factors(tile, g + 8)};
#pragma unroll
            for (u32 n = 0; n < NT; n++) {
                int sum[4];
                mma_k32<false>(sum, a[0], a[1], a[2], a[3], c.x[k][n].x, c.x[k][n].y);
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    const float2 d = f[e / 2];
                    const float y = Format::HAS_MIN ? fmaf(d.x, (float)sum[e], d.y * c.sum[k][n][e & 1]) : d.x * (float)sum[e];
                    acc[m][n][e] = fmaf(c.dy[k][n][e & 1], y, acc[m][n][e]);
                }
            }
        }
    }
}
#endif

// Adds the segments' sums of a tile and stores them. One barrier a tile: callers alternate between two buffers.
template <u32 NT, u32 MT>
DEV void finish(const float (&acc)[MT][NT][4], float* shared, const Part& part, u32 tile, u32 c0, u32 n, const Epilogue& epilogue) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    constexpr u32 R = 16 * MT;
#pragma unroll
    for (u32 m = 0; m < MT; m++)
#pragma unroll
        for (u32 i = 0; i < NT; i++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 r = m * 16 + g + e / 2 * 8, c = i * 8 + 2 * t + (e & 1);
                if (c < n) shared[(warp * NT * 8 + c) * R + r] = acc[m][i][e];
            }
    __syncthreads();
    for (u32 i = threadIdx.x; i < R * n; i += SEGMENTS * WARP) {
        const u32 c = i / R, r = i % R;
        float y = shared[c * R + r];
#pragma unroll
        for (u32 s = 1; s < SEGMENTS; s++) y = y + shared[(s * NT * 8 + c) * R + r];
        if (epilogue.is_on) y = softcap_of(y, epilogue.scale, epilogue.cap, epilogue.has_cap);
        if (tile * R + r < part.n_out) part.y[(size_t)(c0 + c) * part.n_out + tile * R + r] = y;
    }
}

// Any grid: x are groups of 8 NT columns; of `n_workers` workers, each takes tiles in turn. `is_late`: let the next kernel start at
// this block's last tile, not at once: where the grid does not fill every place of residency, blocks that come early
// settle unevenly and stay (measured: 52 instead of 38 us).
template <u32 NT, u32 MT>
DEV void multiply(const Parts& parts, u32 n_parts, u32 n_tiles, u32 worker, u32 n_workers, u32 n_blocks, const Activations& a,
                  const Epilogue& epilogue, u32 is_late) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 c0 = blockIdx.x * 8 * NT, n = min(8 * NT, a.n_col - c0);
    const u32 b0 = warp * n_blocks / SEGMENTS, b1 = (warp + 1) * n_blocks / SEGMENTS;
    const size_t tile_stride = (size_t)n_blocks * TILE_BYTES;
    constexpr u32 SLOT = MT * UNIT * TILE_BYTES;
    float* shared = (float*)(memory + SEGMENTS * SLOTS * SLOT);
    u32 buffer = 0;
#if __CUDA_ARCH__ >= 900
    u8* ring = memory + warp * SLOTS * SLOT;
    u64* bars = (u64*)(shared + 2 * SEGMENTS * MT * 16 * NT * 8) + warp * SLOTS;
    if (lane == 0) {
#pragma unroll
        for (u32 i = 0; i < SLOTS; i++) barrier_init(shared_address(bars + i), 1);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    u32 next_tile = worker, next_block = b0;
    const u64 policy = first_to_leave();
    auto ask = [&](u32 slot) {
        if (next_tile >= n_tiles || b0 == b1) return;
        const u32 count = min(UNIT, b1 - next_block);
        if (lane == 0) {
            u32 index;
            const Part part = part_of(parts, n_parts, next_tile, index);
            const u32 bar = shared_address(bars + slot), to = shared_address(ring + slot * SLOT);
            barrier_expect(bar, MT * count * TILE_BYTES);
#pragma unroll
            for (u32 m = 0; m < MT; m++)
                bulk_copy_of_weights(to + m * UNIT * TILE_BYTES, part.tiles + (index * MT + m) * tile_stride + (size_t)next_block * TILE_BYTES,
                                     count * TILE_BYTES, bar, policy);
        }
        next_block += count;
        if (next_block == b1) next_block = b0, next_tile += n_workers;
    };
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) ask(i);  // weights do not depend on the predecessor
    u32 slot = 0, phase = 0;
#endif
    if (!is_late) let_dependents_start();
    wait_for_predecessor();
    for (u32 tile = worker; tile < n_tiles; tile += n_workers) {
        u32 index;
        const Part part = part_of(parts, n_parts, tile, index);
        float acc[MT][NT][4] = {};
        for (u32 b = b0; b < b1; b += UNIT) {
            const u32 count = min(UNIT, b1 - b);
            const Columns<NT> c = Columns<NT>::load(a, b, count, c0, n, lane);
            const u8* w[MT];
#if __CUDA_ARCH__ >= 900
            barrier_wait(shared_address(bars + slot), phase);
#pragma unroll
            for (u32 m = 0; m < MT; m++) w[m] = ring + slot * SLOT + m * UNIT * TILE_BYTES;
#else
#pragma unroll
            for (u32 m = 0; m < MT; m++) w[m] = part.tiles + (index * MT + m) * tile_stride + (size_t)b * TILE_BYTES;
#endif
            multiply_unit<NT, MT>(w, c, count, lane, acc);
#if __CUDA_ARCH__ >= 900
            __syncwarp();  // all lanes have read the slot
            ask(slot);
            if (++slot == SLOTS) slot = 0, phase ^= 1;
#endif
        }
        if (is_late && tile + n_workers >= n_tiles) let_dependents_start();
        finish<NT, MT>(acc, shared + buffer * SEGMENTS * MT * 16 * NT * 8, part, index, c0, n, epilogue);
        buffer ^= 1;
    }
}
