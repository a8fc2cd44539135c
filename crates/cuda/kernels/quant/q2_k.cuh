// Q2_K: sixteen groups of 16 with 4-bit scales and minima.
//
// Tile, 1344 bytes: for each half of 128 elements 32 lanes x 16 bytes, 16 x 16 bytes of scales (low halves) and minima
// (high), 16 x (d, dmin).
struct Format {
    static constexpr u32 BYTES = 84, GROUP = 16, OFFSET = 0;
    static constexpr bool HAS_MINIMA = true, IS_SIGNED = false, HIGH_IS_16_TIMES = false;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 64; i++) tile[lane_place(r, i)] = block[16 + i];
        for (u32 i = 0; i < 16; i++) tile[1024 + r * 16 + i] = block[i];
        for (u32 i = 0; i < 4; i++) tile[1280 + r * 4 + i] = block[80 + i];
    }
    DEV Head head(const u8* tile, u32 r) {
        const uint4 s = *(const uint4*)(tile + 1024 + r * 16);
        const u32 d = *(const u32*)(tile + 1280 + r * 4), low = 0x0f0f0f0fu;
        return {{s.x & low, s.y & low, s.z & low, s.w & low},
                {s.x >> 4 & low, s.y >> 4 & low, s.z >> 4 & low, s.w >> 4 & low}, low_half(d), high_half(d)};
    }
    DEV u32 minima(const Head& h, u32 t) { return pick(t, h.minima[0], h.minima[1], h.minima[2], h.minima[3]); }
    DEV void codes(const u8* tile, u32 lane, u32 p, u32 (&u)[4], u32 (&v)[4]) {
        const uint4 q = *(const uint4*)(tile + p / 2 * 512 + lane * 16);
        const u32 two = 0x03030303u, s = p % 2 * 4;
        u[0] = q.x >> s & two, v[0] = q.y >> s & two, u[1] = q.z >> s & two, v[1] = q.w >> s & two;
        u[2] = q.x >> s + 2 & two, v[2] = q.y >> s + 2 & two, u[3] = q.z >> s + 2 & two, v[3] = q.w >> s + 2 & two;
    }
};
