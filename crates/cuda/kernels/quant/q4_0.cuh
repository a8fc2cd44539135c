// Q4_0: codes less 8.
//
// Tile, 288 bytes: 32 lanes x 8 bytes (rows g and g + 8, elements 4t.. low, 16 + 4t.. high), 16 x d.
struct Format {
    static constexpr u32 BYTES = 18;
    static constexpr bool HAS_MIN = false;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 16; i++) tile[half_place(r, i)] = block[2 + i];
        for (u32 i = 0; i < 2; i++) tile[256 + r * 2 + i] = block[i];
    }
    DEV float2 factors(const u8* tile, u32 r) { return make_float2(half_to_float(*(const u16*)(tile + 256 + r * 2)), 0.0f); }
    DEV void codes(const u8* tile, u32 lane, u32 (&c)[4]) {
        const uint2 q = *(const uint2*)(tile + lane * 8);
        const u32 low = 0x0f0f0f0fu;
        c[0] = minus_8(q.x & low), c[1] = minus_8(q.y & low);
        c[2] = minus_8(q.x >> 4 & low), c[3] = minus_8(q.y >> 4 & low);
    }
};
