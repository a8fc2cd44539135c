// IQ4_NL: codes name levels.
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
        c[0] = levels(q.x), c[1] = levels(q.y);
        c[2] = levels(q.x >> 4), c[3] = levels(q.y >> 4);
    }
};
