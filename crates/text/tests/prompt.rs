//! Prompts: cuts at the ends of messages, and messages that come back as the
//! tokens that they were made of.

mod vocabulary;

use std::sync::{Arc, LazyLock};
use text::{
    ChatTemplate, ControlText, ControlTokens, Conversation, Memo, Message, Prompt, Reader, Segment,
    Special, Tokenizer, TurnEvent, TurnFormat,
};
use vocabulary::{CONTROL, byte_level, repository, tokenizer_of};

static NANO: LazyLock<(Arc<Tokenizer>, ChatTemplate)> = LazyLock::new(|| {
    let tokenizer = tokenizer_of("models/nano-glimmer-q8_0.gguf");
    let path = repository("testdata/nano-glimmer/nano-glimmer.jinja");
    let source = std::fs::read_to_string(path).expect("the template");
    let template = ChatTemplate::new(&source, ControlTokens::of(&tokenizer)).expect("a template");
    (tokenizer, template)
});

const SPACIOUS: usize = 1 << 20;

fn memo() -> Memo {
    Memo::new(Arc::clone(&NANO.0), SPACIOUS)
}

fn prompt(messages: &[Message], memo: Option<&Memo>) -> Prompt {
    let (tokenizer, template) = &*NANO;
    let conversation = Conversation::new(messages.to_vec());
    let segments = template.render(&conversation).expect("a prompt");
    Prompt::new(tokenizer, &TurnFormat::of_chat(tokenizer), &segments, memo)
}

/// One token for every byte between the control tokens: never what encoding gives
/// for words.
fn bytewise(text: &str) -> Vec<u32> {
    let tokenizer = &NANO.0;
    let token_of = |byte: u8| {
        let mut ids = 0..tokenizer.n_vocab() as u32;
        ids.find(|&id| tokenizer.token_bytes(id) == Some(&[byte]))
            .expect("a byte token")
    };
    let ids = tokenizer.encode(text, Special::Parse).into_iter();
    ids.flat_map(|id| match tokenizer.is_control(id) {
        true => vec![id],
        false => {
            let bytes = tokenizer.token_bytes(id).expect("a token");
            bytes.iter().map(|&byte| token_of(byte)).collect()
        }
    })
    .collect()
}

/// The assistant message that a client makes of generated tokens.
fn message_of(generated: &[u32], keeps_reasoning: bool) -> Message {
    let tokenizer = &NANO.0;
    let format = TurnFormat::of_chat(tokenizer);
    let mut reader =
        Reader::new(Arc::clone(tokenizer), format, Arc::from([]), &[]).expect("a reader");
    let (mut content, mut reasoning) = (String::new(), String::new());
    let mut events: Vec<TurnEvent> = generated.iter().flat_map(|&id| reader.push(id)).collect();
    events.extend(reader.finish().0);
    for event in events {
        match event {
            TurnEvent::Content(text) => content.push_str(&text),
            TurnEvent::Reasoning(text) => reasoning.push_str(&text),
            other => panic!("{other:?}"),
        }
    }
    Message {
        reasoning_content: Some(reasoning).filter(|text| keeps_reasoning && !text.is_empty()),
        ..Message::new("assistant", &content)
    }
}

fn user(text: &str) -> Message {
    Message::new("user", text)
}

/// The tokens of the next turn begin with those of this one, whatever tokens the
/// model wrote; they do not without the memo.
#[test]
fn the_next_turn_begins_with_the_very_tokens() {
    let turns = [
        (" to=user<|message|>Hello there.<|eot|>", true),
        (
            " to=self<|message|>Greet back.<|eom|><|start|>assistant to=user<|message|>Hello again, caf\u{e9} \u{1F600}!<|eot|>",
            true,
        ),
        // Cut by the budget: the template closes the message.
        (" to=user<|message|>Once upon a", false),
    ];
    for (text, is_closed) in turns {
        let memo = memo();
        let messages = [user("Hi there, how are you?")];
        let first = prompt(&messages, Some(&memo));
        let generated = bytewise(text);
        memo.remember(&first.tokens, &generated);
        let messages = [
            messages[0].clone(),
            message_of(&generated, true),
            user("And now?"),
        ];
        let next = prompt(&messages, Some(&memo));
        let so_far = [first.tokens.as_slice(), &generated].concat();
        assert!(next.tokens.starts_with(&so_far), "{text}");
        assert!(
            !prompt(&messages, None).tokens.starts_with(&so_far),
            "{text}"
        );
        assert!(memo.counts().n_found > 0);
        // The end of the answer is a cut, and so was the end of the prompt.
        assert!(
            next.cuts
                .contains(&(so_far.len() + usize::from(!is_closed)))
        );
        assert_eq!(first.cuts.last(), Some(&first.tokens.len()));
        // Over one more turn, too.
        let generated = bytewise(" to=user<|message|>Well then.<|eot|>");
        memo.remember(&next.tokens, &generated);
        let last = [message_of(&generated, true), user("Bye")];
        let last = prompt(&[&messages[..], &last].concat(), Some(&memo));
        assert!(
            last.tokens
                .starts_with(&[next.tokens.as_slice(), &generated].concat())
        );
        assert_eq!(
            text_of(&last),
            text_of(&prompt(
                &[&messages[..], &[message_of(&generated, true), user("Bye")]].concat(),
                None
            ))
        );
    }
}

fn text_of(prompt: &Prompt) -> String {
    NANO.0.decode(&prompt.tokens, ControlText::Keep)
}

#[test]
fn a_client_that_drops_the_reasoning_comes_back_to_the_prompt() {
    let memo = memo();
    let messages = [user("Hi")];
    let first = prompt(&messages, Some(&memo));
    let generated = bytewise(
        " to=self<|message|>Greet.<|eom|><|start|>assistant to=user<|message|>Hello there<|eot|>",
    );
    memo.remember(&first.tokens, &generated);
    let messages = [user("Hi"), message_of(&generated, false), user("Bye")];
    let next = prompt(&messages, Some(&memo));
    assert!(next.tokens.starts_with(&first.tokens));
    // Without its reasoning the answer stands behind other tokens: as encoded.
    assert_eq!(next, prompt(&messages, None));
}

#[test]
fn another_conversation_is_encoded_as_ever() {
    let memo = memo();
    let first = prompt(&[user("Hi")], Some(&memo));
    let generated = bytewise(" to=user<|message|>Hello there<|eot|>");
    memo.remember(&first.tokens, &generated);
    let answer = message_of(&generated, true);
    let others = [
        vec![user("Hi!"), answer.clone(), user("Bye")],
        vec![user("Hello there"), user("Hello there")],
        vec![
            Message::new("system", "Hello there"),
            user("Hi"),
            answer.clone(),
        ],
        vec![answer.clone(), user("Hi"), answer.clone(), user("Bye")],
    ];
    for messages in others {
        assert_eq!(
            prompt(&messages, Some(&memo)),
            prompt(&messages, None),
            "{messages:?}"
        );
    }
    assert_eq!(memo.counts().n_found, 0);
    // The same one, again and again.
    let same = [user("Hi"), answer, user("Bye")];
    for n in 1..=3 {
        assert_ne!(prompt(&same, Some(&memo)), prompt(&same, None));
        assert!(memo.counts().n_found >= n);
    }
}

#[test]
fn tokens_that_make_no_text_are_not_remembered() {
    let half = bytewise("\u{e9}")[0];
    let header = bytewise(" to=user<|message|>");
    let n_header = {
        let memo = memo();
        memo.remember(&prompt(&[user("Hi")], None).tokens, &header);
        memo.counts().n_entries
    };
    let check = |body: &[u32], is_new: bool| {
        let memo = memo();
        let first = prompt(&[user("Hi")], Some(&memo));
        memo.remember(&first.tokens, &[&header[..], body].concat());
        assert_eq!(
            memo.counts().n_entries,
            n_header + usize::from(is_new),
            "{body:?}"
        );
    };
    check(&bytewise("Hello there"), true);
    check(&[half], false);
    check(&[bytewise("Hello there"), vec![half]].concat(), false);
    // What encoding gives anyway takes no room.
    check(&NANO.0.encode("Hello there", Special::Text), false);
    check(&[], false);
}

#[test]
fn the_limit_in_bytes_holds_and_the_oldest_goes() {
    let first = prompt(&[user("Hi")], None);
    let remembered = |most_bytes: usize, n_turns: usize| {
        let memo = Memo::new(Arc::clone(&NANO.0), most_bytes);
        for turn in 0..n_turns {
            let text = format!(" to=user<|message|>Hello number {turn}<|eot|>");
            memo.remember(&first.tokens, &bytewise(&text));
            assert!(memo.counts().n_bytes <= most_bytes);
        }
        memo
    };
    let all = remembered(SPACIOUS, 20).counts();
    assert_eq!(all.n_evicted, 0);
    let half = remembered(all.n_bytes / 2, 20);
    assert!(half.counts().n_evicted > 0);
    assert!(half.counts().n_entries < all.n_entries);
    let turn = |memo: &Memo, turn: usize| {
        let text = format!(" to=user<|message|>Hello number {turn}<|eot|>");
        let so_far = [first.tokens.clone(), bytewise(&text)].concat();
        let messages = [user("Hi"), message_of(&bytewise(&text), true), user("Bye")];
        prompt(&messages, Some(memo)).tokens.starts_with(&so_far)
    };
    assert!(turn(&half, 19));
    assert!(!turn(&half, 0));
    // Off.
    let off = remembered(0, 3).counts();
    assert_eq!((off.n_entries, off.n_bytes), (0, 0));
}

#[test]
fn cuts_are_behind_the_tokens_that_end_messages() {
    let messages = [
        Message::new("system", "Be brief, and write <|eot|> never."),
        user("Hi <|eot|><|eom|>"),
        Message {
            reasoning_content: Some("Greet.".to_owned()),
            ..Message::new("assistant", "Hello")
        },
        user("Bye"),
    ];
    let found = prompt(&messages, None);
    let tokenizer = &NANO.0;
    let ends = ["<|eot|>", "<|eom|>"].map(|text| tokenizer.id_of(text).expect("a marker"));
    // System, user, reasoning, answer, user, the prompt.
    assert_eq!(found.cuts.len(), 6);
    assert!(found.cuts.is_sorted());
    assert_eq!(found.cuts.last(), Some(&found.tokens.len()));
    for &cut in &found.cuts[..5] {
        assert!(ends.contains(&found.tokens[cut - 1]));
    }
    // Each is the beginning of the conversation that ends there.
    for n in [2, 3, 4] {
        let shorter = prompt(&messages[..n], None);
        let cut = found.cuts[if n < 3 { n - 1 } else { n }];
        assert!(
            shorter.tokens.starts_with(&found.tokens[..cut]),
            "{n} messages"
        );
    }
}

#[test]
fn cuts_of_other_formats() {
    let mut metadata = byte_level(
        "gpt-2",
        &[],
        &[
            ("<|im_start|>", CONTROL),
            ("<|im_end|>", CONTROL),
            ("<s>", CONTROL),
        ],
    );
    metadata.insert("tokenizer.ggml.eos_token_id", gguf::Value::U32(257));
    metadata.insert("tokenizer.ggml.bos_token_id", gguf::Value::U32(258));
    metadata.insert("tokenizer.ggml.add_bos_token", gguf::Value::Bool(true));
    let tokenizer = Tokenizer::from_metadata(&metadata).expect("a tokenizer");
    let format = TurnFormat::of_chat(&tokenizer);
    let segment = |text: &str, special| Segment {
        text: text.to_owned(),
        special,
    };
    let check = |segments: &[Segment], cuts: &[usize]| {
        let prompt = Prompt::new(&tokenizer, &format, segments, None);
        assert_eq!(prompt.cuts, cuts, "{segments:?}");
        assert_eq!(prompt.tokens[0], 258);
    };
    // With the BOS that the file wants in front.
    check(
        &[
            segment("<|im_start|>", Special::Parse),
            segment("ab", Special::Text),
            segment("<|im_end|>\n<|im_start|>", Special::Parse),
            segment("c<|im_end|>", Special::Text),
        ],
        &[5, 7 + "c<|im_end|>".len()],
    );
    check(&[segment("[INST] Hi", Special::Text)], &[10]);
    check(&[segment("Hi<|im_end|>", Special::Parse)], &[4]);
}
