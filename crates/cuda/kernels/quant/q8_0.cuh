// Q8_0: signed bytes.
//
// Tile, 544 bytes: 32 lanes x 16 bytes (rows g and g + 8, elements 4t.. and 16 + 4t..), then 16 x d.
struct Format {
    static constexpr u32 BYTES = 34;
    static constexpr bool HAS_MIN = false;

    DEV void pack(u8* tile, const u8* block, u32 r) {
        for (u32 i = 0; i < 32; i++) tile[lane_place(r, i)] = block[2 + i];
        for (u32 i = 0; i < 2; i++) tile[512 + r * 2 + i] = block[i];
    }
    DEV float2 factors(const u8* tile, u32 r) { return make_float2(half_to_float(*(const u16*)(tile + 512 + r * 2)), 0.0f); }
    DEV void codes(const u8* tile, u32 lane, u32 (&c)[4]) {
        const uint4 q = *(const uint4*)(tile + lane * 16);
        c[0] = q.x, c[1] = q.y, c[2] = q.z, c[3] = q.w;
    }
};
