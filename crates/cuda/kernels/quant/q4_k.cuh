// Q4_K: eight groups of 32 with 6-bit scales and minima.
//
// Tile, 2304 bytes: for each unit of 64 elements 32 lanes x 16 bytes (rows g and g + 8, elements 4t.. and 16 + 4t.. of
// each 32-byte run), then 16 heads of 16 bytes as in the file. What a reader would get wrong: the high codes are left
// in the upper half of their bytes, 16 times too large; the sum is shifted down, exactly.
struct Format {
    static constexpr u32 BYTES = 144, GROUP = 32, OFFSET = 0;
    static constexpr bool HAS_MINIMA = true, IS_SIGNED = false, HIGH_IS_16_TIMES = true;
    static constexpr u32 DIGIT_BITS = 3;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 128; i++) tile[lane_place(r, i)] = block[16 + i];
        for (u32 i = 0; i < 16; i++) tile[2048 + r * 16 + i] = block[i];
    }
    // Codes up to 15 times the upper and the lower three bits of the scale: bytes do not overflow.
    DEV void digits(u32 codes, u32 scale, u32& upper, u32& lower) { upper = codes * (scale >> 3), lower = codes * (scale & 7); }
    DEV Head head(const u8* tile, u32 r) { return head_of_6_bits(*(const uint4*)(tile + 2048 + r * 16)); }
    DEV u32 minima(const Head& h, u32 t) { return twice(h.minima, t); }
    DEV void codes(const u8* tile, u32 lane, u32 p, u32 (&u)[4], u32 (&v)[4]) {
        const uint4 q = *(const uint4*)(tile + p * 512 + lane * 16);
        const u32 low = 0x0f0f0f0fu;
        u[0] = q.x & low, v[0] = q.y & low, u[1] = q.z & low, v[1] = q.w & low;
        u[2] = q.x & ~low, v[2] = q.y & ~low, u[3] = q.z & ~low, v[3] = q.w & ~low;
    }
};
