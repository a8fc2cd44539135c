// IQ4_XS: eight groups of 32 with 6-bit scales less 32; codes name levels.
//
// Tile, 2176 bytes: for each unit of 64 elements 32 lanes x 16 bytes, then 16 heads of 8 bytes as in the file.
struct Format {
    static constexpr u32 BYTES = 136, GROUP = 32, OFFSET = 0;
    static constexpr bool HAS_MINIMA = false, IS_SIGNED = true, HIGH_IS_16_TIMES = false;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 128; i++) tile[lane_place(r, i)] = block[8 + i];
        for (u32 i = 0; i < 8; i++) tile[2048 + r * 8 + i] = block[i];
    }
    DEV Head head(const u8* tile, u32 r) {
        const uint2 h = *(const uint2*)(tile + 2048 + r * 8);
        u32 scales[2] = {0, 0};
#pragma unroll
        for (u32 s = 0; s < 8; s++) scales[s / 4] |= ((h.y >> 4 * s & 15) | (h.x >> 16 + 2 * s & 3) << 4) << s % 4 * 8;
        return {{minus_32(scales[0]), minus_32(scales[1]), 0, 0}, {}, low_half(h.x), 0.0f};
    }
    DEV u32 minima(const Head&, u32) { return 0; }
    DEV void codes(const u8* tile, u32 lane, u32 p, u32 (&u)[4], u32 (&v)[4]) {
        const uint4 q = *(const uint4*)(tile + p * 512 + lane * 16);
        u[0] = levels(q.x), v[0] = levels(q.y), u[1] = levels(q.x >> 4), v[1] = levels(q.y >> 4);
        u[2] = levels(q.z), v[2] = levels(q.w), u[3] = levels(q.z >> 4), v[3] = levels(q.w >> 4);
    }
};
