// Q5_K: Q4_K with a fifth bit.
//
// Tile, 2816 bytes: low codes as in Q4_K, 16 heads, then the fifth bits, 32 lanes x 16 bytes.
struct Format {
    static constexpr u32 BYTES = 176, GROUP = 32, OFFSET = 0;
    static constexpr bool HAS_MINIMA = true, IS_SIGNED = false, HIGH_IS_16_TIMES = false;
    static constexpr u32 DIGIT_BITS = 3;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 128; i++) tile[lane_place(r, i)] = block[48 + i];
        for (u32 i = 0; i < 16; i++) tile[2048 + r * 16 + i] = block[i];
        for (u32 i = 0; i < 32; i++) tile[2304 + lane_place(r, i)] = block[16 + i];
    }
    // Codes up to 31 times the upper and the lower three bits of the scale: bytes do not overflow.
    DEV void digits(u32 codes, u32 scale, u32& upper, u32& lower) { upper = codes * (scale >> 3), lower = codes * (scale & 7); }
    DEV Head head(const u8* tile, u32 r) { return head_of_6_bits(*(const uint4*)(tile + 2048 + r * 16)); }
    DEV u32 minima(const Head& h, u32 t) { return twice(h.minima, t); }
    DEV u32 fifth(u32 bits, u32 s) { return (bits >> s & 0x01010101u) << 4; }
    DEV void codes(const u8* tile, u32 lane, u32 p, u32 (&u)[4], u32 (&v)[4]) {
        const uint4 q = *(const uint4*)(tile + p * 512 + lane * 16), h = *(const uint4*)(tile + 2304 + lane * 16);
        const u32 low = 0x0f0f0f0fu, s = 2 * p;
        u[0] = q.x & low | fifth(h.x, s), v[0] = q.y & low | fifth(h.y, s);
        u[1] = q.z & low | fifth(h.z, s), v[1] = q.w & low | fifth(h.w, s);
        u[2] = q.x >> 4 & low | fifth(h.x, s + 1), v[2] = q.y >> 4 & low | fifth(h.y, s + 1);
        u[3] = q.z >> 4 & low | fifth(h.z, s + 1), v[3] = q.w >> 4 & low | fifth(h.w, s + 1);
    }
};
