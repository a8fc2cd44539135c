//! Requests of many kinds, and the answers to them.
#![allow(dead_code)] // each test file uses its part

use cpu::{Cpu, CpuOptions};
use engine::{
    CacheUse, Ending, Event, Generated, Handle, Job, SamplerSettings, Service, Settings,
    Speculation, Timings,
};
use gguf::Gguf;
use model::{Forward, Guide, KvType, Model, Options, WindowConvention};
use serde_json::json;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use text::{
    AnswerFormat, ChatTemplate, ControlTokens, Conversation, GuideFactory, Message, Reasoning,
    Tokenizer, TurnFormat, TurnSettings,
};

/// A request.
pub struct Case {
    pub tokens: Vec<u32>,
    pub sampling: SamplerSettings,
    pub guide: Box<dyn Guide>,
    pub logprobs: Option<usize>,
}

/// What came of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub tokens: Vec<Generated>,
    pub ending: Option<Ending>,
    pub failure: Option<String>,
}

/// Every stage of the chain somewhere, and none.
pub fn sampling(index: usize) -> SamplerSettings {
    let seed = 1000 + index as u64;
    let drawn = SamplerSettings {
        temperature: 1.0,
        seed,
        ..SamplerSettings::default()
    };
    match index % 7 {
        0 => SamplerSettings {
            temperature: 0.0,
            ..drawn
        },
        1 => SamplerSettings {
            top_k: 40,
            top_p: 0.95,
            ..drawn
        },
        2 => SamplerSettings {
            temperature: 0.6,
            min_p: 0.05,
            repeat_penalty: 1.15,
            ..drawn
        },
        3 => SamplerSettings {
            xtc_probability: 0.5,
            xtc_threshold: 0.1,
            min_p: 0.02,
            ..drawn
        },
        4 => SamplerSettings {
            temperature: 0.0,
            frequency_penalty: 0.3,
            presence_penalty: 0.2,
            dry_multiplier: 0.8,
            ..drawn
        },
        5 => SamplerSettings {
            typical_p: 0.9,
            top_n_sigma: 2.0,
            ..drawn
        },
        _ => SamplerSettings {
            temperature: 0.3,
            ..drawn
        },
    }
}

const ANIMALS: [&str; 10] = [
    "rabbit", "bear", "fox", "duck", "mouse", "cat", "owl", "frog", "horse", "dog",
];
const THINGS: [&str; 5] = ["key", "boat", "hat", "song", "star"];

/// Requests for stories and other things, some with a stop string, some with a
/// JSON schema, some with log-probabilities.
pub fn cases(file: &Gguf, n: usize) -> Vec<Case> {
    let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata()).expect("a tokenizer"));
    let source = file.metadata().str("tokenizer.chat_template");
    let source = source.expect("a text").map(str::to_string);
    let template = ChatTemplate::from_file(source.as_deref(), ControlTokens::of(&tokenizer));
    let template = template.expect("a template");
    let guides = GuideFactory::new(Arc::clone(&tokenizer), TurnFormat::of_chat(&tokenizer));
    let guides = guides.expect("guides");
    let case = |index: usize| {
        let (animal, thing) = (ANIMALS[index % 10], THINGS[index / 10 % 5]);
        let asked = match index % 4 {
            0 => format!("Tell me a story about a brave {animal} who finds a lost {thing}."),
            1 => format!("Write a short story about a small {animal} by the sea."),
            2 => format!("Name four things that a {animal} does with a {thing}."),
            _ => {
                format!("The {animal} has a {thing}. The {animal} likes the {thing}. Say it again.")
            }
        };
        let conversation = Conversation {
            reasoning_strength: Some(match index % 3 {
                0 => Reasoning::High,
                _ => Reasoning::Low,
            })
            .filter(|_| template.uses_variable("reasoning_strength")),
            current_date: Some("2026-11-30".to_string()),
            ..Conversation::new(vec![Message::new("user", &asked)])
        };
        let segments = template.render(&conversation).expect("a prompt");
        let settings = TurnSettings {
            stop: match index % 5 {
                3 => vec![" was".to_string(), "the sea".to_string()],
                _ => Vec::new(),
            },
            answer: match index % 6 {
                5 => AnswerFormat::JsonSchema(json!({
                    "type": "object",
                    "properties": {
                        "name": { "type": "string", "maxLength": 30 },
                        "is_brave": { "type": "boolean" },
                        "friends": { "type": "array", "items": { "enum": ["fox", "bear"] }, "maxItems": 3 },
                    },
                    "required": ["name", "is_brave", "friends"],
                    "additionalProperties": false,
                })),
                _ => AnswerFormat::Text,
            },
            reasoning_budget: (index % 6 == 5).then_some(20),
            ..TurnSettings::default()
        };
        Case {
            tokens: tokenizer.with_bos(tokenizer.encode_segments(&segments)),
            sampling: sampling(index),
            guide: guides.turn(&settings).expect("a guide").0,
            logprobs: (index % 3 == 1).then_some(4),
        }
    };
    (0..n).map(case).collect()
}

/// A service on the CPU backend; with a drafter, if one is given.
pub fn service(file: &Gguf, drafter: Option<&Gguf>, speculation: Speculation) -> (Service, Handle) {
    let options = Options {
        kv: KvType::F16,
        kv_bytes: 256 << 20,
    };
    let be = Cpu::new(CpuOptions::default()).expect("a processor");
    let mut model = Model::load(be, file, options).expect("a model");
    if let Some(drafter) = drafter {
        let attached = model.attach_drafter(drafter, WindowConvention::Below);
        attached.expect("a drafter that fits");
    }
    let settings = Settings {
        prefix_cache_bytes: 128 << 20,
        speculation,
        ..Settings::default()
    };
    let service = Service::start(Box::new(model), settings).expect("a service");
    let handle = service.handle();
    (service, handle)
}

/// Ends a service; no page is left.
pub fn end(service: Service, handle: &Handle) -> engine::Metrics {
    handle.drain();
    service.join().expect("no failure");
    let metrics = handle.metrics();
    assert_eq!((metrics.pages_used, metrics.running), (0, 0));
    metrics
}

/// Submits a case. Cases with one salt share a prefix cache; without one there is none.
pub fn submit(
    handle: &Handle,
    case: &Case,
    max_tokens: usize,
    salt: Option<&str>,
) -> Receiver<Event> {
    let (sender, events) = channel();
    let job = Job {
        tokens: case.tokens.clone(),
        guides: vec![case.guide.fork()],
        sampling: case.sampling.clone(),
        max_tokens: Some(max_tokens),
        logprobs: case.logprobs,
        cuts: Vec::new(),
        cache: CacheUse {
            is_on: salt.is_some(),
            salt: salt.map(Arc::from),
        },
        deadline: None,
        receive: Box::new(move |event| match sender.send(event) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }),
    };
    handle.submit(job).expect("it is taken");
    events
}

/// The answer, and what it took.
pub fn hear(events: &Receiver<Event>) -> (Answer, Timings) {
    let mut answer = Answer::default();
    loop {
        let event = events.recv_timeout(Duration::from_secs(600));
        match event.expect("a job that ends") {
            Event::Token { generated, .. } => answer.tokens.push(generated),
            Event::ChoiceEnded { ending, .. } => answer.ending = Some(ending),
            Event::Ended(timings) => return (answer, timings),
            Event::Failed(error) => {
                answer.failure = Some(error.to_string());
                return (answer, Timings::default());
            }
            Event::Started { .. } | Event::Prefilled { .. } => {}
        }
    }
}

/// The answers to `cases`, of which `n_together` are in the house at a time.
pub fn answers(
    handle: &Handle,
    cases: &[&Case],
    max_tokens: usize,
    n_together: usize,
    salt: Option<&str>,
) -> Vec<(Answer, Timings)> {
    let mut all = Vec::new();
    for group in cases.chunks(n_together) {
        let events: Vec<_> = group
            .iter()
            .map(|case| submit(handle, case, max_tokens, salt))
            .collect();
        all.extend(events.iter().map(hear));
    }
    all
}

/// Fails where an answer with drafts of `length` tokens at most is not the plain one, by any way to it:
/// cold, from the cache, packed, resumed.
pub fn check_equal(
    (file, drafter): (&Gguf, Option<&Gguf>),
    speculation: Speculation,
    cases: &[&Case],
    (max_tokens, expected): (usize, &[Answer]),
) -> engine::Metrics {
    let (service, handle) = service(file, drafter, speculation);
    let mut n_cached = 0;
    for (way, n_together, salt) in [
        ("cold", 1, Some("first")),
        ("cached", 1, Some("first")),
        ("packed", 8, None),
    ] {
        let found = answers(&handle, cases, max_tokens, n_together, salt);
        for (index, ((found, timings), expected)) in found.iter().zip(expected).enumerate() {
            assert_eq!(found, expected, "case {index}, {way}, {speculation:?}");
            n_cached += timings.cached_tokens;
        }
    }
    assert!(n_cached > 0, "the cache was not used");
    // The second half alone, from the rows of the first. A guide begins anew, so
    // only of those that guide nothing.
    for (index, (case, expected)) in cases.iter().zip(expected).enumerate() {
        let half = expected.tokens.len() / 2;
        if index % 5 == 3 || index % 6 == 5 || expected.ending != Some(Ending::MaxTokens) {
            continue;
        }
        let first = expected.tokens[..half].iter().map(|g| g.token);
        let rest = Case {
            tokens: case.tokens.iter().copied().chain(first).collect(),
            sampling: case.sampling.clone(),
            guide: case.guide.fork(),
            logprobs: case.logprobs,
        };
        let n_left = expected.tokens.len() - half;
        let events = submit(&handle, &rest, n_left, Some("first"));
        let (found, timings) = hear(&events);
        // The end token that a guide looks for does not come.
        assert_eq!(
            found.tokens,
            expected.tokens[half..],
            "case {index}, resumed"
        );
        assert!(timings.cached_tokens > 0);
    }
    end(service, &handle)
}
