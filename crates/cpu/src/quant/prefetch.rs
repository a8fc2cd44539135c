//! Asking for weights and activations before they are used.

use super::simd::Rows;

/// Bytes of a line of the caches.
pub(super) const LINE_BYTES: usize = 64;

/// Bytes that a stream of weights is asked for ahead of its use: over 16 streams
/// 16 KiB, which memory takes about a microsecond for. Decoding Q4_K with rows of
/// 2048 elements: 95 % of the plain read speed of memory; without asking 81 %.
pub(super) const AHEAD_BYTES: usize = 1 << 10;

/// The cache that a line is brought to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cache {
    First,
    /// For what comes from memory: on its way to the first it would hold a buffer
    /// that loads need, at half the speed.
    Second,
}

/// Asks for the line at `at`. Any address will do.
#[inline(always)]
pub(super) fn prefetch(at: *const u8, cache: Cache) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        if cache == Cache::First {
            // SAFETY: SSE is part of x86-64, and prefetching reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        } else {
            // SAFETY: likewise.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, cache);
}

/// Asks for the `bytes` of each row that [`Rows::ahead_bytes`] names, part `part` of
/// `n_parts` of them; steps of a walk have `bytes` of a row. A kernel
/// asks between its steps: all requests at once would fill the buffers that its loads
/// need, and the arithmetic would wait for memory instead of hiding it.
#[inline(always)]
pub(super) fn prefetch_ahead(rows: &Rows, bytes: usize, (part, n_parts): (usize, usize)) {
    if rows.ahead_bytes() == 0 {
        return;
    }
    for start in rows.starts(part, n_parts) {
        // Past the end of the matrix nothing is wrong with it either.
        let at = start.wrapping_add(rows.ahead_bytes());
        // The lines that begin there: a walk asks for each at least once.
        let line = at.wrapping_add(at.align_offset(LINE_BYTES));
        for offset in (0..bytes).step_by(LINE_BYTES) {
            prefetch(line.wrapping_add(offset), Cache::Second);
        }
    }
}
