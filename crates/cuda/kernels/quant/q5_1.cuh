// Q5_1: 5-bit codes and a minimum.
//
// Tile, 384 bytes: 32 lanes x 8 bytes (rows g and g + 8, elements 4t.. low, 16 + 4t.. high), 16 x 4 bytes of fifth bits, 16 x (d, m).
struct Format {
    static constexpr u32 BYTES = 24;
    static constexpr bool HAS_MIN = true;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 16; i++) tile[half_place(r, i)] = block[8 + i];
        for (u32 i = 0; i < 4; i++) tile[256 + r * 4 + i] = block[4 + i];
        for (u32 i = 0; i < 4; i++) tile[320 + r * 4 + i] = block[i];
    }
    DEV float2 factors(const u8* tile, u32 r) {
        const u32 f = *(const u32*)(tile + 320 + r * 4);
        return make_float2(low_half(f), high_half(f));
    }
    DEV void codes(const u8* tile, u32 lane, u32 (&c)[4]) {
        const uint2 q = *(const uint2*)(tile + lane * 8);
        const u32 low = 0x0f0f0f0fu, g = lane / 4, t = lane % 4;
        const u32 first = *(const u32*)(tile + 256 + g * 4) >> 4 * t, second = *(const u32*)(tile + 288 + g * 4) >> 4 * t;
        c[0] = q.x & low | spread(first), c[1] = q.y & low | spread(second);
        c[2] = q.x >> 4 & low | spread(first >> 16), c[3] = q.y >> 4 & low | spread(second >> 16);
    }
};
