// Products for many columns on the tensor cores' asynchronous path (wgmma): a block of threads owns 128 rows and 128
// columns and walks all blocks of K; a third group of four warps keeps the stages filled and leaves the two that multiply its
// registers.
//
// Codes are multiplied by their group's scale while they are unpacked, in two digits of eight bits; so the unit sums whole
// blocks of 256, and the sum of the digits' sums is the integer I_b of docs/numerics.md. Weights come from registers:
// a lane's part of a tile is its part of the operand. What a reader would get wrong: registers that a product reads may
// not change before it is waited for.
#if defined(HAS_DIGITS) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr u32 WIDE_TILES = 8, WIDE_COLUMNS = 128, WIDE_STAGES = 2, WIDE_WARPS = 8, WIDE_THREADS = (WIDE_WARPS + 4) * WARP;
struct __align__(1024) WideStage {
    u8 codes[2][WIDE_COLUMNS][128];
    u8 tiles[WIDE_TILES][TILE_BYTES];
    u8 digits[WIDE_COLUMNS][32];
    float scales[WIDE_COLUMNS];
};
struct WideMemory {
    WideStage stages[WIDE_STAGES];
    float totals[64][WIDE_WARPS * WARP];
    u64 full[WIDE_STAGES], empty[WIDE_STAGES];
};

DEV void multiply_128(const Parts& parts, u32 n_parts, u32 group, u32 n_blocks, const Activations& a, const Epilogue& epilogue) {
    extern __shared__ __align__(128) u8 wide_memory[];
    WideMemory& m = *(WideMemory*)(wide_memory + (0u - shared_address(wide_memory)) % 1024);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const u32 c0 = blockIdx.x * WIDE_COLUMNS, n = min(WIDE_COLUMNS, a.n_col - c0);
    u32 index;
    const Part part = part_of(parts, n_parts, group, index);
    const u32 n_tiles = min(WIDE_TILES, (part.n_out + 31) / 32 * 2 - index * WIDE_TILES);
    const u8* tiles = part.tiles + (size_t)index * WIDE_TILES * n_blocks * TILE_BYTES;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < WIDE_STAGES; i++) {
            barrier_init(shared_address(m.full + i), 1);
            barrier_init(shared_address(m.empty + i), WIDE_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    let_dependents_start();
    wait_for_predecessor();
    if (warp >= WIDE_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x > WIDE_WARPS * WARP) return;
        for (u32 b = 0; b < n_blocks; b++) {
            const u32 i = b % WIDE_STAGES, bar = shared_address(m.full + i);
            WideStage& stage = m.stages[i];
            if (b >= WIDE_STAGES) barrier_wait(shared_address(m.empty + i), b / WIDE_STAGES - 1 & 1);
            barrier_expect(bar, n_tiles * TILE_BYTES + n * (256 + 32 + 4));
            for (u32 k = 0; k < n_tiles; k++)
                bulk_copy(shared_address(stage.tiles[k]), tiles + ((size_t)k * n_blocks + b) * TILE_BYTES, TILE_BYTES, bar);
            const size_t at = (size_t)b * a.n_col + c0;
            for (u32 half = 0; half < 2; half++)
                bulk_copy(shared_address(stage.codes[half]), a.codes + (((size_t)b * 2 + half) * a.n_col + c0) * 128, n * 128, bar);
            bulk_copy(shared_address(stage.digits), a.digits + at * 32, n * 32, bar);
            bulk_copy(shared_address(stage.scales), a.scales + at, n * 4, bar);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    float sum[64] = {};
    u32 segment = 0;
    auto end_segment = [&]() {
#pragma unroll
        for (u32 i = 0; i < 64; i++) {
            float& total = m.totals[i][threadIdx.x];
            total = segment == 0 ? sum[i] : total + sum[i];
            sum[i] = 0.0f;
        }
        segment++;
    };
    for (u32 b = 0; b < n_blocks; b++) {
        while (b == (segment + 1) * n_blocks / SEGMENTS) end_segment();
        const WideStage& stage = m.stages[b % WIDE_STAGES];
        barrier_wait(shared_address(m.full + b % WIDE_STAGES), b / WIDE_STAGES & 1);
        const u8* tile = stage.tiles[warp];
        const Head h[2] = {Format::head(tile, g), Format::head(tile, g + 8)};
        u32 upper[8][4], lower[8][4];  // of a step of 32: row g, row g + 8, the next sixteen of both
        int acc[64];
        const u32 codes = shared_address(stage.codes);
        wgmma_fence(acc);
#pragma unroll
        for (u32 p = 0; p < 4; p++) {
            u32 u[4], v[4];
            Format::codes(tile, lane, p, u, v);
            if (Format::HIGH_IS_16_TIMES) u[2] >>= 4, u[3] >>= 4, v[2] >>= 4, v[3] >>= 4;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 step = 2 * p + i / 2, at = i % 2 * 2;
                const u32 word = Format::GROUP == 32 ? p / 2 : p, byte = Format::GROUP == 32 ? p % 2 * 2 + i / 2 : i;
                Format::digits(u[i], byte_of(h[0].scales[word], byte, false), upper[step][at], lower[step][at]);
                Format::digits(v[i], byte_of(h[1].scales[word], byte, false), upper[step][at + 1], lower[step][at + 1]);
            }
            if (p == 0) wgmma_fence(acc);  // the digits are there
            else asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (u32 step = 2 * p; step < 2 * p + 2; step++)
                wgmma<Format::IS_SIGNED>(acc, upper[step], operand_of(codes + step / 4 * WIDE_COLUMNS * 128 + step % 4 * 32), step > 0);
        }
        wgmma_wait(acc);
#pragma unroll
        for (u32 step = 0; step < 8; step++) stays(upper[step]);
#pragma unroll
        for (u32 i = 0; i < 64; i++) acc[i] *= 1 << Format::DIGIT_BITS;
        wgmma_fence(acc);
#pragma unroll
        for (u32 step = 0; step < 8; step++)
            wgmma<Format::IS_SIGNED>(acc, lower[step], operand_of(codes + step / 4 * WIDE_COLUMNS * 128 + step % 4 * 32), true);
        wgmma_wait(acc);
#pragma unroll
        for (u32 step = 0; step < 8; step++) stays(lower[step]);
        const u32 a0 = Format::minima(h[0], t), a1 = Format::minima(h[1], t);
        // Several tiles at a time, so that no product waits for the one before. Sums of minima are below 2^22: added to this
        // constant they are the lower bits of a float.
        constexpr u32 AT_ONCE = 4;
        constexpr int TO_FLOAT = Format::HAS_MINIMA ? 0x4b400000 : 0;
#pragma unroll
        for (u32 i0 = 0; i0 < 16; i0 += AT_ONCE) {
            int other[AT_ONCE][4];
            uint2 digits[AT_ONCE];
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++) digits[k] = *(const uint2*)(stage.digits[(i0 + k) * 8 + g] + t * 8);
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++) mma_k16(other[k], a0, a1, digits[k].y);
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) other[k][e] = other[k][e] * 64 + TO_FLOAT;
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++) mma_k16_add(other[k], a0, a1, digits[k].x);
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++) {
                const float2 dy = *(const float2*)(stage.scales + (i0 + k) * 8 + 2 * t);
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    const u32 at = 4 * (i0 + k) + e;
                    const Head& head = h[e / 2];
                    float y;
                    if (Format::HAS_MINIMA) y = fmaf(head.d, (float)acc[at], -(head.dmin * (from_bits(other[k][e]) - ROUNDING)));
                    else y = head.d * (float)(acc[at] - (int)Format::OFFSET * other[k][e]);
                    sum[at] = fmaf(e & 1 ? dy.y : dy.x, y, sum[at]);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(m.empty + b % WIDE_STAGES));
    }
    while (segment < SEGMENTS) end_segment();
#pragma unroll
    for (u32 i = 0; i < 64; i++) {
        const u32 r = index * 128 + warp * 16 + g + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
        float y = m.totals[i][threadIdx.x];
        if (epilogue.is_on) y = softcap_of(y, epilogue.scale, epilogue.cap, epilogue.has_cap);
        if (r < part.n_out && column < n) part.y[(size_t)(c0 + column) * part.n_out + r] = y;
    }
}
#endif
