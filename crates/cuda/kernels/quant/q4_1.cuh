// Q4_1: codes and a minimum.
//
// Tile, 320 bytes: 32 lanes x 8 bytes (rows g and g + 8, elements 4t.. low, 16 + 4t.. high), 16 x (d, m).
struct Format {
    static constexpr u32 BYTES = 20;
    static constexpr bool HAS_MIN = true;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 16; i++) tile[half_place(r, i)] = block[4 + i];
        for (u32 i = 0; i < 4; i++) tile[256 + r * 4 + i] = block[i];
    }
    DEV float2 factors(const u8* tile, u32 r) {
        const u32 f = *(const u32*)(tile + 256 + r * 4);
        return make_float2(low_half(f), high_half(f));
    }
    DEV void codes(const u8* tile, u32 lane, u32 (&c)[4]) {
        const uint2 q = *(const uint2*)(tile + lane * 8);
        const u32 low = 0x0f0f0f0fu;
        c[0] = q.x & low, c[1] = q.y & low;
        c[2] = q.x >> 4 & low, c[3] = q.y >> 4 & low;
    }
};
