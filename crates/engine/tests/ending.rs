//! Which of two reasons to end is told, where both hold at one token.

use engine::{Ending, Engine, Generated, Request, Sequence};
use model::{Constraint, Guide, Options, Verdict};
use std::ops::ControlFlow;

/// Says stop at the third token.
#[derive(Clone, Default)]
struct StopAtThird {
    n_accepted: usize,
}

impl Guide for StopAtThird {
    fn constraint(&mut self) -> Constraint {
        Constraint::Free
    }

    fn accept(&mut self, _token: u32) -> Verdict {
        self.n_accepted += 1;
        match self.n_accepted {
            3 => Verdict::Stop,
            _ => Verdict::Continue,
        }
    }

    fn fork(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

/// How generation of at most `max_tokens` ends if the receiver breaks off at
/// token `break_at`, and after how many tokens.
fn ending(break_at: usize, max_tokens: usize) -> (Ending, usize) {
    let file = testing::open(&testing::bundled("nano-glimmer-q8_0.gguf"));
    let model = testing::reference(&file, Options::default());
    let mut engine = Engine::new(Box::new(model), Some(64)).expect("an engine");
    let mut sequence = Sequence::new();
    sequence.push(&[3968, 3990]);
    let request = Request {
        max_tokens: Some(max_tokens),
        ..Request::default()
    };
    let mut n_received = 0;
    let mut receive = |_: &Generated| {
        n_received += 1;
        match n_received == break_at {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let mut guide = StopAtThird::default();
    let done = engine
        .generate(&mut sequence, &request, &mut guide, &mut receive)
        .expect("an answer");
    (done.ending, done.n_generated)
}

/// The receiver's word comes first: any other ending says that it took every
/// token. Then the guide's: an answer that is complete was not cut off.
#[test]
fn the_receiver_comes_before_the_guide_and_the_guide_before_the_budget() {
    for (break_at, max_tokens, expected) in [
        (9, 9, (Ending::Guide, 3)),
        (3, 9, (Ending::Cancelled, 3)),
        (2, 9, (Ending::Cancelled, 2)),
        (9, 3, (Ending::Guide, 3)),
        (9, 2, (Ending::MaxTokens, 2)),
        (2, 2, (Ending::Cancelled, 2)),
    ] {
        let found = ending(break_at, max_tokens);
        assert_eq!(found, expected, "break at {break_at}, at most {max_tokens}");
    }
}
