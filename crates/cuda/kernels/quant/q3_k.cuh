// Q3_K: sixteen groups of 16 with 6-bit scales less 32, codes less 4.
//
// Tile, 1760 bytes: low two bits as in Q2_K, then the third bits, 32 lanes x 16 bytes, 16 x 12 bytes of scales, 16 x d.
struct Format {
    static constexpr u32 BYTES = 110, GROUP = 16, OFFSET = 4;
    static constexpr bool HAS_MINIMA = false, IS_SIGNED = true, HIGH_IS_16_TIMES = false;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 64; i++) tile[lane_place(r, i)] = block[32 + i];
        for (u32 i = 0; i < 32; i++) tile[1024 + lane_place(r, i)] = block[i];
        for (u32 i = 0; i < 12; i++) tile[1536 + r * 12 + i] = block[96 + i];
        for (u32 i = 0; i < 2; i++) tile[1728 + r * 2 + i] = block[108 + i];
    }
    DEV Head head(const u8* tile, u32 r) {
        const u32* s = (const u32*)(tile + 1536 + r * 12);
        const u32 low = 0x0f0f0f0fu, two = 0x30303030u, a = s[0], b = s[1], high = s[2];
        return {{minus_32(a & low | high << 4 & two), minus_32(b & low | high << 2 & two), minus_32(a >> 4 & low | high & two),
                 minus_32(b >> 4 & low | high >> 2 & two)},
                {}, half_to_float(*(const u16*)(tile + 1728 + r * 2)), 0.0f};
    }
    DEV u32 minima(const Head& h, u32 t) { return pick(t, h.scales[0], h.scales[1], h.scales[2], h.scales[3]); }
    DEV u32 third(u32 bits, u32 s) { return (bits >> s & 0x01010101u) << 2; }
    DEV void codes(const u8* tile, u32 lane, u32 p, u32 (&u)[4], u32 (&v)[4]) {
        const uint4 q = *(const uint4*)(tile + p / 2 * 512 + lane * 16), h = *(const uint4*)(tile + 1024 + lane * 16);
        const u32 two = 0x03030303u, s = p % 2 * 4, b = 2 * p;
        u[0] = q.x >> s & two | third(h.x, b), v[0] = q.y >> s & two | third(h.y, b);
        u[1] = q.z >> s & two | third(h.z, b), v[1] = q.w >> s & two | third(h.w, b);
        u[2] = q.x >> s + 2 & two | third(h.x, b + 1), v[2] = q.y >> s + 2 & two | third(h.y, b + 1);
        u[3] = q.z >> s + 2 & two | third(h.z, b + 1), v[3] = q.w >> s + 2 & two | third(h.w, b + 1);
    }
};
