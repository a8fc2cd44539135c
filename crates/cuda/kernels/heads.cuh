// Heads of queries, keys and values: their norm, their rotation, and where keys and values are stored.

// v = v * s, then times the weights, if there are any.
DEV void scale_group(float (&v)[16], float s, const float (&w)[16], bool has_weights) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        v[i] = v[i] * s;
        if (has_weights) v[i] = v[i] * w[i];
    }
}
// Weights do not depend on the predecessor: those of the first round are asked for before it is waited for.
DEV void load_weights(float (&w)[16], const float* weights, u32 g, u32 n) { load_group(w, weights, g, weights ? n : 0); }

// The dimensions of a head that turn, and the sines and cosines of the rows: [row][cosines, then sines].
struct Turn {
    const float* table;
    u32 n_pairs;
    u32 is_halves;
};
// Turns element `k` of a head; `head` are its elements before the turn.
DEV float turned(const Turn& turn, const float* head, u32 row, u32 k) {
    if (k >= 2 * turn.n_pairs) return head[k];
    const u32 j = turn.is_halves ? k % turn.n_pairs : k / 2;
    const u32 i0 = turn.is_halves ? j : 2 * j, i1 = turn.is_halves ? j + turn.n_pairs : 2 * j + 1;
    const float cos = turn.table[row * 2 * turn.n_pairs + j], sin = turn.table[row * 2 * turn.n_pairs + turn.n_pairs + j];
    const float a = head[i0], b = head[i1];
    return k == i0 ? a * cos - b * sin : a * sin + b * cos;
}

// The row of keys (half 0) or values (half 1) at position `pos` of the sequence of `row`; null for a padding row.
DEV u8* stored_row(const Place& place, const Row& row, u32 pos, u32 half, u32 is_half) {
    if (row.seq == NO_SEQUENCE) return 0;
    return page_of(place, row, pos) + row_in_page(place, pos, half) * (is_half ? 2 : 4);
}
DEV void store_element(u8* row, u32 is_half, u32 at, float x) {
    if (is_half) ((u16*)row)[at] = float_to_half(x);
    else ((float*)row)[at] = x;
}
