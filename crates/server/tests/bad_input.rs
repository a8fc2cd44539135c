//! Every request that is refused, with the exact words.

mod common;

use common::{CHAT, Reply, Setup, TestServer};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";

fn message(reply: &Reply) -> String {
    let error = &reply.json()["error"];
    let message = error["message"].as_str();
    message
        .unwrap_or_else(|| panic!("{}", reply.text))
        .to_string()
}

/// A chat request with some fields more or other.
fn chat(fields: Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": "Hi"}]}),
        fields,
    )
}

fn completion(fields: Value) -> Value {
    with(json!({"prompt": "Hi"}), fields)
}

fn with(mut body: Value, fields: Value) -> Value {
    let map = body.as_object_mut().expect("an object");
    let Value::Object(fields) = fields else {
        panic!("fields are an object")
    };
    map.extend(fields);
    body
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

/// Checks that a body is refused, naming `param`, with these words.
fn check(server: &TestServer, path: &str, body: &Value, param: Option<&str>, expected: &str) {
    let reply = server.post(path, body);
    let found = message(&reply);
    assert_eq!((reply.status, found.as_str()), (400, expected), "{body}");
    let error = &reply.json()["error"];
    assert_eq!(error["param"].as_str(), param, "{body}: {error}");
    assert_eq!(error["type"], "invalid_request_error", "{body}");
    assert!(error["code"].is_string(), "{body}");
}

/// Checks that both interfaces refuse each of these, naming the field.
fn check_generation(cases: &[(Value, &str, &str)]) {
    let server = TestServer::scripted(Setup::default());
    for (fields, param, expected) in cases {
        for (path, body) in [
            (CHAT, chat(fields.clone())),
            (COMPLETIONS, completion(fields.clone())),
        ] {
            check(&server, path, &body, Some(param), expected);
        }
    }
}

/// Checks that a chat refuses each of these, naming the field.
fn check_chats(cases: &[(Value, &str, &str)]) {
    let server = TestServer::scripted(Setup::default());
    for (fields, param, expected) in cases {
        check(&server, CHAT, &chat(fields.clone()), Some(param), expected);
    }
}

#[test]
fn fields_of_the_sampler() {
    check_generation(&[
        (
            json!({"temperature": -1}),
            "temperature",
            "temperature: found -1, expected 0 or more",
        ),
        (
            json!({"top_p": 1.5}),
            "top_p",
            "top_p: found 1.5, expected 0 to 1",
        ),
        (
            json!({"min_p": -0.5}),
            "min_p",
            "min_p: found -0.5, expected 0 to 1",
        ),
        (
            json!({"typical_p": 2}),
            "typical_p",
            "typical_p: found 2, expected 0 to 1",
        ),
        (
            json!({"top_k": -2}),
            "top_k",
            "top_k: found -2, expected -1 or more",
        ),
        (
            json!({"repeat_penalty": 0}),
            "repeat_penalty",
            "repeat_penalty: found 0, expected a finite number above 0",
        ),
        (
            json!({"repeat_last_n": -2}),
            "repeat_last_n",
            "repeat_last_n: found -2, expected -1 or more",
        ),
        (
            json!({"dry_base": 0.5}),
            "dry_base",
            "dry_base: found 0.5, expected a finite number, 1 or more",
        ),
        (
            json!({"dry_multiplier": 1, "dry_sequence_breakers": ["a", ""]}),
            "dry_sequence_breakers[1]",
            "dry_sequence_breakers[1]: found an empty string, expected one character or more",
        ),
        (
            json!({"xtc_probability": 2}),
            "xtc_probability",
            "xtc_probability: found 2, expected 0 to 1",
        ),
    ]);
}

#[test]
fn fields_of_every_generation() {
    check_generation(&[
        (json!({"n": 0}), "n", "n: found 0, expected 1 to 64"),
        (json!({"n": 65}), "n", "n: found 65, expected 1 to 64"),
        (
            json!({"stop": ["a", ""]}),
            "stop[1]",
            "stop[1]: found a string of 0 bytes, expected 1 to 1024",
        ),
        (
            json!({"stop": vec!["a"; 17]}),
            "stop",
            "stop: found 17 strings, expected at most 16",
        ),
        (
            json!({"logit_bias": {"4096000": 1}}),
            "logit_bias",
            "logit_bias: found 4096000, expected the id of a token, 0 to 4095",
        ),
        (
            json!({"logit_bias": {"x": 1}}),
            "logit_bias",
            "logit_bias: found x, expected the id of a token, 0 to 4095",
        ),
        (
            json!({"logit_bias": {"5": 101}}),
            "logit_bias.5",
            "logit_bias.5: found 101, expected -100 to 100",
        ),
        (
            json!({"deadline_ms": 0}),
            "deadline_ms",
            "deadline_ms: found 0, expected 1 or more",
        ),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
            "stream_options: found an object, expected none, since stream is not true",
        ),
        (
            json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
            "stream_options.include_obfuscation",
            "stream_options.include_obfuscation is not supported: chunks are not padded; false is allowed",
        ),
        (
            json!({"repetition_penalty": 1.1}),
            "repetition_penalty",
            "repetition_penalty is not supported: its name here is repeat_penalty",
        ),
        (
            json!({"mirostat": 2}),
            "mirostat",
            "mirostat is not supported: use temperature, top_p or min_p",
        ),
        (
            json!({"max_tokens": 0}),
            "max_tokens",
            "max_tokens: found 0, expected 1 or more",
        ),
    ]);
}

#[test]
fn fields_of_chats() {
    check_chats(&[
        (
            json!({"messages": [{"role": "robot", "content": "x"}]}),
            "messages[0].role",
            "messages[0].role: found robot, expected system, developer, user, assistant or tool",
        ),
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            "messages[0].tool_call_id",
            "messages[0].tool_call_id: found none, expected the id of the call that is answered",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
            "messages[0].content[0]",
            "messages[0].content[0]: found image_url, expected a text: this server takes no images, sounds or files",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            "messages[0].content[0]",
            "messages[0].content[0]: found a part without text, expected a text: this server takes no images, sounds or files",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]}),
            "messages[0].function_call",
            "messages[0].function_call is not supported: use tool_calls",
        ),
        (
            json!({"messages": []}),
            "messages",
            "conversation: found no messages, expected at least one",
        ),
        (
            json!({"messages": [{"role": "user"}]}),
            "messages",
            "conversation: message 0 (user) has no content, expected a text or a list of parts; \
             only reasoning or tool calls can stand without",
        ),
        (
            json!({"max_tokens": 5, "max_completion_tokens": 6}),
            "max_tokens",
            "max_tokens: found 5, while max_completion_tokens is 6, expected one of the two",
        ),
        (
            json!({"max_completion_tokens": 0}),
            "max_completion_tokens",
            "max_completion_tokens: found 0, expected 1 or more",
        ),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
            "top_logprobs: found 21, expected 0 to 20",
        ),
        (
            json!({"top_logprobs": 3}),
            "top_logprobs",
            "top_logprobs: found 3, expected none, since logprobs is not true",
        ),
        (
            json!({"chat_template_kwargs": {"messages": []}}),
            "chat_template_kwargs.messages",
            "chat_template_kwargs.messages: found it here, expected it as a field of the request",
        ),
        (
            json!({"chat_template_kwargs": {"knowledge_cutoff": 5}}),
            "chat_template_kwargs.knowledge_cutoff",
            "chat_template_kwargs.knowledge_cutoff: found 5, expected a string",
        ),
    ]);
}

#[test]
fn levels_of_reasoning() {
    check_chats(&[
        (
            json!({"reasoning_effort": "maximal"}),
            "reasoning_effort",
            "reasoning_effort: found maximal, expected low, medium, high or xhigh",
        ),
        (
            json!({"reasoning_effort": "none"}),
            "reasoning_effort",
            "reasoning_effort: found none, expected low, medium, high or xhigh; \
             reasoning_budget 0 asks for no reasoning",
        ),
        (
            json!({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_strength": "low"}}),
            "reasoning_effort",
            "reasoning_effort: found a level beside the one in chat_template_kwargs, expected one of the two",
        ),
    ]);
}

#[test]
fn fields_of_tools() {
    check_chats(&[
        (
            json!({"tools": [{"type": "web_search"}]}),
            "tools[0].type",
            "tools[0].type: found web_search, expected function",
        ),
        (
            json!({"tools": [tool("self")]}),
            "tools[0].function.name",
            "tools[0].function.name: found self, expected 1 to 64 letters, digits, _, - and ., other than self and user",
        ),
        (
            json!({"tools": [tool("a"), tool("a")]}),
            "tools[1].function.name",
            "tools[1].function.name: found a, a second time, expected names that differ",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}),
            "tools[0].function.parameters",
            "tools[0].function.parameters: found 3, expected an object",
        ),
        (
            json!({"tool_choice": "required"}),
            "tool_choice",
            "tool_choice: found required, expected none or auto without tools",
        ),
        (
            json!({"tools": [tool("a")], "tool_choice": tool("b")}),
            "tool_choice",
            "tool_choice: found b, expected the name of one of the tools",
        ),
        (
            json!({"tool_choice": "perhaps"}),
            "tool_choice",
            "tool_choice: found perhaps, expected none, auto, required or an object {\"type\": \
             \"function\", \"function\": {\"name\": NAME}}",
        ),
        (
            json!({"tool_choice": {"type": "allowed_tools"}}),
            "tool_choice.allowed_tools",
            "tool_choice.allowed_tools is not supported: send only the tools that are allowed",
        ),
    ]);
}

#[test]
fn fields_of_formats_and_what_is_not_done() {
    check_chats(&[
        (
            json!({"regex": "a", "grammar": "b"}),
            "grammar",
            "grammar: found it beside regex, expected one rule for the answer",
        ),
        (
            json!({"response_format": {"type": "json_object"}, "regex": "b"}),
            "regex",
            "regex: found it beside response_format, expected one rule for the answer",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema",
            "response_format.json_schema: found none, expected an object with the field schema",
        ),
        (
            json!({"response_format": {"type": "text", "schema": {}}}),
            "response_format.schema",
            "response_format.schema: found a schema, expected none beside the type text",
        ),
        (
            json!({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}),
            "response_format.json_schema",
            "response_format.json_schema: found a schema, expected none beside the type json_object",
        ),
        (
            json!({"response_format": {"type": "json_object", "schema": {"type": "objekt"}}}),
            "response_format",
            "JSON schema: #: Invalid type: objekt",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a", "strict": true, "parameters":
                {"type": "object", "properties": {"x": {"type": "strin"}}}}}]}),
            "tools",
            "tool \"a\", parameter \"x\": JSON schema: #: Invalid type: strin",
        ),
        (
            json!({"structured_outputs": {"regex": "a"}}),
            "structured_outputs",
            "structured_outputs is not supported: use response_format, regex or grammar",
        ),
        (
            json!({"store": true}),
            "store",
            "store is not supported: answers are not stored",
        ),
        (
            json!({"audio": {}}),
            "audio",
            "audio is not supported: answers are text",
        ),
        (
            json!({"modalities": ["text", "audio"]}),
            "modalities",
            "modalities is not supported: answers are text",
        ),
        (
            json!({"functions": [{}]}),
            "functions",
            "functions is not supported: use tools",
        ),
        (
            json!({"service_tier": "flex"}),
            "service_tier",
            "service_tier is not supported: there is one tier",
        ),
        (
            json!({"web_search_options": {}}),
            "web_search_options",
            "web_search_options is not supported: there is no web search",
        ),
    ]);
}

#[test]
fn fields_of_completions() {
    let server = TestServer::scripted(Setup::default());
    for (fields, param, expected) in [
        (
            json!({"prompt": [1, 99999]}),
            "prompt[1]",
            "prompt[1]: found 99999, expected the id of a token, 0 to 4095",
        ),
        (
            json!({"prompt": [[1], [99999]]}),
            "prompt[1][0]",
            "prompt[1][0]: found 99999, expected the id of a token, 0 to 4095",
        ),
        (
            json!({"prompt": vec!["a"; 33], "n": 2}),
            "prompt",
            "prompt: found 33 prompts with 2 answers each, expected 1 to 64 answers in all",
        ),
        (
            json!({"logprobs": 21}),
            "logprobs",
            "logprobs: found 21, expected 0 to 20",
        ),
        (
            json!({"logprobs": 1, "echo": true}),
            "logprobs",
            "logprobs is not supported: beside echo those of the prompt would be wanted, which are not computed",
        ),
        (
            json!({"suffix": "x"}),
            "suffix",
            "suffix is not supported: this model continues text, it does not fill gaps",
        ),
        (
            json!({"best_of": 2}),
            "best_of",
            "best_of is not supported: ask for n answers and choose",
        ),
        (
            json!({"max_completion_tokens": 5}),
            "max_completion_tokens",
            "max_completion_tokens is not supported: its name here is max_tokens",
        ),
        (
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
            "response_format is not supported: use regex or grammar",
        ),
    ] {
        check(
            &server,
            COMPLETIONS,
            &completion(fields),
            Some(param),
            expected,
        );
    }
    check(
        &server,
        COMPLETIONS,
        &completion(json!({"prompt": []})),
        None,
        "the prompt has no tokens; at least one is needed to continue from",
    );
}

/// Checks that chats refuse these bodies, each with its field and its words.
fn check_bodies(cases: &[(&str, Option<&str>, &str)]) {
    let server = TestServer::scripted(Setup::default());
    for &(body, param, expected) in cases {
        let headers = [("content-type", "application/json")];
        let reply = server.post_text(CHAT, body, &headers);
        assert_eq!(reply.status, 400, "{body}: {}", reply.text);
        let error = &reply.json()["error"];
        let found = error["message"].as_str().expect("a message");
        assert_eq!(found, expected, "{body}");
        assert_eq!(error["param"].as_str(), param, "{body}: {found}");
    }
}

#[test]
fn json_that_is_none_is_named_by_its_place() {
    check_bodies(&[
        (
            "",
            None,
            "body: EOF while parsing a value at line 1 column 0",
        ),
        (
            "{\"messages\": [",
            None,
            "body: EOF while parsing a list at line 1 column 14",
        ),
        (
            "{\"messages\": []} x",
            None,
            "body: trailing characters at line 1 column 18",
        ),
        ("[]", None, "body: found a list, expected a JSON object"),
        ("null", None, "body: found null, expected a JSON object"),
    ]);
}

#[test]
fn values_of_the_wrong_type_are_told_in_the_words_of_json() {
    check_bodies(&[
        (
            "{}",
            Some("messages"),
            "messages: found none, expected a value",
        ),
        (
            "{\"messages\": [{\"content\": \"x\"}]}",
            Some("messages[0].role"),
            "messages[0].role: found none, expected a value",
        ),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": 5}]}",
            Some("messages[0].content"),
            "messages[0].content: found 5, expected a string, a list of parts or null",
        ),
        (
            "{\"messages\": [], \"max_tokens\": -1}",
            Some("max_tokens"),
            "max_tokens: found -1, expected a whole number, 0 or more",
        ),
        (
            "{\"messages\": [], \"stream\": \"yes\"}",
            Some("stream"),
            "stream: found \"yes\", expected true or false",
        ),
        (
            "{\"messages\": [], \"temperature\": \"0.5\"}",
            Some("temperature"),
            "temperature: found \"0.5\", expected a number",
        ),
        (
            "{\"messages\": [], \"seed\": 1.5}",
            Some("seed"),
            "seed: found 1.5, expected a whole number of 64 bits",
        ),
        (
            "{\"messages\": \"Hi\"}",
            Some("messages"),
            "messages: found \"Hi\", expected a list",
        ),
        (
            "{\"messages\": [], \"chat_template_kwargs\": [1]}",
            Some("chat_template_kwargs"),
            "chat_template_kwargs: found a list, expected an object",
        ),
        (
            "{\"messages\": [], \"stop\": [1]}",
            Some("stop"),
            "stop: found a list, expected a string or a list of strings",
        ),
        (
            "{\"messages\": [], \"stream_options\": 5}",
            Some("stream_options"),
            "stream_options: found 5, expected an object",
        ),
        (
            "{\"messages\": [], \"response_format\": {\"type\": \"xml\"}}",
            Some("response_format.type"),
            "response_format.type: found \"xml\", expected text, json_object or json_schema",
        ),
        (
            "{\"messages\": [], \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {}}}",
            Some("response_format.json_schema.schema"),
            "response_format.json_schema.schema: found none, expected a value",
        ),
    ]);
}

#[test]
fn a_grammar_that_is_none_is_refused() {
    let server = TestServer::scripted(Setup::default());
    for fields in [
        json!({"regex": "("}),
        json!({"grammar": "start: missing"}),
        json!({"regex": "a".repeat(300 << 10)}),
    ] {
        // The words are the grammar library's, the field is ours.
        let param = fields.as_object().and_then(|fields| fields.keys().next());
        for (path, body) in [
            (CHAT, chat(fields.clone())),
            (COMPLETIONS, completion(fields.clone())),
        ] {
            let reply = server.post(path, &body);
            assert_eq!(reply.status, 400, "{fields}");
            let found = &reply.json()["error"]["param"];
            assert_eq!(found.as_str(), param.map(String::as_str), "{fields}");
        }
    }
}

#[test]
fn rules_and_a_bias_that_leave_no_token_are_the_requests_own_fault() {
    let server = TestServer::scripted(Setup::default());
    let id = |text: &str| {
        let ids = server.tokenizer.encode(text, text::Special::Text);
        assert_eq!(ids.len(), 1, "{text}");
        ids[0].to_string()
    };
    let bias = json!({ (id("a")): -100, (id("b")): -100 });
    let body = chat(json!({"regex": "[ab]", "reasoning_budget": 0, "logit_bias": bias}));
    let reply = server.post(CHAT, &body);
    assert_eq!(reply.status, 400, "{}", reply.text);
    assert_eq!(
        message(&reply),
        "logits: none of 4096 tokens is above minus infinity after bias and mask"
    );
    assert_eq!(reply.json()["error"]["code"], "answer_impossible");
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_with_both_numbers() {
    let server = TestServer::scripted(Setup::default());
    let body = json!({"prompt": vec![5; 3000]});
    let reply = server.post(COMPLETIONS, &body);
    assert_eq!(reply.status, 400);
    assert_eq!(
        message(&reply),
        "the prompt has 3000 tokens, but the context holds 2048 and one place must be left for the answer"
    );
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
}

#[test]
fn fields_that_nobody_knows_are_let_through_and_named() {
    let server = TestServer::scripted(Setup::default());
    for (body, ignored) in [
        (chat(json!({})), None),
        (chat(json!({"foo": 1, "bar": {"baz": 2}})), Some("bar, foo")),
        (
            chat(
                json!({"stream_options": null, "response_format": {"type": "text"}, "x,\u{e9}": 1}),
            ),
            Some("x??"),
        ),
        (
            chat(json!({"chat_template_kwargs": {"enable_thinking": true}})),
            Some("chat_template_kwargs.enable_thinking"),
        ),
        (
            chat(json!({"response_format": {"type": "text", "foo": 1}})),
            Some("response_format.foo"),
        ),
        // What asks for what happens anyway is no matter.
        (
            chat(json!({"store": false, "service_tier": "auto", "audio": null})),
            None,
        ),
        (chat(json!({"user": "me", "metadata": {"a": "b"}})), None),
    ] {
        server.script(server.turn(" to=user<|message|>Hi.<|eot|>"));
        let reply = server.post(CHAT, &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.text);
        assert_eq!(reply.header("x-muser-ignored"), ignored, "{body}");
    }
}

#[test]
fn a_list_is_no_object() {
    let server = TestServer::scripted(Setup::default());
    let schema = json!({"type": "object"});
    for (fields, param) in [
        (
            json!({"stream": true, "stream_options": [true, false]}),
            "stream_options",
        ),
        (json!({"response_format": ["text"]}), "response_format"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": ["x", null, schema, null]}}),
            "response_format.json_schema",
        ),
        (json!({"messages": [["user", "Hi"]]}), "messages[0]"),
    ] {
        let reply = server.post(CHAT, &chat(fields.clone()));
        assert_eq!(reply.status, 400, "{fields}: {}", reply.text);
        let error = &reply.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        assert_eq!(
            message(&reply),
            format!("{param}: found a list, expected an object")
        );
    }
}

#[test]
fn fields_inside_of_others_that_nobody_knows_are_named() {
    let server = TestServer::scripted(Setup::default());
    let user = json!({"role": "user", "content": "Hi"});
    let schema = json!({"name": "x", "schema": {"type": "object"}, "y": 1});
    let called = json!({"name": "a", "arguments": "{}", "y": 1});
    let call = json!({"id": "1", "type": "function", "x": 1, "function": called});
    let tool_y = json!({"type": "function", "x": 1, "function": {"name": "a", "y": 1}});
    for (fields, ignored) in [
        (
            json!({"messages": [{"role": "user", "content": "Hi", "x": 1, "y": null}]}),
            Some("messages[].x"),
        ),
        (
            json!({"messages": [user, {"role": "user", "content": [
                {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}]}),
            Some("messages[].content[].cache_control"),
        ),
        (
            json!({"messages": [user, {"role": "assistant", "content": null, "tool_calls": [call]}, user]}),
            Some("messages[].tool_calls[].function.y, messages[].tool_calls[].x"),
        ),
        // What OpenAI's own answers have and asks for nothing.
        (
            json!({"messages": [user, {"role": "assistant", "content": "Hi", "refusal": null,
                "annotations": [], "audio": null, "function_call": null, "tool_calls": null}, user]}),
            None,
        ),
        (
            json!({"tools": [tool_y]}),
            Some("tools[].function.y, tools[].x"),
        ),
        (
            json!({"tools": [tool("a")], "tool_choice":
                {"type": "function", "x": 1, "function": {"name": "a", "y": 1}}}),
            Some("tool_choice.function.y, tool_choice.x"),
        ),
        (
            json!({"response_format": {"type": "json_schema", "x": 1, "json_schema": schema}}),
            Some("response_format.json_schema.y, response_format.x"),
        ),
        (
            json!({"stream": true, "stream_options": {"include_usage": true, "x": 1}}),
            Some("stream_options.x"),
        ),
    ] {
        let mut body = chat(fields);
        body["max_tokens"] = json!(1);
        server.script(server.turn(" to=user<|message|>Hi.<|eot|>"));
        let reply = server.post(CHAT, &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.text);
        assert_eq!(reply.header("x-muser-ignored"), ignored, "{body}");
    }
}

#[test]
fn a_model_that_cannot_chat_says_so() {
    let server = TestServer::scripted(Setup {
        has_template: false,
        ..Setup::default()
    });
    check(
        &server,
        CHAT,
        &chat(json!({})),
        None,
        "nano has no chat template, so it cannot chat; /v1/completions continues plain text",
    );
    server.script(server.turn("!"));
    assert_eq!(server.post(COMPLETIONS, &completion(json!({}))).status, 200);
}
