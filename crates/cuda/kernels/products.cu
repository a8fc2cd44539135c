// Kernels of one encoding: products (products.cuh), tiles from the file's blocks, rows of an embedding.

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
        multiply<NT, MT>(parts, n_parts, n_tiles, blockIdx.y, gridDim.y, n_blocks, a, epilogue, is_late);                   \
    }
MULTIPLY(multiply_8, 1, 1, 6)
MULTIPLY(multiply_16, 2, 1, 4)
MULTIPLY(multiply_16_wide, 2, 2, 3)
MULTIPLY(multiply_32, 4, 2, 2)
#if defined(HAS_DIGITS) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Grid: groups of columns, groups of rows.
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1)
    multiply_wide(Parts parts, u32 n_parts, u32, u32 n_blocks, Activations a, Epilogue epilogue, u32) {
    multiply_128(parts, n_parts, blockIdx.y, n_blocks, a, epilogue);
}
#endif

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
