//! Token masks against sets of numbers.

use model::TokenMask;
use std::collections::BTreeSet;

/// A mask and the set that it should be.
fn mask_of(n_vocab: usize, is_allowed: impl Fn(u32) -> bool) -> (TokenMask, BTreeSet<u32>) {
    let mut mask = TokenMask::none(n_vocab);
    let set: BTreeSet<u32> = (0..n_vocab as u32)
        .filter(|&token| is_allowed(token))
        .collect();
    set.iter().for_each(|&token| mask.allow(token));
    (mask, set)
}

fn check(mask: &TokenMask, set: &BTreeSet<u32>) {
    assert_eq!(mask.n_allowed(), set.len());
    assert!(mask.tokens().eq(set.iter().copied()));
    for token in 0..mask.n_vocab() as u32 + 130 {
        assert_eq!(
            mask.is_allowed(token),
            set.contains(&token),
            "token {token}"
        );
    }
}

#[test]
fn masks_are_sets() {
    for n_vocab in [1, 31, 32, 63, 64, 65, 128, 200, 1000] {
        let (mut thirds, mut set) = mask_of(n_vocab, |token| token.is_multiple_of(3));
        check(&thirds, &set);
        let (halves, other) = mask_of(n_vocab, |token| token.is_multiple_of(2));
        thirds.intersect(&halves);
        set.retain(|token| other.contains(token));
        check(&thirds, &set);
        for token in [0, 5, n_vocab as u32, u32::MAX] {
            thirds.forbid(token);
            set.remove(&token);
            check(&thirds, &set);
        }
        check(&TokenMask::none(n_vocab), &BTreeSet::new());
    }
}

#[test]
fn words_of_32_bits_are_read_lowest_first() {
    let check_words = |words: &[u32], n_vocab: usize, tokens: &[u32]| {
        let mask = TokenMask::from_words(words, n_vocab);
        assert_eq!(mask.n_vocab(), n_vocab);
        assert_eq!(mask.tokens().collect::<Vec<_>>(), tokens);
    };
    check_words(&[], 100, &[]);
    check_words(&[0b101], 100, &[0, 2]);
    check_words(&[1 << 31, 1, 1 << 3], 100, &[31, 32, 67]);
    // Bits behind the vocabulary mean nothing.
    check_words(&[u32::MAX], 3, &[0, 1, 2]);
    check_words(&[0, 0, u32::MAX, u32::MAX, 7], 66, &[64, 65]);
    check_words(&[0, u32::MAX], 64, &(32..64).collect::<Vec<_>>());
}

#[test]
#[should_panic(expected = "masks of two vocabularies")]
fn masks_of_two_vocabularies_do_not_meet() {
    TokenMask::none(3).intersect(&TokenMask::none(4));
}
