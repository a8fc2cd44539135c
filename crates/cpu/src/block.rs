//! One block of 64 keys for a few queries of one key/value head, and the merge
//! of what blocks give.
//!
//! A block gives each query, from its keys alone: the largest score m, the sum l
//! of exp(score - m) over ascending keys, and the outputs o, each a chain
//! fma(exp(score - m), value, o) over ascending keys. Two results merge by
//! m' = max(m, m_b), a = exp(m - m'), c = exp(m_b - m'), l = fma(l, a, l_b * c),
//! o = fma(o, a, o_b * c). A sum of 0 means "nothing yet"; the first result is
//! taken as it is. (Milakov and Gimelshein 2018, online softmax; Dao et al. 2022.)
//!
//! What a reader would get wrong: queries that share a key load are computed
//! side by side, never summed together, so the others change no bit of one.

use crate::kv::Element;
use crate::lanes::{Available, Kernel, LANES, Lanes};
use crate::math;
use std::ops::Range;

/// Keys of a block; a multiple of 16 that divides a page.
pub(crate) const BLOCK_KEYS: usize = 64;

/// Queries that a call takes at most.
pub(crate) const MAX_QUERIES: usize = 32;

/// The keys that a query sees: from `lo` on, below `hi`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clip {
    pub(crate) lo: u32,
    pub(crate) hi: u32,
}

impl Clip {
    pub(crate) fn is_empty(self) -> bool {
        self.lo >= self.hi
    }

    /// The part inside the block that starts at `start`, counted from there.
    #[inline(always)]
    pub(crate) fn inside(self, start: u32) -> Clip {
        let keys = BLOCK_KEYS as u32;
        Clip {
            lo: self.lo.saturating_sub(start).min(keys),
            hi: self.hi.saturating_sub(start).min(keys),
        }
    }
}

/// What the keys so far give each query.
pub(crate) struct State<'a> {
    /// Largest scores.
    pub(crate) max: &'a mut [f32],
    /// Sums of exponentials; 0 where no key was seen yet.
    pub(crate) sum: &'a mut [f32],
    /// Outputs, `[queries][dim]`, not yet divided by the sums.
    pub(crate) out: &'a mut [f32],
}

impl<'a> State<'a> {
    /// Elements of the state of `n` queries.
    pub(crate) fn len(n: usize, dim: usize) -> usize {
        n * (2 + dim)
    }

    /// The state of `n` queries in the first elements of `data`.
    pub(crate) fn of(data: &'a mut [f32], n: usize, dim: usize) -> State<'a> {
        let (max, rest) = data.split_at_mut(n);
        let (sum, rest) = rest.split_at_mut(n);
        State {
            max,
            sum,
            out: &mut rest[..n * dim],
        }
    }

    /// The queries from `first` on, `n` of them.
    pub(crate) fn part(&mut self, first: usize, n: usize, dim: usize) -> State<'_> {
        State {
            max: &mut self.max[first..first + n],
            sum: &mut self.sum[first..first + n],
            out: &mut self.out[first * dim..(first + n) * dim],
        }
    }

    /// Forgets all keys.
    pub(crate) fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }
}

/// The elements of a block, `[16 keys][dim]` groups and `[key][dim]` values.
pub(crate) struct Block<'a, T> {
    pub(crate) keys: &'a [T],
    pub(crate) values: &'a [T],
}

/// The queries of a block.
pub(crate) struct Queries<'a> {
    /// `[queries][dim]`, 0 beyond the head's own dims.
    pub(crate) q: &'a [f32],
    /// Which keys of the block each sees.
    pub(crate) clips: &'a [Clip],
    /// Padded dims of a head.
    pub(crate) dim: usize,
    /// Factor on the scores.
    pub(crate) scale: f32,
}

/// Scores, then their exponentials; a row per query.
pub(crate) type Scores = [[f32; BLOCK_KEYS]; MAX_QUERIES];

/// Merges a block into the state of its queries. Meanwhile asks for the
/// elements of `next`, if given.
pub(crate) fn merge_block<T: Element>(
    machine: Available,
    block: &Block<'_, T>,
    next: Option<&Block<'_, T>>,
    queries: &Queries<'_>,
    scores: &mut Scores,
    state: &mut State<'_>,
) {
    let next_keys = next.map(|n| n.keys);
    let Some(groups) = score_block(machine, block.keys, next_keys, queries, scores) else {
        return;
    };
    let factors = machine.run(Exponentials {
        scores,
        clips: queries.clips,
        groups,
        max: state.max,
    });
    merge_values(
        machine,
        block.values,
        next.map(|n| n.values),
        queries,
        scores,
        &factors,
        state,
    );
}

/// Scores of a block's keys, meanwhile asking for `next`; gives the groups of 16 keys that any query sees,
/// if there are any.
pub(crate) fn score_block<T: Element, A: Element>(
    machine: Available,
    keys: &[T],
    next: Option<&[A]>,
    queries: &Queries<'_>,
    scores: &mut Scores,
) -> Option<Range<usize>> {
    let seen = queries.clips.iter().filter(|c| !c.is_empty());
    let lo = seen.clone().map(|c| c.lo).min()?;
    let hi = seen.map(|c| c.hi).max()?;
    let groups = lo as usize / LANES..(hi as usize).div_ceil(LANES);
    machine.run(ScoreGroups {
        keys,
        next,
        queries,
        groups: groups.clone(),
        scores,
    });
    Some(groups)
}

/// Scores of groups of 16 keys.
struct ScoreGroups<'a, T, A> {
    keys: &'a [T],
    next: Option<&'a [A]>,
    queries: &'a Queries<'a>,
    groups: Range<usize>,
    scores: &'a mut Scores,
}

impl<T: Element, A: Element> Kernel for ScoreGroups<'_, T, A> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let len = self.queries.dim * LANES;
        for group in self.groups.clone() {
            if let Some(next) = self.next {
                l.prefetch(&next[group * len..][..len]);
            }
            let keys = &self.keys[group * len..][..len];
            score_group(l, keys, self.queries, group, self.scores);
        }
    }
}

/// Scores of 16 keys.
#[inline(always)]
fn score_group<L: Lanes, T: Element>(
    l: L,
    keys: &[T],
    queries: &Queries<'_>,
    group: usize,
    scores: &mut Scores,
) {
    let (n, dim) = (queries.clips.len(), queries.dim);
    let (keys, _) = keys.as_chunks::<LANES>();
    let (keys, _) = keys.as_chunks::<LANES>();
    let scale = l.splat(queries.scale);
    let mut first = 0;
    while first < n {
        let rest = n - first;
        let q = &queries.q[first * dim..];
        let out = &mut scores[first..];
        if L::QUERIES >= 4 && rest >= 4 {
            score::<L, T, 4>(l, keys, q, scale, group, out);
            first += 4;
        } else if L::QUERIES >= 3 && rest >= 3 {
            score::<L, T, 3>(l, keys, q, scale, group, out);
            first += 3;
        } else if L::QUERIES >= 2 && rest >= 2 {
            score::<L, T, 2>(l, keys, q, scale, group, out);
            first += 2;
        } else {
            score::<L, T, 1>(l, keys, q, scale, group, out);
            first += 1;
        }
    }
}

/// Sixteen keys of all dims, dims by 16.
type KeyGroup<'a, T> = &'a [[[T; LANES]; LANES]];

/// The dims of N queries, by 16; as many as the keys have.
type QueryGroup<'a, const N: usize> = [&'a [[f32; LANES]]; N];

/// `dot(q, key) * scale` of 16 keys with each of N queries. The dot's 16 lanes
/// (dims l mod 16, ascending) are computed for all keys, in the order in which
/// the tree 8-4-2-1 wants them.
#[inline(always)]
fn score<L: Lanes, T: Element, const N: usize>(
    l: L,
    keys: KeyGroup<'_, T>,
    q: &[f32],
    scale: L::V,
    group: usize,
    out: &mut [[f32; BLOCK_KEYS]],
) {
    let (q, _) = q.as_chunks::<LANES>();
    let mut by_query: QueryGroup<'_, N> = [&[]; N];
    for i in 0..N {
        by_query[i] = &q[i * keys.len()..][..keys.len()];
    }
    let even = plus(
        l,
        quarter(l, keys, &by_query, 0),
        quarter(l, keys, &by_query, 2),
    );
    let odd = plus(
        l,
        quarter(l, keys, &by_query, 1),
        quarter(l, keys, &by_query, 3),
    );
    let dots = plus(l, even, odd);
    for i in 0..N {
        let to = &mut out[i][group * LANES..][..LANES];
        l.store_part(l.mul(dots[i], scale), to);
    }
}

/// Lanes `i`, `i + 8`, `i + 4` and `i + 12` of the dots, added.
#[inline(always)]
fn quarter<L: Lanes, T: Element, const N: usize>(
    l: L,
    keys: KeyGroup<'_, T>,
    q: &QueryGroup<'_, N>,
    i: usize,
) -> [L::V; N] {
    let zeros = [l.splat(0.0); N];
    let (mut a, mut b, mut c, mut d) = (zeros, zeros, zeros, zeros);
    // As many sums side by side as the registers hold.
    if L::QUERIES >= 4 {
        for at in 0..keys.len() {
            let key = &keys[at];
            accumulate(l, key, q, (at, i), &mut a);
            accumulate(l, key, q, (at, i + 8), &mut b);
            accumulate(l, key, q, (at, i + 4), &mut c);
            accumulate(l, key, q, (at, i + 12), &mut d);
        }
    } else {
        for at in 0..keys.len() {
            accumulate(l, &keys[at], q, (at, i), &mut a);
            accumulate(l, &keys[at], q, (at, i + 8), &mut b);
        }
        for at in 0..keys.len() {
            accumulate(l, &keys[at], q, (at, i + 4), &mut c);
            accumulate(l, &keys[at], q, (at, i + 12), &mut d);
        }
    }
    plus(l, plus(l, a, b), plus(l, c, d))
}

/// One dim more of a lane of the dots of 16 keys.
#[inline(always)]
fn accumulate<L: Lanes, T: Element, const N: usize>(
    l: L,
    key: &[[T; LANES]; LANES],
    q: &QueryGroup<'_, N>,
    (at, lane): (usize, usize),
    sums: &mut [L::V; N],
) {
    let key = T::load(l, &key[lane]);
    for n in 0..N {
        // SAFETY: `score` made every query as long as the keys.
        let q = unsafe { q[n].get_unchecked(at) };
        sums[n] = l.fma(l.splat(q[lane]), key, sums[n]);
    }
}

#[inline(always)]
fn plus<L: Lanes, const N: usize>(l: L, a: [L::V; N], b: [L::V; N]) -> [L::V; N] {
    let mut sums = a;
    for n in 0..N {
        sums[n] = l.add(a[n], b[n]);
    }
    sums
}

/// What a block's scores mean for the merge, per query.
pub(crate) struct Factors {
    /// The largest score.
    largest: [f32; MAX_QUERIES],
    /// Factor on what was there.
    old: [f32; MAX_QUERIES],
    /// Factor on the block's part.
    new: [f32; MAX_QUERIES],
}

/// Turns the scores of the keys that each query sees into exponentials against
/// the largest of them.
pub(crate) struct Exponentials<'a> {
    pub(crate) scores: &'a mut Scores,
    pub(crate) clips: &'a [Clip],
    /// The groups of 16 keys whose scores were computed.
    pub(crate) groups: Range<usize>,
    /// The largest scores of the blocks before.
    pub(crate) max: &'a [f32],
}

impl Kernel for Exponentials<'_> {
    type Output = Factors;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> Factors {
        let mut largest = [f32::NEG_INFINITY; MAX_QUERIES];
        let (start, end) = (self.groups.start * LANES, self.groups.end * LANES);
        for (i, clip) in self.clips.iter().enumerate() {
            if clip.is_empty() {
                continue;
            }
            let scores = &mut self.scores[i];
            scores[start..clip.lo as usize].fill(f32::NEG_INFINITY);
            scores[clip.hi as usize..end].fill(f32::NEG_INFINITY);
            let (scores, _) = scores[start..end].as_chunks_mut::<LANES>();
            let mut max = l.splat(f32::NEG_INFINITY);
            for group in scores.iter() {
                max = l.max(max, l.load(group));
            }
            largest[i] = l.largest(max);
            let max = l.splat(largest[i]);
            for group in scores.iter_mut() {
                let x = l.sub(l.load(group), max);
                l.store(math::exp(l, x), group);
            }
        }
        merge_factors(l, self.max, largest)
    }
}

/// Factors on the old and on the new part of a merge.
#[inline(always)]
fn merge_factors<L: Lanes>(l: L, old_max: &[f32], largest: [f32; MAX_QUERIES]) -> Factors {
    let mut old = [0.0; MAX_QUERIES];
    let mut new = [0.0; MAX_QUERIES];
    for first in (0..old_max.len()).step_by(LANES) {
        let n = LANES.min(old_max.len() - first);
        let m = l.load_part(&old_max[first..first + n]);
        let m_b = l.load_part(&largest[first..first + n]);
        let larger = l.max(m, m_b);
        let a = math::exp(l, l.sub(m, larger));
        let c = math::exp(l, l.sub(m_b, larger));
        l.store_part(a, &mut old[first..first + n]);
        l.store_part(c, &mut new[first..first + n]);
    }
    Factors { largest, old, new }
}

/// Sums and outputs of a block's keys, merged into the state, meanwhile asking
/// for `next`.
pub(crate) fn merge_values<T: Element, A: Element>(
    machine: Available,
    values: &[T],
    next: Option<&[A]>,
    queries: &Queries<'_>,
    scores: &Scores,
    factors: &Factors,
    state: &mut State<'_>,
) {
    machine.run(Weigh {
        values,
        next,
        queries,
        scores,
        factors,
        state,
    });
}

struct Weigh<'a, 'b, T, A> {
    values: &'a [T],
    next: Option<&'a [A]>,
    queries: &'a Queries<'a>,
    scores: &'a Scores,
    factors: &'a Factors,
    state: &'a mut State<'b>,
}

impl<T: Element, A: Element> Kernel for Weigh<'_, '_, T, A> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        let clips = self.queries.clips;
        let mut first = 0;
        while first < clips.len() {
            let clip = clips[first];
            // Queries that see the same keys share the loads of their values.
            let mut end = first + 1;
            while end < clips.len() && end - first < L::QUERIES && clips[end] == clip {
                end += 1;
            }
            let n = end - first;
            if clip.is_empty() {
            } else if L::QUERIES >= 4 && n == 4 {
                self.weigh::<L, 4>(l, clip, first);
            } else if L::QUERIES >= 3 && n == 3 {
                self.weigh::<L, 3>(l, clip, first);
            } else if L::QUERIES >= 2 && n == 2 {
                self.weigh::<L, 2>(l, clip, first);
            } else {
                self.weigh::<L, 1>(l, clip, first);
            }
            first = end;
        }
    }
}

impl<T: Element, A: Element> Weigh<'_, '_, T, A> {
    /// Queries `first .. first + N`, all dims.
    #[inline(always)]
    fn weigh<L: Lanes, const N: usize>(&mut self, l: L, clip: Clip, first: usize) {
        let dim = self.queries.dim;
        let weights = self.scores[first..].first_chunk().expect("N queries");
        let keys = clip.lo as usize..(clip.hi as usize).min(BLOCK_KEYS);
        let mut merges = [Merge::default(); N];
        for i in 0..N {
            merges[i] = Merge {
                is_first: self.state.sum[first + i] == 0.0,
                old: self.factors.old[first + i],
                new: self.factors.new[first + i],
            };
        }
        let next = self.next.filter(|_| first == 0);
        let out = &mut self.state.out[first * dim..(first + N) * dim];
        let mut sums = [0.0; N];
        let mut at = 0;
        while at < dim {
            let rest = (dim - at) / LANES;
            let mut tile = OutputTile {
                values: self.values,
                next,
                dim,
                at,
                keys: keys.clone(),
                weights,
                merges: &merges,
                sums: &mut sums,
                out,
            };
            if L::TILE >= 4 && rest >= 4 {
                tile.compute::<L, 4>(l);
                at += 4 * LANES;
            } else if L::TILE >= 2 && rest >= 2 {
                tile.compute::<L, 2>(l);
                at += 2 * LANES;
            } else {
                tile.compute::<L, 1>(l);
                at += LANES;
            }
        }
        for i in 0..N {
            let largest = self.factors.largest[first + i];
            self.state.join(first + i, merges[i], largest, sums[i]);
        }
    }
}

impl State<'_> {
    /// Merges the largest score and the sum of query `i`.
    #[inline(always)]
    fn join(&mut self, i: usize, merge: Merge, largest: f32, sum: f32) {
        if merge.is_first {
            self.sum[i] = sum;
            self.max[i] = largest;
        } else {
            self.sum[i] = self.sum[i].mul_add(merge.old, sum * merge.new);
            let max = self.max[i];
            self.max[i] = if max > largest { max } else { largest };
        }
    }
}

/// Dims `at ..` of the outputs of N queries.
struct OutputTile<'a, T, A, const N: usize> {
    values: &'a [T],
    next: Option<&'a [A]>,
    dim: usize,
    at: usize,
    keys: Range<usize>,
    weights: &'a [[f32; BLOCK_KEYS]; N],
    merges: &'a [Merge; N],
    /// The sums of the weights, which the first tile computes beside.
    sums: &'a mut [f32; N],
    out: &'a mut [f32],
}

impl<T: Element, A: Element, const N: usize> OutputTile<'_, T, A, N> {
    /// `16 * D` dims.
    #[inline(always)]
    fn compute<L: Lanes, const D: usize>(&mut self, l: L) {
        if self.at == 0 {
            let mut sums = [l.splat(0.0); N];
            self.accumulate::<L, D, true>(l, &mut sums);
            for n in 0..N {
                let mut all = [0.0; LANES];
                l.store(sums[n], &mut all);
                self.sums[n] = all[0];
            }
        } else {
            self.accumulate::<L, D, false>(l, &mut [l.splat(0.0); N]);
        }
    }

    #[inline(always)]
    fn accumulate<L: Lanes, const D: usize, const SUMS: bool>(
        &mut self,
        l: L,
        sums: &mut [L::V; N],
    ) {
        let (dim, at) = (self.dim, self.at);
        let mut outputs = [[l.splat(0.0); D]; N];
        for k in self.keys.clone() {
            if let (true, Some(next)) = (SUMS, self.next) {
                l.prefetch(&next[k * dim..][..dim]);
            }
            let (value, _) = self.values[k * dim + at..][..D * LANES].as_chunks::<LANES>();
            let mut v = [l.splat(0.0); D];
            for d in 0..D {
                v[d] = T::load(l, &value[d]);
            }
            for n in 0..N {
                let weight = l.splat(self.weights[n][k]);
                if SUMS {
                    sums[n] = l.add(sums[n], weight);
                }
                for d in 0..D {
                    outputs[n][d] = l.fma(weight, v[d], outputs[n][d]);
                }
            }
        }
        for n in 0..N {
            let (to, _) = self.out[n * dim + at..][..D * LANES].as_chunks_mut::<LANES>();
            for d in 0..D {
                join(l, self.merges[n], outputs[n][d], &mut to[d]);
            }
        }
    }
}

/// How a new part joins what is there.
#[derive(Clone, Copy, Default)]
struct Merge {
    is_first: bool,
    old: f32,
    new: f32,
}

/// `fma(to, old, part * new)`, or the part if it is the first.
#[inline(always)]
fn join<L: Lanes>(l: L, merge: Merge, part: L::V, to: &mut [f32; LANES]) {
    let joined = if merge.is_first {
        part
    } else {
        let part = l.mul(part, l.splat(merge.new));
        l.fma(l.load(to), l.splat(merge.old), part)
    };
    l.store(joined, to);
}

/// Merges the results of a later segment into `total`.
pub(crate) struct MergeStates<'a, 'b> {
    /// At most [`MAX_QUERIES`].
    pub(crate) total: &'a mut State<'b>,
    pub(crate) max: &'a [f32],
    pub(crate) sum: &'a [f32],
    pub(crate) out: &'a [f32],
}

impl Kernel for MergeStates<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let MergeStates {
            total,
            max,
            sum,
            out,
        } = self;
        let n = total.max.len();
        let dim = total.out.len() / n;
        let mut largest = [0.0; MAX_QUERIES];
        largest[..n].copy_from_slice(max);
        let factors = merge_factors(l, total.max, largest);
        for i in 0..n {
            if sum[i] == 0.0 {
                continue;
            }
            let merge = Merge {
                is_first: total.sum[i] == 0.0,
                old: factors.old[i],
                new: factors.new[i],
            };
            total.join(i, merge, max[i], sum[i]);
            let (to, _) = total.out[i * dim..(i + 1) * dim].as_chunks_mut::<LANES>();
            let (from, _) = out[i * dim..(i + 1) * dim].as_chunks::<LANES>();
            for (to, from) in to.iter_mut().zip(from) {
                join(l, merge, l.load(from), to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK_KEYS, Block, Clip, MAX_QUERIES, Queries, State, merge_block};
    use crate::Isa;
    use crate::lanes::{Available, LANES};
    use half::f16;

    const DIM: usize = 2 * LANES;

    /// The state after two blocks that one query sees whole and others in part.
    fn state(machine: Available) -> Vec<u32> {
        let value = |i: usize| ((i * 7919 % 1013) as f32 - 506.0) / 200.0;
        let half = |i: usize| f16::from_f32(value(i)).to_bits();
        let elements: Vec<u16> = (0..4 * BLOCK_KEYS * DIM).map(half).collect();
        let mut parts = elements.chunks(BLOCK_KEYS * DIM);
        let mut part = || parts.next().expect("four parts");
        let blocks = [0, 1].map(|_| Block {
            keys: part(),
            values: part(),
        });
        let clips = [(0, 64), (0, 64), (3, 17), (5, 6), (9, 9)];
        let clips = clips.map(|(lo, hi)| Clip { lo, hi });
        let q: Vec<f32> = (0..clips.len() * DIM).map(|i| value(i * 3 + 1)).collect();
        let queries = Queries {
            q: &q,
            clips: &clips,
            dim: DIM,
            scale: 0.2,
        };
        let mut data = vec![0.0; State::len(clips.len(), DIM)];
        let mut state = State::of(&mut data, clips.len(), DIM);
        state.clear();
        let mut scores = [[0.0; BLOCK_KEYS]; MAX_QUERIES];
        for block in &blocks {
            merge_block(machine, block, None, &queries, &mut scores, &mut state);
        }
        data.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn every_program_gives_the_same_bits() {
        let expected = state(Available::portable());
        for machine in Isa::ALL.into_iter().filter_map(Available::new) {
            assert_eq!(state(machine), expected, "{}", machine.isa());
        }
        // The query that sees nothing has no sum.
        assert_eq!(expected[5 + 4], 0.0f32.to_bits());
    }
}
