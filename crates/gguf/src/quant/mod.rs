//! Block encodings: what the bytes of a block mean, and how to make them.
//!
//! One file per encoding holds its block layout, its decoder and, where Muser
//! writes it, its encoder. The order of f32 operations in a decoder is part of
//! its meaning: a decoded value is the same bits as the PyPI package `gguf`
//! gives (`quants.py`, the source of the layouts).
//!
//! What a reader would get wrong: elements of a block rarely lie in the order
//! of its bytes; a byte's low and high code are usually 16 or 32 elements
//! apart.

pub mod codebook;
mod fit;
pub mod iq1_m;
pub mod iq1_s;
pub mod iq2_s;
pub mod iq2_xs;
pub mod iq2_xxs;
pub mod iq3_s;
pub mod iq3_xxs;
pub mod iq4_nl;
pub mod iq4_xs;
pub mod mxfp4;
pub mod nvfp4;
pub mod plain;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;
pub mod tq1_0;
pub mod tq2_0;

use crate::TensorType;

/// Why a row could not be decoded or encoded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The row is no whole number of blocks.
    #[error("{ty}: a row of {found} elements is no multiple of the block of {block} elements")]
    RowLength {
        /// The encoding.
        ty: TensorType,
        /// Elements of the row.
        found: usize,
        /// Elements of a block.
        block: usize,
    },
    /// The row's bytes are not as many as its elements need.
    #[error("{ty}: found {found} bytes for a row of {elements} elements, expected {expected}")]
    ByteLength {
        /// The encoding.
        ty: TensorType,
        /// Elements of the row.
        elements: usize,
        /// Bytes given.
        found: usize,
        /// Bytes that the elements take.
        expected: usize,
    },
    /// An element to encode is infinite or not a number.
    #[error("{ty}: element {index} is {value}, expected a finite number")]
    NotFinite {
        /// The encoding.
        ty: TensorType,
        /// Position in the row.
        index: usize,
        /// The element.
        value: f32,
    },
    /// A finite element lies outside of what the encoding can hold.
    #[error("{ty}: element {index} is {value}, too large for the encoding")]
    TooLarge {
        /// The encoding.
        ty: TensorType,
        /// Position in the row (of the largest element, for a block).
        index: usize,
        /// The element.
        value: f32,
    },
    /// Muser reads the encoding but does not write it.
    #[error("{ty}: Muser decodes this type but has no encoder for it")]
    NoEncoder {
        /// The encoding.
        ty: TensorType,
    },
}

/// Decodes a whole number of blocks; see [`decoder`].
pub type Decoder = fn(&[u8], &mut [f32]);

/// Decodes one row of `out.len()` elements from its `bytes`.
///
/// Any bytes are legal: scales that are not finite give elements that are not
/// finite. Errors: [`Error::RowLength`], [`Error::ByteLength`].
pub fn decode_row(ty: TensorType, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let expected = row_bytes(ty, out.len())?;
    if bytes.len() != expected {
        return Err(Error::ByteLength {
            ty,
            elements: out.len(),
            found: bytes.len(),
            expected,
        });
    }
    decoder(ty)(bytes, out);
    Ok(())
}

/// Appends the encoded row `x` to `out`; on an error `out` is unchanged.
///
/// Errors: [`Error::RowLength`], [`Error::NotFinite`], [`Error::TooLarge`],
/// [`Error::NoEncoder`] (see [`can_encode`]).
pub fn encode_row(ty: TensorType, x: &[f32], out: &mut Vec<u8>) -> Result<(), Error> {
    let bytes = row_bytes(ty, x.len())?;
    let Some(encode) = encoder(ty) else {
        return Err(Error::NoEncoder { ty });
    };
    if let Some(index) = x.iter().position(|v| !v.is_finite()) {
        let value = x[index];
        return Err(Error::NotFinite { ty, index, value });
    }
    let start = out.len();
    out.resize(start + bytes, 0);
    encode(x, &mut out[start..]).map_err(|index| {
        out.truncate(start);
        let value = x[index];
        Error::TooLarge { ty, index, value }
    })
}

/// Does [`encode_row`] write this encoding?
pub fn can_encode(ty: TensorType) -> bool {
    encoder(ty).is_some()
}

/// Bytes of a row of `n` elements.
fn row_bytes(ty: TensorType, n: usize) -> Result<usize, Error> {
    let block = ty.block_len();
    if !n.is_multiple_of(block) {
        return Err(Error::RowLength {
            ty,
            found: n,
            block,
        });
    }
    Ok(n / block * ty.block_bytes())
}

/// Encodes a whole number of blocks of finite elements; an error is the index
/// of an element that is too large.
type Encoder = fn(&[f32], &mut [u8]) -> Result<(), usize>;

/// The function that decodes rows of `ty`, for callers that decode many rows
/// of one tensor.
///
/// # Panics
/// The returned function panics if its bytes are not exactly the blocks of its
/// output: [`decode_row`] checks, this does not.
pub fn decoder(ty: TensorType) -> Decoder {
    match ty {
        TensorType::F32 => plain::decode_f32,
        TensorType::F16 => plain::decode_f16,
        TensorType::BF16 => plain::decode_bf16,
        TensorType::F64 => plain::decode_f64,
        TensorType::I8 => plain::decode_i8,
        TensorType::I16 => plain::decode_i16,
        TensorType::I32 => plain::decode_i32,
        TensorType::I64 => plain::decode_i64,
        TensorType::Q4_0 => |bytes, out| decode_blocks(bytes, out, q4_0::decode_block),
        TensorType::Q4_1 => |bytes, out| decode_blocks(bytes, out, q4_1::decode_block),
        TensorType::Q5_0 => |bytes, out| decode_blocks(bytes, out, q5_0::decode_block),
        TensorType::Q5_1 => |bytes, out| decode_blocks(bytes, out, q5_1::decode_block),
        TensorType::Q8_0 => |bytes, out| decode_blocks(bytes, out, q8_0::decode_block),
        TensorType::Q2_K => |bytes, out| decode_blocks(bytes, out, q2_k::decode_block),
        TensorType::Q3_K => |bytes, out| decode_blocks(bytes, out, q3_k::decode_block),
        TensorType::Q4_K => |bytes, out| decode_blocks(bytes, out, q4_k::decode_block),
        TensorType::Q5_K => |bytes, out| decode_blocks(bytes, out, q5_k::decode_block),
        TensorType::Q6_K => |bytes, out| decode_blocks(bytes, out, q6_k::decode_block),
        TensorType::IQ1_S => |bytes, out| decode_blocks(bytes, out, iq1_s::decode_block),
        TensorType::IQ1_M => |bytes, out| decode_blocks(bytes, out, iq1_m::decode_block),
        TensorType::IQ2_XXS => |bytes, out| decode_blocks(bytes, out, iq2_xxs::decode_block),
        TensorType::IQ2_XS => |bytes, out| decode_blocks(bytes, out, iq2_xs::decode_block),
        TensorType::IQ2_S => |bytes, out| decode_blocks(bytes, out, iq2_s::decode_block),
        TensorType::IQ3_XXS => |bytes, out| decode_blocks(bytes, out, iq3_xxs::decode_block),
        TensorType::IQ3_S => |bytes, out| decode_blocks(bytes, out, iq3_s::decode_block),
        TensorType::IQ4_NL => |bytes, out| decode_blocks(bytes, out, iq4_nl::decode_block),
        TensorType::IQ4_XS => |bytes, out| decode_blocks(bytes, out, iq4_xs::decode_block),
        TensorType::TQ1_0 => |bytes, out| decode_blocks(bytes, out, tq1_0::decode_block),
        TensorType::TQ2_0 => |bytes, out| decode_blocks(bytes, out, tq2_0::decode_block),
        TensorType::MXFP4 => |bytes, out| decode_blocks(bytes, out, mxfp4::decode_block),
        TensorType::NVFP4 => |bytes, out| decode_blocks(bytes, out, nvfp4::decode_block),
    }
}

fn encoder(ty: TensorType) -> Option<Encoder> {
    Some(match ty {
        TensorType::F32 => plain::encode_f32,
        TensorType::F16 => plain::encode_f16,
        TensorType::BF16 => plain::encode_bf16,
        TensorType::Q4_0 => |x, out| encode_blocks(x, out, q4_0::encode_block),
        TensorType::Q4_1 => |x, out| encode_blocks(x, out, q4_1::encode_block),
        TensorType::Q5_0 => |x, out| encode_blocks(x, out, q5_0::encode_block),
        TensorType::Q5_1 => |x, out| encode_blocks(x, out, q5_1::encode_block),
        TensorType::Q8_0 => |x, out| encode_blocks(x, out, q8_0::encode_block),
        TensorType::Q4_K => |x, out| encode_blocks(x, out, q4_k::encode_block),
        TensorType::Q5_K => |x, out| encode_blocks(x, out, q5_k::encode_block),
        TensorType::Q6_K => |x, out| encode_blocks(x, out, q6_k::encode_block),
        _ => return None,
    })
}

/// Applies `decode` to every block of `N` bytes and its `M` elements.
#[inline(always)]
fn decode_blocks<const N: usize, const M: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; N], &mut [f32; M]),
) {
    let (blocks, bytes_left) = bytes.as_chunks::<N>();
    let (outs, out_left) = out.as_chunks_mut::<M>();
    assert!(
        blocks.len() == outs.len() && bytes_left.is_empty() && out_left.is_empty(),
        "{} bytes are not the blocks of {} elements",
        bytes.len(),
        out.len()
    );
    for (block, out) in blocks.iter().zip(outs) {
        decode(block, out);
    }
}

/// Applies `encode` to every block of `M` elements and its `N` bytes. `encode`
/// gives false if the block's scale overflows.
#[inline(always)]
fn encode_blocks<const N: usize, const M: usize>(
    x: &[f32],
    out: &mut [u8],
    encode: impl Fn(&[f32; M], &mut [u8; N]) -> bool,
) -> Result<(), usize> {
    let (xs, x_left) = x.as_chunks::<M>();
    let (blocks, out_left) = out.as_chunks_mut::<N>();
    assert!(
        blocks.len() == xs.len() && x_left.is_empty() && out_left.is_empty(),
        "{} bytes are not the blocks of {} elements",
        out.len(),
        x.len()
    );
    for (i, (x, block)) in xs.iter().zip(blocks).enumerate() {
        if !encode(x, block) {
            return Err(i * M + index_of_largest(x));
        }
    }
    Ok(())
}

/// Index of the first element of largest magnitude.
fn index_of_largest(x: &[f32]) -> usize {
    let mut at = 0;
    for i in 1..x.len() {
        if x[i].abs() > x[at].abs() {
            at = i;
        }
    }
    at
}

/// `1 / d`, or 0 where that is not finite: such a scale is 0 as an f16, and then
/// all codes mean the same.
#[inline(always)]
fn inverse(d: f32) -> f32 {
    let inverse = 1.0 / d;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The `N` bytes of a block that start at `at`.
#[inline(always)]
fn part<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..]
        .first_chunk()
        .expect("a field lies inside its block")
}

/// The f16 of a block that starts at `at`.
#[inline(always)]
fn f16_at(block: &[u8], at: usize) -> f32 {
    plain::f16_to_f32(u16::from_le_bytes(*part(block, at)))
}

/// Stores `value` as an f16 at `at`; gives the value stored.
fn put_f16(block: &mut [u8], at: usize, value: f32) -> f32 {
    let value = half::f16::from_f32(value);
    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
    plain::f16_to_f32(value.to_bits())
}

/// Eight elements: `scale * magnitude`, negative where the bit of `signs` is set.
#[inline(always)]
fn put_signed(out: &mut [f32; 8], scale: f32, magnitude: &[i8; 8], signs: u8) {
    for i in 0..8 {
        let y = scale * magnitude[i] as f32;
        out[i] = if signs >> i & 1 == 1 { -y } else { y };
    }
}
