//! Types without blocks: little-endian floats and integers, element by element.
//!
//! Integers and F64 are rounded to the nearest f32. What a reader would get
//! wrong: `half` asks the processor for F16C at every single conversion, so the
//! decoders here use integer arithmetic that the compiler vectorizes.

/// An f16, given as its bits, exactly.
///
/// Without branches and without subnormal f32 operands (slow on many
/// processors): a subnormal f16 `m * 2^-24` is `(1 + m/1024) * 2^-14 - 2^-14`.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    const SMALLEST_NORMAL: u32 = REBIAS + (1 << 23);
    let sign = (bits as u32 & 0x8000) << 16;
    let magnitude = (bits as u32 & 0x7fff) << 13;
    let exponent = magnitude & (31 << 23);
    let subnormal = f32::from_bits(magnitude + SMALLEST_NORMAL) - f32::from_bits(SMALLEST_NORMAL);
    let finite = if exponent == 0 {
        subnormal.to_bits()
    } else {
        magnitude + REBIAS
    };
    let rebias_again = if exponent == 31 << 23 { REBIAS } else { 0 };
    f32::from_bits((finite + rebias_again) | sign)
}

macro_rules! decode {
    ($(#[$doc:meta] $name:ident, $element:ty, $bytes:literal, $convert:expr;)*) => {$(
        #[$doc]
        ///
        /// # Panics
        /// If the bytes are not exactly as many as `out` needs.
        pub fn $name(bytes: &[u8], out: &mut [f32]) {
            let (elements, left) = bytes.as_chunks::<$bytes>();
            assert!(
                elements.len() == out.len() && left.is_empty(),
                "{} bytes are not {} elements",
                bytes.len(),
                out.len()
            );
            for (y, x) in out.iter_mut().zip(elements) {
                let x = <$element>::from_le_bytes(*x);
                *y = $convert(x);
            }
        }
    )*};
}

decode! {
    /// F32: 4 bytes an element.
    decode_f32, f32, 4, |x| x;
    /// F16: 2 bytes an element, IEEE 754 binary16.
    decode_f16, u16, 2, f16_to_f32;
    /// BF16: the upper half of an f32.
    decode_bf16, u16, 2, |x| f32::from_bits((x as u32) << 16);
    /// F64: 8 bytes an element.
    decode_f64, f64, 8, |x| x as f32;
    /// I8: a signed byte an element.
    decode_i8, i8, 1, |x| x as f32;
    /// I16: 2 bytes an element, two's complement.
    decode_i16, i16, 2, |x| x as f32;
    /// I32: 4 bytes an element, two's complement.
    decode_i32, i32, 4, |x| x as f32;
    /// I64: 8 bytes an element, two's complement.
    decode_i64, i64, 8, |x| x as f32;
}

/// The element as it is.
pub(super) fn encode_f32(x: &[f32], out: &mut [u8]) -> Result<(), usize> {
    for (y, x) in out.as_chunks_mut().0.iter_mut().zip(x) {
        *y = x.to_le_bytes();
    }
    Ok(())
}

/// Nearest f16, ties to even.
pub(super) fn encode_f16(x: &[f32], out: &mut [u8]) -> Result<(), usize> {
    for (i, (y, x)) in out.as_chunks_mut().0.iter_mut().zip(x).enumerate() {
        let rounded = half::f16::from_f32(*x);
        if rounded.is_infinite() {
            return Err(i);
        }
        *y = rounded.to_le_bytes();
    }
    Ok(())
}

/// Nearest BF16, ties to even.
pub(super) fn encode_bf16(x: &[f32], out: &mut [u8]) -> Result<(), usize> {
    for (i, (y, x)) in out.as_chunks_mut().0.iter_mut().zip(x).enumerate() {
        let rounded = half::bf16::from_f32(*x);
        if rounded.is_infinite() {
            return Err(i);
        }
        *y = rounded.to_le_bytes();
    }
    Ok(())
}
