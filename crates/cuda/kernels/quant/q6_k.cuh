// Q6_K: sixteen groups of 16 with signed scales, codes less 32.
//
// Tile, 3360 bytes: low four bits, for each unit of 64 elements 32 lanes x 16 bytes (row g, groups 0 and 1 in the two
// halves of a byte; row g + 8; row g, groups 2 and 3; row g + 8); upper two bits, for each pair of units 32 lanes x 16
// bytes (unit's row g, row g + 8, the next unit's), group 0 at bit 4, 1 at 6, 2 at 0, 3 at 2; 16 x 16 scales; 16 x d.
struct Format {
    static constexpr u32 BYTES = 210, GROUP = 16, OFFSET = 32;
    static constexpr bool HAS_MINIMA = false, IS_SIGNED = true, HIGH_IS_16_TIMES = false;
    static constexpr u32 DIGIT_BITS = 7;

    DEV u32 code(const u8* block, u32 k) {
        const u32 half = k / 128, run = k % 128 / 32, i = k % 32;
        const u32 low = block[half * 64 + run % 2 * 32 + i] >> run / 2 * 4 & 15;
        return low | (block[128 + half * 32 + i] >> run * 2 & 3) << 4;
    }
    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 p = 0; p < 4; p++)
            for (u32 i = 0; i < 16; i++) {
                const u32 lane = r % 8 * 4 + i / 4, row = r / 8 * 4 + i % 4;
                u32 c[4];
                for (u32 group = 0; group < 4; group++) c[group] = code(block, 64 * p + 16 * group + i);
                tile[p * 512 + lane * 16 + row] = (u8)(c[0] & 15 | c[1] << 4);
                tile[p * 512 + lane * 16 + 8 + row] = (u8)(c[2] & 15 | c[3] << 4);
                tile[2048 + p / 2 * 512 + lane * 16 + p % 2 * 8 + row] = (u8)(c[0] >> 4 << 4 | c[1] >> 4 << 6 | c[2] >> 4 | c[3] >> 4 << 2);
            }
        for (u32 i = 0; i < 16; i++) tile[3072 + r * 16 + i] = block[192 + i];
        for (u32 i = 0; i < 2; i++) tile[3328 + r * 2 + i] = block[208 + i];
    }
    // Codes up to 63 times the scale, in two digits of seven bits. The scale is taken 128 too large, to have no sign; the codes
    // come off the upper digit for it.
    DEV void digits(u32 codes, u32 scale, u32& upper, u32& lower) {
        const u32 even = (codes & 0x00ff00ffu) * (scale ^ 128), odd = (codes >> 8 & 0x00ff00ffu) * (scale ^ 128);
        upper = minus(even >> 7 & 0x00ff00ffu | odd << 1 & 0xff00ff00u, codes);
        lower = even & 0x007f007fu | odd << 8 & 0x7f007f00u;
    }
    DEV Head head(const u8* tile, u32 r) {
        const uint4 s = *(const uint4*)(tile + 3072 + r * 16);
        return {{s.x, s.y, s.z, s.w}, {}, half_to_float(*(const u16*)(tile + 3328 + r * 2)), 0.0f};
    }
    DEV u32 minima(const Head& h, u32 t) { return pick(t, h.scales[0], h.scales[1], h.scales[2], h.scales[3]); }
    DEV void unpack(u32 (&c)[4], u32 a, u32 b, u32 high) {
        const u32 low = 0x0f0f0f0fu, two = 0x30303030u;
        c[0] = a & low | high & two;
        c[1] = a >> 4 & low | high >> 2 & two;
        c[2] = b & low | high << 4 & two;
        c[3] = b >> 4 & low | high << 2 & two;
    }
    DEV void codes(const u8* tile, u32 lane, u32 p, u32 (&u)[4], u32 (&v)[4]) {
        const uint4 q = *(const uint4*)(tile + p * 512 + lane * 16);
        const uint2 high = *(const uint2*)(tile + 2048 + p / 2 * 512 + lane * 16 + p % 2 * 8);
        unpack(u, q.x, q.z, high.x);
        unpack(v, q.y, q.w, high.y);
    }
};
