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

constexpr u32 SEGMENTS = 4;  // part of the numerics contract
constexpr u32 WARP = 32;
constexpr u32 TILE_BYTES = 16 * Format::BYTES;
constexpr u32 SLOTS = 2;
// Blocks that a slot of the ring holds.
constexpr u32 UNIT = BLOCK_LEN == 256 ? 1 : 4;

// Matrices that read one input, tiles counted through.
struct Part {
    const u8* tiles;  // [tile of 16 rows][block][TILE_BYTES], tiles padded to an even number
    float* y;         // [column][n_out]
    u32 n_out;
    u32 end;  // tiles of this part and those before, in units of MT
};
struct Parts {
    Part part[4];
};
// What is done with a sum before it is stored.
struct Epilogue {
    float scale, cap;
    u32 is_on, has_cap;
};

// ---- instructions ---------------------------------------------------------------------------------------------------
// From zero. U: the weights are bytes 0..255, else -128..127.
template <bool U> DEV void mma_k32(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (U)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
DEV void mma_k16(int (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(b0), "r"(0));
}
DEV void mma_k16_add(int (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
DEV int byte_of(u32 w, u32 j, bool is_signed) {
    if (!is_signed) return (int)__byte_perm(w, 0, 0x4440 + j);
    int r;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(w), "r"((8 + j) * 0x1110 + j));
    return r;
}

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
#pragma unroll
            for (u32 n = 0; n < NT; n++) {
                const uint4 x = c.at(p, n);
                if (Format::GROUP == 32) {
                    int low[4], high[4];
                    mma_k32<false>(low, u[0], v[0], u[1], v[1], x.x, x.y);
                    mma_k32<Format::HIGH_IS_16_TIMES>(high, u[2], v[2], u[3], v[3], x.z, x.w);
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        const u32 s = h[m][e / 2].scales[p / 2];
                        sum[m][n][e] += low[e] * byte_of(s, p % 2 * 2, Format::IS_SIGNED);
                        int& to = Format::HIGH_IS_16_TIMES ? sixteen[m][n][e] : sum[m][n][e];
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

// ---- rings of bulk copies -------------------------------------------------------------------------------------------
#if __CUDA_ARCH__ >= 900
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void barrier_init(u32 bar, u32 n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(n) : "memory"); }
DEV void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void barrier_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
DEV void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(bar)
                 : "memory");
}
#endif

// Where a tile, counted through the parts, lies.
DEV Part part_of(const Parts& parts, u32 n_parts, u32 tile, u32& index) {
    Part part = parts.part[0];
    index = tile;
#pragma unroll
    for (u32 i = 1; i < 4; i++)  // not by index, which would copy the parts to local memory
        if (i < n_parts && tile >= parts.part[i - 1].end) part = parts.part[i], index = tile - parts.part[i - 1].end;
    return part;
}

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

// Any grid: x are groups of 8 NT columns, y workers that take tiles in turn. `is_late`: let the next kernel start at
// this block's last tile, not at once: where the grid does not fill every place of residency, blocks that come early
// settle unevenly and stay (measured: 52 instead of 38 us).
template <u32 NT, u32 MT>
DEV void multiply(const Parts& parts, u32 n_parts, u32 n_tiles, u32 n_blocks, const Activations& a, const Epilogue& epilogue, u32 is_late) {
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
    u32 next_tile = blockIdx.y, next_block = b0;
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
                bulk_copy(to + m * UNIT * TILE_BYTES, part.tiles + (index * MT + m) * tile_stride + (size_t)next_block * TILE_BYTES,
                          count * TILE_BYTES, bar);
        }
        next_block += count;
        if (next_block == b1) next_block = b0, next_tile += gridDim.y;
    };
#pragma unroll
    for (u32 i = 0; i < SLOTS; i++) ask(i);  // weights do not depend on the predecessor
    u32 slot = 0, phase = 0;
#endif
    if (!is_late) let_dependents_start();
    wait_for_predecessor();
    for (u32 tile = blockIdx.y; tile < n_tiles; tile += gridDim.y) {
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
        if (is_late && tile + gridDim.y >= n_tiles) let_dependents_start();
        finish<NT, MT>(acc, shared + buffer * SEGMENTS * MT * 16 * NT * 8, part, index, c0, n, epilogue);
        buffer ^= 1;
    }
}

// ---- many columns ---------------------------------------------------------------------------------------------------
// Eight warps own 128 rows and 64 columns and walk all blocks of K; a ninth keeps three stages of weights and activations
// on their way. Sums of a segment lie in registers, sums of the segments before in shared memory.
#if BLOCK_LEN == 256
constexpr u32 GEMM_TILES = 8, GEMM_COLUMNS = 64, GEMM_STAGES = 3, GEMM_WARPS = 8, GEMM_THREADS = (GEMM_WARPS + 1) * WARP;
struct Stage {
    u8 tiles[GEMM_TILES][TILE_BYTES];
    u8 codes[4][GEMM_COLUMNS][64];
    u8 digits[GEMM_COLUMNS][32];
    float scales[GEMM_COLUMNS];
};
struct __align__(128) GemmMemory {
    Stage stages[GEMM_STAGES];
    float totals[32][GEMM_WARPS * WARP];
    u64 full[GEMM_STAGES], empty[GEMM_STAGES];
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)
    multiply_64(Parts parts, u32 n_parts, u32 n_groups, u32 n_blocks, Activations a, Epilogue epilogue, u32) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) u8 gemm_memory[];
    GemmMemory& m = *(GemmMemory*)gemm_memory;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const u32 c0 = blockIdx.x * GEMM_COLUMNS, n = min(GEMM_COLUMNS, a.n_col - c0);
    u32 group;
    const Part part = part_of(parts, n_parts, blockIdx.y, group);
    const u32 n_tiles = min(GEMM_TILES, (part.n_out + 31) / 32 * 2 - group * GEMM_TILES);
    const u8* tiles = part.tiles + (size_t)group * GEMM_TILES * n_blocks * TILE_BYTES;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < GEMM_STAGES; i++) {
            barrier_init(shared_address(m.full + i), 1);
            barrier_init(shared_address(m.empty + i), GEMM_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    let_dependents_start();
    wait_for_predecessor();
    if (warp == GEMM_WARPS) {
        if (lane) return;
        for (u32 b = 0; b < n_blocks; b++) {
            const u32 i = b % GEMM_STAGES, bar = shared_address(m.full + i);
            Stage& stage = m.stages[i];
            if (b >= GEMM_STAGES) barrier_wait(shared_address(m.empty + i), b / GEMM_STAGES - 1 & 1);
            barrier_expect(bar, n_tiles * TILE_BYTES + n * (256 + 32 + 4));
            for (u32 k = 0; k < n_tiles; k++)
                bulk_copy(shared_address(stage.tiles[k]), tiles + ((size_t)k * n_blocks + b) * TILE_BYTES, TILE_BYTES, bar);
            const size_t at = (size_t)b * a.n_col + c0;
            for (u32 p = 0; p < 4; p++)
                bulk_copy(shared_address(stage.codes[p]), a.codes + (((size_t)b * 4 + p) * a.n_col + c0) * 64, n * 64, bar);
            bulk_copy(shared_address(stage.digits), a.digits + at * 32, n * 32, bar);
            bulk_copy(shared_address(stage.scales), a.scales + at, n * 4, bar);
        }
        return;
    }
    const u32 tile0 = warp % 4 * 2, column0 = warp / 4 * 32;
    float sum[2][4][4] = {};
    u32 segment = 0;
    auto end_segment = [&]() {
#pragma unroll
        for (u32 i = 0; i < 32; i++) {
            float& s = sum[i / 16][i / 4 % 4][i % 4];
            float& total = m.totals[i][threadIdx.x];
            total = segment == 0 ? s : total + s;
            s = 0.0f;
        }
        segment++;
    };
    for (u32 b = 0; b < n_blocks; b++) {
        while (b == (segment + 1) * n_blocks / SEGMENTS) end_segment();
        const Stage& stage = m.stages[b % GEMM_STAGES];
        barrier_wait(shared_address(m.full + b % GEMM_STAGES), b / GEMM_STAGES & 1);
        Columns<4> c;
        c.unit_stride = GEMM_COLUMNS * 64;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 column = column0 + i * 8;
            c.codes[i] = stage.codes[0][column + g] + t * 16;
            c.digits[i] = *(const uint2*)(stage.digits[column + g] + t * 8);
            const float2 dy = *(const float2*)(stage.scales + column + 2 * t);
            c.dy[i][0] = dy.x, c.dy[i][1] = dy.y;
        }
        const u8* w[2] = {stage.tiles[tile0], stage.tiles[tile0 + 1]};
        multiply_unit<4, 2>(w, c, 1, lane, sum);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(m.empty + b % GEMM_STAGES));
    }
    while (segment < SEGMENTS) end_segment();
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        const u32 r = group * 128 + (tile0 + i / 16) * 16 + g + i % 4 / 2 * 8, column = column0 + i / 4 % 4 * 8 + 2 * t + i % 2;
        float y = m.totals[i][threadIdx.x];
        if (epilogue.is_on) y = softcap_of(y, epilogue.scale, epilogue.cap, epilogue.has_cap);
        if (r < part.n_out && column < n) part.y[(size_t)(c0 + column) * part.n_out + r] = y;
    }
#endif
}
#endif

#define MULTIPLY(name, NT, MT, RESIDENT)                                                                                    \
    extern "C" __global__ void __launch_bounds__(SEGMENTS* WARP, RESIDENT)                                                  \
        name(Parts parts, u32 n_parts, u32 n_tiles, u32 n_blocks, Activations a, Epilogue epilogue, u32 is_late) {          \
        multiply<NT, MT>(parts, n_parts, n_tiles, n_blocks, a, epilogue, is_late);                                          \
    }
MULTIPLY(multiply_8, 1, 1, 6)
MULTIPLY(multiply_16, 2, 1, 4)
MULTIPLY(multiply_16_wide, 2, 2, 3)
MULTIPLY(multiply_32, 4, 2, 2)

// Blocks of the file to tiles; rows beyond `n_rows` become zeros. One thread a block.
extern "C" __global__ void pack_tiles(u8* tiles, const u8* blocks, u32 first_row, u32 n_rows, u32 n_blocks, u32 end_row) {
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    const u32 row = first_row + i / n_blocks, b = i % n_blocks;
    if (row >= end_row) return;
    u8 block[Format::BYTES];
    for (u32 k = 0; k < Format::BYTES; k++) block[k] = row < n_rows ? blocks[(size_t)i * Format::BYTES + k] : 0;
    Format::pack(tiles + ((size_t)(row / 16) * n_blocks + b) * TILE_BYTES, block, row % 16);
}

// out[r] = table[token of row r], decoded as crates/gguf does; grid: blocks, rows.
extern "C" __global__ void embed(float* out, const u8* tiles, const Row* rows, u32 n_blocks) {
    wait_for_predecessor();
    let_dependents_start();
    const Row row = rows[blockIdx.y];
    const u32 b = blockIdx.x, r = row.token % 16, t = threadIdx.x % 4;
    const u8* tile = tiles + ((size_t)(row.token / 16) * n_blocks + b) * TILE_BYTES;
    out += ((size_t)blockIdx.y * n_blocks + b) * BLOCK_LEN;
    const bool is_padding = row.seq == NO_SEQUENCE;
#if BLOCK_LEN == 256
    const u32 p = threadIdx.x / 16, i = threadIdx.x / 4 % 4;
    u32 u[4], v[4];
    Format::codes(tile, r % 8 * 4 + t, p, u, v);
    const u32 word = r < 8 ? pick(i, u[0], u[1], u[2], u[3]) : pick(i, v[0], v[1], v[2], v[3]);
    const Head h = Format::head(tile, r);
    const u32 group = (p * 64 + i * 16) / Format::GROUP;
    const float scale = h.d * (float)byte_of(pick(group / 4, h.scales[0], h.scales[1], h.scales[2], h.scales[3]), group % 4, Format::IS_SIGNED);
    const float min = h.dmin * (float)byte_of(pick(group / 4, h.minima[0], h.minima[1], h.minima[2], h.minima[3]), group % 4, false);
    for (u32 j = 0; j < 4; j++) {
        // Levels are signed bytes; other codes have no top bit but where they are 16 times too large.
        int code = Format::HIGH_IS_16_TIMES && i >= 2 ? (int)(word >> 8 * j & 255) >> 4 : (int)(i8)(word >> 8 * j);
        code -= (int)Format::OFFSET;
        const float x = Format::HAS_MINIMA ? scale * (float)code - min : scale * (float)code;
        out[64 * p + 16 * i + 4 * t + j] = is_padding ? 0.0f : x;
    }
#else
    const u32 i = threadIdx.x / 4;
    u32 c[4];
    Format::codes(tile, r % 8 * 4 + t, c);
    const u32 word = pick(2 * i + r / 8, c[0], c[1], c[2], c[3]);
    const float2 f = Format::factors(tile, r);
    for (u32 j = 0; j < 4; j++) {
        const float code = (float)(i8)(word >> 8 * j);
        const float x = Format::HAS_MIN ? f.x * code + f.y : f.x * code;
        out[16 * i + 4 * t + j] = is_padding ? 0.0f : x;
    }
#endif
}
