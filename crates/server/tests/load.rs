//! The bundled model behind the whole server: equal answers alone and together,
//! cached prompts, clients that go away.

mod common;

use common::{CHAT, Said, Setup, TestServer};
use serde_json::{Value, json};
use std::sync::Arc;

const KV_BYTES: u64 = 512 << 20;

fn chat(text: &str, fields: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": text}],
        "reasoning_effort": "low",
        "max_tokens": 24,
    });
    let Value::Object(fields) = fields else {
        panic!("fields are an object")
    };
    body.as_object_mut().expect("an object").extend(fields);
    body
}

fn cached_tokens(answer: &Value) -> u64 {
    let usage = &answer["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .expect("a number");
    assert_eq!(answer["timings"]["cached_tokens"], cached);
    cached
}

#[test]
fn answers_together_are_the_answers_alone() {
    const N: usize = 64;
    let server = Arc::new(TestServer::nano(Setup::default(), KV_BYTES));
    // Greedy and drawn, with and without logprobs, of several lengths.
    let request = |i: usize| {
        let seeded = json!({"temperature": 0.8, "seed": i, "logprobs": i.is_multiple_of(3), "cache_prompt": i.is_multiple_of(2)});
        let greedy = json!({"logprobs": true, "max_tokens": 8 + i % 5});
        let fields = if i.is_multiple_of(2) { seeded } else { greedy };
        chat(&format!("Tell me a story about number {}.", i % 16), fields)
    };
    let alone: Vec<Said> = (0..N)
        .map(|i| Said::of_answer(&server.post(CHAT, &request(i)).ok(), 0))
        .collect();
    let threads: Vec<_> = (0..N)
        .map(|i| {
            let server = Arc::clone(&server);
            let mut body = request(i);
            body["stream"] = json!(true);
            std::thread::spawn(move || Said::of_events(&server.post(CHAT, &body).events(), 0))
        })
        .collect();
    for (i, (thread, alone)) in threads.into_iter().zip(alone).enumerate() {
        assert_eq!(thread.join().expect("an answer"), alone, "request {i}");
    }
    server.wait_for("idle", |m| m.running == 0 && m.completed == 2 * N as u64);
}

#[test]
fn what_was_said_before_is_not_computed_again() {
    let server = TestServer::nano(Setup::default(), KV_BYTES);
    let body = chat("Tell me about the sea.", json!({}));
    let first = server.post(CHAT, &body).ok();
    assert_eq!(cached_tokens(&first), 0);
    let again = server.post(CHAT, &body).ok();
    let n_prompt = again["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert_eq!(cached_tokens(&again), n_prompt - 1);
    assert_eq!(Said::of_answer(&again, 0), Said::of_answer(&first, 0));
    // The next turn, with the answer and its reasoning sent back, begins behind
    // what was generated.
    let message = &first["choices"][0]["message"];
    let mut next = body;
    let messages = next["messages"].as_array_mut().expect("a list");
    messages.push(message.clone());
    messages.push(json!({"role": "user", "content": "And then?"}));
    let next_answer = server.post(CHAT, &next).ok();
    assert!(cached_tokens(&next_answer) > n_prompt, "{next_answer}");
    // Off, it changes nothing but the counts.
    next["cache_prompt"] = json!(false);
    let uncached = server.post(CHAT, &next).ok();
    assert_eq!(cached_tokens(&uncached), 0);
    assert_eq!(
        Said::of_answer(&uncached, 0),
        Said::of_answer(&next_answer, 0)
    );
    // Another tenant does not see it.
    let salted = chat("Tell me about the sea.", json!({"cache_salt": "b"}));
    assert_eq!(cached_tokens(&server.post(CHAT, &salted).ok()), 0);
    assert!(cached_tokens(&server.post(CHAT, &salted).ok()) > 0);
}

#[test]
fn choices_share_one_prompt_and_differ() {
    let server = TestServer::nano(Setup::default(), KV_BYTES);
    let fields = json!({"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 16});
    let body = chat("Tell me a story about a lighthouse.", fields);
    let answer = server.post(CHAT, &body).ok();
    let said: Vec<Said> = (0..3).map(|i| Said::of_answer(&answer, i)).collect();
    assert!(said[0] != said[1] && said[1] != said[2], "{said:?}");
    let timings = &answer["timings"];
    assert_eq!(timings["prefill_tokens"], answer["usage"]["prompt_tokens"]);
    let again = server.post(CHAT, &body).ok();
    let repeated: Vec<Said> = (0..3).map(|i| Said::of_answer(&again, i)).collect();
    assert_eq!(repeated, said);
}

#[test]
fn a_client_that_goes_away_frees_its_place() {
    let mut setup = Setup::default();
    setup.engine.prefix_cache_bytes = 0;
    let server = TestServer::nano(setup, KV_BYTES);
    for is_stream in [true, false] {
        let before = server.handle.metrics().cancelled;
        let fields = json!({"stream": is_stream, "max_tokens": 1500, "logit_bias": {}});
        let body = chat("Tell me a very long story.", fields);
        match is_stream {
            true => drop(server.open(CHAT, &body).next().expect("a line")),
            false => {
                use std::io::Write;
                let address = server.url.split_once("://").expect("a URL").1;
                let mut stream = std::net::TcpStream::connect(address).expect("a connection");
                let body = body.to_string();
                let head = format!(
                    "POST {CHAT} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
                     content-length: {}\r\n\r\n",
                    body.len()
                );
                stream.write_all((head + &body).as_bytes()).expect("sent");
                server.wait_for("running", |m| m.running == 1);
            }
        }
        server.wait_for("cancelled", |m| {
            m.cancelled == before + 1 && m.running == 0 && m.pages_used == 0
        });
    }
}

#[test]
fn several_prompts_are_answered_as_each_alone() {
    let server = TestServer::nano(Setup::default(), KV_BYTES);
    let body = |prompt: Value| json!({"prompt": prompt, "max_tokens": 8, "n": 2});
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().expect("choices").iter();
        choices
            .map(|c| c["text"].as_str().expect("a text").to_string())
            .collect()
    };
    let post = |prompt: Value| server.post("/v1/completions", &body(prompt)).ok();
    let both = post(json!(["Once upon a time", "The sea is"]));
    let (one, two) = (post(json!("Once upon a time")), post(json!("The sea is")));
    assert_eq!(texts(&both), [texts(&one), texts(&two)].concat());
    let usage = |answer: &Value| answer["usage"]["total_tokens"].as_u64().expect("a number");
    assert_eq!(usage(&both), usage(&one) + usage(&two));
}
