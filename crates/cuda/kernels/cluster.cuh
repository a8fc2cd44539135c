// Products for 9 to 32 columns: eight warps own 128 rows and a segment of K, and share the activations that a ninth brings
// with the weights; a cluster of four blocks of threads has the four segments.
//
// What a reader would get wrong: the sums of a segment are those of products.cuh, and each block of the cluster adds four
// of them in the same order, so who computes what changes no bit.
#if BLOCK_LEN == 256 && __CUDA_ARCH__ >= 900
constexpr u32 GROUP_TILES = 8, GROUP_THREADS = (GROUP_TILES + 1) * WARP;
template <u32 NT> struct GroupStage {
    u8 tiles[GROUP_TILES][TILE_BYTES];
    u8 codes[4][8 * NT][64];
    u8 digits[8 * NT][32];
    float scales[8 * NT];
};
template <u32 NT> struct __align__(128) GroupMemory {
    float sums[2][GROUP_TILES][8 * NT][16];  // by turns
    u64 full[GROUP_STAGES], empty[GROUP_STAGES], summed;
};

// `worker` is a cluster, of `n_workers`; its blocks are the segments.
template <u32 NT>
DEV void multiply_group(const Parts& parts, u32 n_parts, u32 n_groups, u32 worker, u32 n_workers, u32 n_blocks, const Activations& a,
                        const Epilogue& epilogue, u32 n_stages) {
    extern __shared__ __align__(128) u8 memory[];
    GroupMemory<NT>& m = *(GroupMemory<NT>*)memory;
    GroupStage<NT>* stages = (GroupStage<NT>*)(memory + (sizeof(GroupMemory<NT>) + 127) / 128 * 128);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4, segment = cluster_rank();
    const u32 n = a.n_col, b0 = segment * n_blocks / SEGMENTS, b1 = (segment + 1) * n_blocks / SEGMENTS;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < n_stages; i++) {
            barrier_init(shared_address(m.full + i), 1);
            barrier_init(shared_address(m.empty + i), GROUP_TILES);
        }
        barrier_init(shared_address(&m.summed), SEGMENTS * GROUP_TILES);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    cluster_arrive();
    __syncthreads();
    if (warp == GROUP_TILES) {
        // The weights of the first stages do not depend on the predecessor.
        u32 stage = 0, phase = 1, n_early = 0;
        bool has_waited = false;
        auto ask_activations = [&](GroupStage<NT>& to, u32 b, u32 bar) {
            for (u32 p = 0; p < 4; p++)
                bulk_copy(shared_address(to.codes[p]), a.codes + ((size_t)b * 4 + p) * n * 64, n * 64, bar);
            bulk_copy(shared_address(to.digits), a.digits + (size_t)b * n * 32, n * 32, bar);
            bulk_copy(shared_address(to.scales), a.scales + (size_t)b * n, n * 4, bar);
        };
        for (u32 group = worker; group < n_groups; group += n_workers) {
            u32 index;
            const Part part = part_of(parts, n_parts, group, index);
            const u32 n_tiles = min(GROUP_TILES, (part.n_out + 31) / 32 * 2 - index * GROUP_TILES);
            const u8* tiles = part.tiles + (size_t)index * GROUP_TILES * n_blocks * TILE_BYTES;
            for (u32 b = b0; b < b1; b++) {
                GroupStage<NT>& to = stages[stage];
                const u32 bar = shared_address(m.full + stage);
                if (!has_waited && n_early == n_stages) {
                    wait_for_predecessor();
                    has_waited = true;
                    for (u32 i = 0; i < n_early && lane == 0; i++)
                        ask_activations(stages[i], b0 + i % (b1 - b0), shared_address(m.full + i));
                }
                barrier_wait(shared_address(m.empty + stage), phase);
                if (lane == 0) {
                    barrier_expect(bar, n_tiles * TILE_BYTES + n * (256 + 32 + 4));
                    for (u32 k = 0; k < n_tiles; k++)
                        bulk_copy(shared_address(to.tiles[k]), tiles + ((size_t)k * n_blocks + b) * TILE_BYTES, TILE_BYTES, bar);
                    if (has_waited) ask_activations(to, b, bar);
                }
                if (!has_waited) n_early++;
                if (++stage == n_stages) stage = 0, phase ^= 1;
            }
        }
        if (!has_waited) {
            wait_for_predecessor();
            for (u32 i = 0; i < n_early && lane == 0; i++) ask_activations(stages[i], b0 + i % (b1 - b0), shared_address(m.full + i));
        }
        let_dependents_start();
        cluster_wait();
    } else {
        cluster_wait();
        u32 stage = 0, phase = 0, turn = 0;
        for (u32 group = worker; group < n_groups; group += n_workers) {
            u32 index;
            const Part part = part_of(parts, n_parts, group, index);
            float acc[1][NT][4] = {};
            for (u32 b = b0; b < b1; b++) {
                const GroupStage<NT>& from = stages[stage];
                barrier_wait(shared_address(m.full + stage), phase);
                Columns<NT> c;
                c.unit_stride = 8 * NT * 64;
#pragma unroll
                for (u32 i = 0; i < NT; i++) {
                    const u8* codes = from.codes[0][i * 8 + g] + t * 16;
                    if constexpr (Columns<NT>::IS_EARLY) {
#pragma unroll
                        for (u32 p = 0; p < 4; p++) c.x[p][i] = *(const uint4*)(codes + p * c.unit_stride);
                    } else {
                        c.codes[i] = codes;
                    }
                    c.digits[i] = *(const uint2*)(from.digits[i * 8 + g] + t * 8);
                    const float2 dy = *(const float2*)(from.scales + i * 8 + 2 * t);
                    c.dy[i][0] = dy.x, c.dy[i][1] = dy.y;
                }
                const u8* w[1] = {from.tiles[warp]};
                multiply_unit<NT, 1>(w, c, 1, lane, acc);
                __syncwarp();
                if (lane == 0) barrier_arrive(shared_address(m.empty + stage));
                if (++stage == n_stages) stage = 0, phase ^= 1;
            }
#pragma unroll
            for (u32 i = 0; i < NT; i++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) m.sums[turn & 1][warp][i * 8 + 2 * t + (e & 1)][g + e / 2 * 8] = acc[0][i][e];
            if (group + n_workers >= n_groups) let_dependents_start();
            __syncwarp();
            if (lane < SEGMENTS) arrive_in_cluster(shared_address(&m.summed), lane);
            wait_in_cluster(shared_address(&m.summed), turn & 1);
            // This block adds up a quarter of the group's tiles.
            constexpr u32 OWN_TILES = GROUP_TILES / SEGMENTS;
            for (u32 i = threadIdx.x; i < OWN_TILES * 16 * n; i += GROUP_TILES * WARP) {
                const u32 tile = segment * OWN_TILES + i / (16 * n), column = i / 16 % n, r = i % 16;
                const u32 at = shared_address(&m.sums[turn & 1][tile][column][r]);
                float y = read_in_cluster(at, 0);
#pragma unroll
                for (u32 s = 1; s < SEGMENTS; s++) y = y + read_in_cluster(at, s);
                if (epilogue.is_on) y = softcap_of(y, epilogue.scale, epilogue.cap, epilogue.has_cap);
                const u32 row = (index * GROUP_TILES + tile) * 16 + r;
                if (row < part.n_out) part.y[(size_t)column * part.n_out + row] = y;
            }
            turn++;
        }
    }
    cluster_arrive();  // the others have read this block's sums
    cluster_wait();
}
#endif
