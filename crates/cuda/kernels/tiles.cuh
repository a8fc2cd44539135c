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
