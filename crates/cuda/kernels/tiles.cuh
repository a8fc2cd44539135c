// What products of all encodings share: matrices of a launch, tensor-core instructions, rings of bulk copies.
constexpr u32 SEGMENTS = 4;  // part of the numerics contract
constexpr u32 WARP = 32;
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
// Weights are read once a pass: they are the first to leave the second cache.
DEV u64 first_to_leave() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEV void bulk_copy_of_weights(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}
DEV void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(bar)
                 : "memory");
}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Keeps registers as they are up to here.
DEV void stays(const u32 (&x)[4]) { asm volatile("" ::"r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory"); }
// ---- asynchronous products: 64 rows by 128 columns by 32 ---------------------------------------------------------------
// The codes of a column lie in 128 bytes, pieces of 16 exchanged by the column's number; eight columns behind each other.
DEV u64 operand_of(u32 at) { return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }
// From here on products may read and write registers that were written before.
DEV void wgmma_fence(int (&d)[64]) {
#pragma unroll
    for (u32 i = 0; i < 64; i++) asm volatile("" : "+r"(d[i])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEV void wgmma_wait(int (&d)[64]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (u32 i = 0; i < 64; i++) asm volatile("" : "+r"(d[i])::"memory");
}
#define WGMMA(weights)                                                                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                              \
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32." weights ".s8 "                                              \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "  \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "  \
                 "{%64, %65, %66, %67}, %68, p;\n}"  \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
          "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), \
          "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), \
          "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]), \
          "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), \
          "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), \
          "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), \
          "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])  \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)adds))
// d = a * b, plus d if it adds; S: the weights are signed bytes.
template <bool S> DEV void wgmma(int (&d)[64], const u32 (&a)[4], u64 b, bool adds) {
    if (S) WGMMA("s8");
    else WGMMA("u8");
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
