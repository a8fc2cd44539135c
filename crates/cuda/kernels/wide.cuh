// Products for many columns on the tensor cores' asynchronous path (wgmma): a block of threads owns 128 rows and 128
// columns and walks all blocks of K; a third group of four warps keeps the stages filled and leaves the two that multiply its
// registers.
//
// Codes are multiplied by their group's scale while they are unpacked, in two digits of eight bits; so the unit sums whole
// blocks of 256, and the sum of the digits' sums is the integer I_b of docs/numerics.md. Weights come from registers:
// a lane's part of a tile is its part of the operand. What a reader would get wrong: registers that a product reads may
// not change before it is waited for; sums of the segments so far lie where the result goes, for shared memory is full.
#if defined(HAS_DIGITS) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr u32 WIDE_TILES = 8, WIDE_COLUMNS = 128, WIDE_STAGES = 3, WIDE_WARPS = 8, WIDE_THREADS = (WIDE_WARPS + 4) * WARP;
struct __align__(1024) WideStage {
    u8 codes[2][WIDE_COLUMNS][128];
    u8 tiles[WIDE_TILES][TILE_BYTES];
    u8 digits[WIDE_COLUMNS][32];
    float scales[WIDE_COLUMNS];
};
struct WideMemory {
    WideStage stages[WIDE_STAGES];
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
    const u32 first_row = index * 128 + warp * 16 + g;
    auto is_inside = [&](u32 i) { return first_row + i % 4 / 2 * 8 < part.n_out && i / 4 * 8 + 2 * t + i % 2 < n; };
    auto total_at = [&](u32 i) -> float& { return part.y[(size_t)(c0 + i / 4 * 8 + 2 * t + i % 2) * part.n_out + first_row + i % 4 / 2 * 8]; };
    auto add_totals = [&]() {
        if (segment == 0) return;
        float total[64];
#pragma unroll
        for (u32 i = 0; i < 64; i++) total[i] = is_inside(i) ? total_at(i) : 0.0f;
#pragma unroll
        for (u32 i = 0; i < 64; i++) sum[i] = total[i] + sum[i];
    };
    auto end_segment = [&]() {
        add_totals();
#pragma unroll
        for (u32 i = 0; i < 64; i++) {
            if (is_inside(i)) total_at(i) = sum[i];
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
        }
        int acc[64];
        const u32 codes = shared_address(stage.codes);
        wgmma_fence(acc);
#pragma unroll
        for (u32 step = 0; step < 8; step++)
            wgmma<Format::IS_SIGNED>(acc, upper[step], operand_of(codes + step / 4 * WIDE_COLUMNS * 128 + step % 4 * 32), step > 0);
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
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            const uint2 digits = *(const uint2*)(stage.digits[i * 8 + g] + t * 8);
            const float2 dy = *(const float2*)(stage.scales + i * 8 + 2 * t);
            int other[4];
            mma_k16(other, a0, a1, digits.y);
#pragma unroll
            for (u32 e = 0; e < 4; e++) other[e] *= 64;
            mma_k16_add(other, a0, a1, digits.x);
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const Head& head = h[e / 2];
                const int exact = acc[4 * i + e] - (int)Format::OFFSET * (Format::HAS_MINIMA ? 0 : other[e]);
                const float y = Format::HAS_MINIMA ? fmaf(head.d, (float)exact, -(head.dmin * (float)other[e])) : head.d * (float)exact;
                sum[4 * i + e] = fmaf(e & 1 ? dy.y : dy.x, y, sum[4 * i + e]);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(m.empty + b % WIDE_STAGES));
    }
    while (segment < SEGMENTS - 1) end_segment();
    add_totals();
#pragma unroll
    for (u32 i = 0; i < 64; i++)
        if (is_inside(i)) total_at(i) = epilogue.is_on ? softcap_of(sum[i], epilogue.scale, epilogue.cap, epilogue.has_cap) : sum[i];
}
#endif
