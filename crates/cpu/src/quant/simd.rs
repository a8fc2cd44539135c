//! The vector that products of quantized weights are written in, once for all
//! instruction sets: a lane is an output row.
//!
//! A lane holds a dword of its row: four codes, a scale, an integer sum, or an
//! f32. What a reader would get wrong: nothing ever adds across lanes, so the
//! number of lanes cannot change a bit.

/// The bytes of one block of some rows, equally far apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    start: *const u8,
    n_rows: usize,
    row_bytes: usize,
    block_bytes: usize,
    /// How far behind these bytes are those to ask for; 0: none.
    ahead_bytes: usize,
}

impl Rows {
    /// Blocks of `block_bytes` at `start` and every `row_bytes` after it, one for
    /// each lane of `S`.
    ///
    /// # Safety
    /// All of them lie inside memory that can be read for as long as the result is
    /// used. `row_bytes` is at most [`Rows::MAX_ROW_BYTES`].
    #[inline(always)]
    pub(crate) unsafe fn new<S: Simd>(
        start: *const u8,
        row_bytes: usize,
        block_bytes: usize,
    ) -> Rows {
        Rows {
            start,
            n_rows: S::LANES,
            row_bytes,
            block_bytes,
            ahead_bytes: 0,
        }
    }

    /// The same, on a walk that wants what lies `ahead_bytes` behind them soon.
    #[inline(always)]
    pub(crate) fn ahead(self, ahead_bytes: usize) -> Rows {
        Rows {
            ahead_bytes,
            ..self
        }
    }

    /// Longest row whose tile can be reached by 32-bit offsets.
    pub(crate) const MAX_ROW_BYTES: usize = (i32::MAX / 16) as usize;

    /// The blocks `n` after these.
    ///
    /// # Safety
    /// As for [`Rows::new`].
    #[inline(always)]
    pub(crate) unsafe fn skip(self, n: usize) -> Rows {
        Rows {
            start: self.start.wrapping_add(n * self.block_bytes),
            ..self
        }
    }

    /// Distance of two rows.
    #[inline(always)]
    pub(crate) fn row_bytes(self) -> usize {
        self.row_bytes
    }

    /// How far behind these bytes are those to ask for; 0: none.
    #[inline(always)]
    pub(crate) fn ahead_bytes(&self) -> usize {
        self.ahead_bytes
    }

    /// Where the blocks of the rows begin that are part `part` of `n_parts`.
    #[inline(always)]
    pub(crate) fn starts(&self, part: usize, n_parts: usize) -> impl Iterator<Item = *const u8> {
        let bound = |part: usize| part * self.n_rows / n_parts;
        (bound(part)..bound(part + 1)).map(|row| self.start.wrapping_add(row * self.row_bytes))
    }

    /// The `N` bytes from `at` on of row `row`'s block.
    #[inline(always)]
    pub(crate) fn part<const N: usize>(&self, row: usize, at: usize) -> &[u8; N] {
        assert!(
            row < self.n_rows && at + N <= self.block_bytes,
            "a part of a block"
        );
        let start = self.start.wrapping_add(row * self.row_bytes + at).cast();
        // SAFETY: it is a part of one of the blocks, which can be read (`new`).
        unsafe { &*start }
    }
}

/// The dword at `at` of the first `N` rows, by loads and inserts: a gather is microcode
/// on many processors, and took a fifth of the time of Q4_1's products on a Zen 3.
#[inline(always)]
pub(super) fn dwords_of_rows<const N: usize>(rows: &Rows, at: usize) -> [i32; N] {
    let mut dwords = [0; N];
    for (row, dword) in dwords.iter_mut().enumerate() {
        *dword = i32::from_le_bytes(*rows.part(row, at));
    }
    dwords
}

/// Vector operations; a value of the type proves that the machine has the
/// instructions. Integer operations wrap.
pub(crate) trait Simd: Copy {
    /// Number of lanes, at most 16.
    const LANES: usize;
    /// Columns that the registers hold at once.
    const COLUMNS: usize;
    /// What is added to eight-bit signed codes to store them: products want
    /// unsigned ones, or not.
    const CODE_BIAS: i32;
    /// A dword per lane.
    type I: Copy;
    /// An f32 per lane.
    type F: Copy;

    fn splat(self, x: i32) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl(self, a: Self::I, bits: u32) -> Self::I;
    /// Zeros enter.
    fn shr(self, a: Self::I, bits: u32) -> Self::I;
    /// The sign enters.
    fn sar(self, a: Self::I, bits: u32) -> Self::I;
    /// Bit by bit `mask ? a : b`.
    fn select(self, mask: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Byte by byte `table[code]`; codes are below 16.
    fn lookup(self, codes: Self::I, table: &[i8; 16]) -> Self::I;
    /// Bits 0 to 3 of a lane onto bit 4 of its bytes; higher bits are ignored.
    fn spread(self, bits: Self::I) -> Self::I;

    /// The dword at `at` of each row.
    fn dword(self, rows: &Rows, at: usize) -> Self::I;
    /// The 4 dwords from `at` on of each row.
    fn dwords4(self, rows: &Rows, at: usize) -> [Self::I; 4];
    /// The 8 dwords from `at` on of each row.
    fn dwords8(self, rows: &Rows, at: usize) -> [Self::I; 8];

    /// A scale in the form that [`Simd::add_scaled`] wants for codes up to
    /// `max_code`: `scale` is an i16 in an i32.
    fn scale(self, scale: Self::I, max_code: i32) -> Self::I;
    /// `sums[c] += sum_k scale * codes[k] * x[c][k]`, four products a dword, for a
    /// run of 32 elements. `scales` are for its halves; `kind` is the length that
    /// shares a scale, 16 or 32, and the largest code: 15, 31 or 63, or 255 for
    /// eight-bit ones with [`Simd::CODE_BIAS`].
    fn add_scaled<const C: usize>(
        self,
        sums: &mut [Self::I; C],
        codes: &[Self::I; 8],
        x: &[&[i32; 8]; C],
        scales: [Self::I; 2],
        kind: (usize, i32),
    );
    /// `sum_k codes[k] * x[c][k]`, otherwise as above.
    fn dots<const C: usize>(
        self,
        codes: &[Self::I; 8],
        x: &[&[i32; 8]; C],
        max_code: i32,
    ) -> [Self::I; C];
    /// `sum + low * low of x + high * high of x`, halves of dwords as i16.
    fn add_pairs(self, sum: Self::I, pairs: Self::I, x: i32) -> Self::I;

    fn splat_f32(self, x: f32) -> Self::F;
    /// Nearest, ties to even.
    fn float(self, a: Self::I) -> Self::F;
    /// The f16 in the lower half of each lane, exactly.
    fn f16(self, bits: Self::I) -> Self::F;
    fn add_f32(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul_f32(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b - c`, rounded once.
    fn fms(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The first lanes of a line of 16.
    fn load(self, from: &[f32; 16]) -> Self::F;
    fn store(self, a: Self::F, to: &mut [f32; 16]);
}

/// Plain Rust, a row at a time: the compiler vectorizes along the row.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Simd for Scalar {
    const LANES: usize = 1;
    const COLUMNS: usize = 1;
    const CODE_BIAS: i32 = 0;
    type I = i32;
    type F = f32;

    #[inline(always)]
    fn splat(self, x: i32) -> i32 {
        x
    }

    #[inline(always)]
    fn and(self, a: i32, b: i32) -> i32 {
        a & b
    }

    #[inline(always)]
    fn or(self, a: i32, b: i32) -> i32 {
        a | b
    }

    #[inline(always)]
    fn xor(self, a: i32, b: i32) -> i32 {
        a ^ b
    }

    #[inline(always)]
    fn add(self, a: i32, b: i32) -> i32 {
        a.wrapping_add(b)
    }

    #[inline(always)]
    fn sub(self, a: i32, b: i32) -> i32 {
        a.wrapping_sub(b)
    }

    #[inline(always)]
    fn shl(self, a: i32, bits: u32) -> i32 {
        a << bits
    }

    #[inline(always)]
    fn shr(self, a: i32, bits: u32) -> i32 {
        (a as u32 >> bits) as i32
    }

    #[inline(always)]
    fn sar(self, a: i32, bits: u32) -> i32 {
        a >> bits
    }

    #[inline(always)]
    fn select(self, mask: i32, a: i32, b: i32) -> i32 {
        a & mask | b & !mask
    }

    #[inline(always)]
    fn lookup(self, codes: i32, table: &[i8; 16]) -> i32 {
        i32::from_le_bytes(codes.to_le_bytes().map(|c| table[(c & 15) as usize] as u8))
    }

    #[inline(always)]
    fn spread(self, bits: i32) -> i32 {
        // Four shifted copies that do not meet: bit j of the first arrives at 8j + 4.
        (bits & 15).wrapping_mul(0x0204_0810) & 0x1010_1010
    }

    #[inline(always)]
    fn dword(self, rows: &Rows, at: usize) -> i32 {
        i32::from_le_bytes(*rows.part(0, at))
    }

    #[inline(always)]
    fn dwords4(self, rows: &Rows, at: usize) -> [i32; 4] {
        words(rows.part::<16>(0, at))
    }

    #[inline(always)]
    fn dwords8(self, rows: &Rows, at: usize) -> [i32; 8] {
        words(rows.part::<32>(0, at))
    }

    #[inline(always)]
    fn scale(self, scale: i32, _max_code: i32) -> i32 {
        scale
    }

    #[inline(always)]
    fn add_scaled<const C: usize>(
        self,
        sums: &mut [i32; C],
        codes: &[i32; 8],
        x: &[&[i32; 8]; C],
        scales: [i32; 2],
        _: (usize, i32),
    ) {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += scales[0] * products(&codes[..4], &x[..4]);
            *sum += scales[1] * products(&codes[4..], &x[4..]);
        }
    }

    #[inline(always)]
    fn dots<const C: usize>(self, codes: &[i32; 8], x: &[&[i32; 8]; C], _: i32) -> [i32; C] {
        let mut dots = [0; C];
        for (dot, &x) in dots.iter_mut().zip(x) {
            *dot = products(codes, x);
        }
        dots
    }

    #[inline(always)]
    fn add_pairs(self, sum: i32, pairs: i32, x: i32) -> i32 {
        sum + pairs as i16 as i32 * x as i16 as i32 + (pairs >> 16) * (x >> 16)
    }

    #[inline(always)]
    fn splat_f32(self, x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn float(self, a: i32) -> f32 {
        a as f32
    }

    #[inline(always)]
    fn f16(self, bits: i32) -> f32 {
        gguf::quant::plain::f16_to_f32(bits as u16)
    }

    #[inline(always)]
    fn add_f32(self, a: f32, b: f32) -> f32 {
        a + b
    }

    #[inline(always)]
    fn mul_f32(self, a: f32, b: f32) -> f32 {
        a * b
    }

    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn fms(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, -c)
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> f32 {
        from[0]
    }

    #[inline(always)]
    fn store(self, a: f32, to: &mut [f32; 16]) {
        to[0] = a;
    }
}

/// The words of some bytes.
#[inline(always)]
fn words<const N: usize>(bytes: &[u8]) -> [i32; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(*bytes);
    }
    words
}

/// `sum_k codes[k] * x[k]`, four signed products a word.
#[inline(always)]
fn products(codes: &[i32], x: &[i32]) -> i32 {
    let mut sum = 0;
    for (codes, x) in codes.as_chunks().0.iter().zip(x.as_chunks().0) {
        let (codes, x) = (bytes(codes), bytes(x));
        for i in 0..16 {
            sum += (codes[i] as i16 * x[i] as i16) as i32;
        }
    }
    sum
}

/// The bytes of words, in the machine's own order: for products of bytes at equal
/// places. Taken from the words by shifts, compilers do not vectorize them.
#[inline(always)]
fn bytes(words: &[i32; 4]) -> [i8; 16] {
    // SAFETY: as many bytes, and any bits are an i8.
    unsafe { std::mem::transmute(*words) }
}
