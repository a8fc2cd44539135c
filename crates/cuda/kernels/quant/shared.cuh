// What the encodings share. A tile is 16 rows of a weight matrix and one block of each; lane l of a warp owns rows
// g = l / 4 and g + 8 and, of every 16 elements, 4t .. 4t + 3 with t = l % 4.
struct Head {
    u32 scales[4];  // a byte for each group
    u32 minima[4];
    float d, dmin;
};

// Place of byte `i` of a row's codes where lanes own 16 bytes: for every 32 bytes of a row, words of rows g and g + 8 at
// 4t, then of both at 16 + 4t.
DEV u32 lane_place(u32 r, u32 i) { return i / 32 * 512 + (r % 8 * 4 + i % 16 / 4) * 16 + i % 32 / 16 * 8 + r / 8 * 4 + i % 4; }
// The same where lanes own 8 bytes, for 16 bytes of a row.
DEV u32 half_place(u32 r, u32 i) { return (r % 8 * 4 + i / 4) * 8 + r / 8 * 4 + i % 4; }

// d, dmin, and the eight 6-bit scales and minima of Q4_K and Q5_K.
DEV Head head_of_6_bits(uint4 h) {
    const u32 six = 0x3f3f3f3fu, low = 0x0f0f0f0fu, two = 0x30303030u;
    return {{h.y & six, h.w & low | h.y >> 2 & two, 0, 0}, {h.z & six, h.w >> 4 & low | h.z >> 2 & two, 0, 0}, low_half(h.x), high_half(h.x)};
}
// Minima 2t and 2t + 1 of groups of 32, each twice: for the sums of 16.
DEV u32 twice(const u32 (&minima)[4], u32 t) { return __byte_perm(t < 2 ? minima[0] : minima[1], 0, t & 1 ? 0x3322 : 0x1100); }

// Each byte less a constant; bytes are below 128.
DEV u32 minus(u32 x, u32 all) { return ((x | 0x80808080u) - all) ^ 0x80808080u; }
DEV u32 minus_8(u32 x) { return minus(x, 0x08080808u); }
DEV u32 minus_16(u32 x) { return minus(x, 0x10101010u); }
DEV u32 minus_32(u32 x) { return minus(x, 0x20202020u); }
// Bits 0 to 3 as bit 4 of four bytes.
DEV u32 spread(u32 x) { return ((x & 15) * 0x00204081u & 0x01010101u) << 4; }

// The levels that the low halves of the four bytes name.
DEV u32 levels(u32 x) {
    // -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
    const u32 selector = (x & 7) | (x >> 4 & 0x70) | (x >> 8 & 0x700) | (x >> 12 & 0x7000);
    const u32 below = __byte_perm(0xbfad9881u, 0xf6eaddcfu, selector), above = __byte_perm(0x26190d01u, 0x71594535u, selector);
    const u32 is_above = (x >> 3 & 0x01010101u) * 0xff;
    return below & ~is_above | above & is_above;
}
