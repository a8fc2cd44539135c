//! The server around the answers: who may ask, how it is, how it ends.

mod common;

use common::{CHAT, Fault, Setup, TestServer};
use serde_json::{Value, json};
use server::{ApiKeys, Error, Limits, Settings, TlsFiles};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

fn chat() -> Value {
    json!({"messages": [{"role": "user", "content": "Hi"}]})
}

fn with_settings(change: impl FnOnce(&mut Settings)) -> TestServer {
    let mut setup = Setup::default();
    change(&mut setup.settings);
    TestServer::scripted(setup)
}

/// What comes back for these bytes.
fn raw(server: &TestServer, request: &str) -> String {
    let address = server.url.split_once("://").expect("a URL").1;
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

#[test]
fn a_key_is_asked_for_everywhere_but_at_the_health() {
    let server = with_settings(|settings| settings.keys = ApiKeys::new(["secret"]));
    let body = chat().to_string();
    let json = ("content-type", "application/json");
    for (headers, status) in [
        (&[json][..], 401),
        (&[json, ("authorization", "Bearer wrong")], 401),
        (&[json, ("authorization", "Bearer secret")], 200),
        // With a key, the host does not matter.
        (
            &[
                json,
                ("authorization", "Bearer secret"),
                ("host", "example.org"),
            ],
            200,
        ),
    ] {
        let reply = server.post_text(CHAT, &body, headers);
        assert_eq!(reply.status, status, "{headers:?}: {}", reply.text);
        if status == 401 {
            assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        }
    }
    assert_eq!(server.get("/health").status, 200);
    for path in ["/v1/models", "/metrics", "/openapi.json"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
}

#[test]
fn without_a_key_only_this_machine_is_a_host() {
    let server = TestServer::scripted(Setup::default());
    for (host, status) in [
        ("localhost:1", 200),
        ("evil\u{e9}.example", 403),
        ("127.0.0.1", 200),
        ("evil.example", 403),
    ] {
        let request =
            format!("GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let reply = raw(&server, &request);
        assert!(
            reply.starts_with(&format!("HTTP/1.1 {status} ")),
            "{host}: {reply}"
        );
    }
}

#[test]
fn an_address_that_others_reach_needs_a_key_or_a_word() {
    let address = SocketAddr::from(([0, 0, 0, 0], 0));
    let start = |keys, is_insecure| {
        let settings = Settings {
            address,
            keys,
            is_insecure,
            ..Settings::default()
        };
        settings.check()
    };
    assert!(matches!(
        start(ApiKeys::default(), false),
        Err(Error::OpenAddress { .. })
    ));
    assert!(start(ApiKeys::new(["k"]), false).is_ok());
    assert!(start(ApiKeys::default(), true).is_ok());
}

#[test]
fn key_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys");
    let read = |text: &str| {
        std::fs::write(&path, text).expect("a file");
        ApiKeys::read(&path)
    };
    assert_eq!(
        format!("{:?}", read("# mine\n\nalpha\n  beta \n").expect("keys")),
        "ApiKeys(2)"
    );
    assert!(matches!(read("# none\n"), Err(Error::NoKey { .. })));
    assert!(matches!(
        read("a\nb c\n"),
        Err(Error::KeyCharacters { line: 2, .. })
    ));
    assert!(matches!(
        ApiKeys::read(&folder.path().join("no")),
        Err(Error::File { .. })
    ));
}

#[test]
fn pages_of_other_origins_are_let_in_only_if_named() {
    let preflight = |server: &TestServer, origin: &str| {
        let host = server.url.split_once("://").expect("a URL").1;
        let request = format!(
            "OPTIONS {CHAT} HTTP/1.1\r\nhost: {host}\r\norigin: {origin}\r\n\
             access-control-request-method: POST\r\n\
             access-control-request-headers: authorization,content-type\r\nconnection: close\r\n\r\n"
        );
        raw(server, &request).to_ascii_lowercase()
    };
    let allowed = |text: &str| text.contains("access-control-allow-origin");
    let closed = TestServer::scripted(Setup::default());
    assert!(!allowed(&preflight(&closed, "https://a.example")));
    let open = with_settings(|settings| {
        settings.cors_origins = vec!["https://a.example".to_string()];
        settings.keys = ApiKeys::new(["secret"]);
    });
    assert!(allowed(&preflight(&open, "https://a.example")));
    assert!(!allowed(&preflight(&open, "https://b.example")));
    // No browser sends these as an origin.
    for wrong in [
        "a.example",
        "https://a.example/",
        "https://a.example/b",
        "https://",
    ] {
        let mut settings = Setup::default().settings;
        settings.cors_origins = vec![wrong.to_string()];
        let refused = server::Server::start(settings);
        assert!(
            matches!(&refused, Err(Error::CorsOrigin { found }) if found == wrong),
            "{wrong}"
        );
    }
}

#[test]
fn http_errors_have_the_shape_of_all_errors() {
    let server = with_settings(|settings| settings.limits.body_bytes = 1000);
    let json = [("content-type", "application/json")];
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(2000)}]}).to_string();
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let body = chat().to_string();
    for (reply, status, code) in [
        (server.get("/nothing"), 404, "unknown_path"),
        (server.get(CHAT), 405, "method_not_allowed"),
        (
            server.post_text(CHAT, &body, &form),
            415,
            "unsupported_media_type",
        ),
        (server.post_text(CHAT, &long, &json), 413, "body_too_large"),
        (server.get("/v1/models/gpt"), 404, "model_not_found"),
        (
            server.post(CHAT, &json!({"model": "gpt", "messages": []})),
            404,
            "model_not_found",
        ),
    ] {
        assert_eq!(reply.status, status, "{}", reply.text);
        assert_eq!(reply.json()["error"]["code"], code, "{}", reply.text);
    }
    let reply = server.post(CHAT, &json!({"model": "gpt", "messages": []}));
    assert_eq!(
        reply.json()["error"]["message"],
        "model: found gpt, expected nano or other"
    );
}

#[test]
fn a_wrong_path_or_method_is_told_the_right_one() {
    let server = TestServer::scripted(Setup::default());
    for (path, expected) in [
        (
            "/chat/completions",
            "path: found /chat/completions, expected /v1/chat/completions",
        ),
        (
            "/completions",
            "path: found /completions, expected /v1/completions",
        ),
        (
            "/v1/v1/models",
            "path: found /v1/v1/models, expected /v1/models",
        ),
        (
            "/v1/models/",
            "path: found /v1/models/, expected /v1/models",
        ),
        ("/v1/health", "path: found /v1/health, expected /health"),
        (
            "/v1/responses",
            "there is no /v1/responses; /openapi.json lists what there is",
        ),
        ("/", "there is no /; /openapi.json lists what there is"),
        (
            CHAT,
            "/v1/chat/completions: found the method GET, expected what the header Allow says",
        ),
    ] {
        let reply = server.get(path);
        assert_eq!(reply.json()["error"]["message"], expected);
        if path == CHAT {
            assert_eq!(reply.header("allow"), Some("POST"));
        }
    }
}

#[test]
fn requests_have_ids() {
    let server = TestServer::scripted(Setup::default());
    let made = server.get("/health");
    assert!(
        made.header("x-request-id")
            .is_some_and(|id| id.starts_with("req_"))
    );
    let headers = [
        ("content-type", "application/json"),
        ("x-request-id", "mine-7"),
    ];
    let reply = server.post_text(CHAT, &chat().to_string(), &headers);
    assert_eq!(reply.header("x-request-id"), Some("mine-7"));
}

#[test]
fn the_text_side_alone() {
    let server = TestServer::scripted(Setup::default());
    let tokens = server
        .post("/tokenize", &json!({"content": "Hello <|eot|>"}))
        .ok();
    let text = server.post("/detokenize", &tokens).ok();
    assert_eq!(text, json!({"content": "Hello <|eot|>"}));
    let body = json!({"content": "a<|eot|>", "parse_special": true, "add_special": true, "with_pieces": true});
    let parsed = server.post("/tokenize", &body).ok();
    let eot = server.tokenizer.id_of("<|eot|>");
    assert_eq!(
        parsed["tokens"].as_array().and_then(|t| t.last()),
        Some(&json!(eot))
    );
    assert_eq!(
        parsed["pieces"].as_array().and_then(|t| t.last()),
        Some(&json!("<|eot|>"))
    );
    let hidden = server
        .post("/detokenize", &json!({"tokens": parsed["tokens"]}))
        .ok();
    assert_eq!(hidden["content"], "a");
    let shown = json!({"tokens": parsed["tokens"], "keep_special": true});
    assert!(
        server.post("/detokenize", &shown).ok()["content"]
            .as_str()
            .expect("a text")
            .ends_with("a<|eot|>")
    );
    let bad = server.post("/detokenize", &json!({"tokens": [1, 5000]}));
    assert_eq!(
        bad.json()["error"]["message"],
        "tokens[1]: found 5000, expected the id of a token, 0 to 4095"
    );
    let prompt = server.post("/apply-template", &json!({
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "reasoning_effort": "low",
    }));
    assert_eq!(
        prompt.ok()["prompt"],
        "<|begin_of_text|><|start|>system<|message|>Be brief.\n\nReasoning strength: low.\n\n\
         # Valid recipients: \"self\", \"user\".<|eot|><|start|>user<|message|>Hi<|eot|><|start|>assistant"
    );
}

#[test]
fn what_is_served_is_told() {
    let server = TestServer::scripted(Setup::default());
    let models = server.get("/v1/models").ok();
    let ids: Vec<&Value> = models["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|m| &m["id"])
        .collect();
    assert_eq!(ids, ["nano", "other"]);
    assert_eq!(server.get("/v1/models/other").ok()["context_length"], 2048);
    assert_eq!(server.get("/health").ok(), json!({"status": "ready"}));
    let document = server.get("/openapi.json").ok();
    let mut paths: Vec<&String> = document["paths"]
        .as_object()
        .expect("paths")
        .keys()
        .collect();
    paths.sort();
    assert_eq!(
        paths,
        [
            "/apply-template",
            "/detokenize",
            "/health",
            "/metrics",
            "/tokenize",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/models",
            "/v1/models/{model}",
        ]
    );
    server.script(server.turn(" to=user<|message|>Hi.<|eot|>"));
    server.post(CHAT, &chat()).ok();
    server.wait_for("idle", |m| m.running == 0 && m.completed == 1);
    let metrics = server.get("/metrics").text;
    for line in [
        "muser_jobs_total 1",
        "muser_jobs_completed_total 1",
        "muser_sequences_running 0",
        "muser_http_requests_total{route=\"/v1/chat/completions\",status=\"200\"} 1",
        "muser_first_token_seconds_count 1",
    ] {
        assert!(
            metrics.lines().any(|found| found == line),
            "{line} in {metrics}"
        );
    }
    assert!(metrics.ends_with("# EOF\n"));
}

#[test]
fn a_server_listens_before_its_model_is_loaded() {
    let server = server::Server::start(Setup::default().settings).expect("a server");
    let url = format!("http://{}", server.address());
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .build()
        .into();
    for (path, expected) in [
        ("/health", "starting"),
        ("/v1/models", "the model is loading"),
    ] {
        let mut reply = agent.get(format!("{url}{path}")).call().expect("an answer");
        assert_eq!(reply.status(), 503);
        let text = reply.body_mut().read_to_string().expect("a text");
        assert!(text.contains(expected), "{text}");
    }
    let stopper = server.stopper();
    stopper.stop();
    server.wait().expect("an end in order");
}

#[test]
fn a_drain_lets_answers_end_and_a_second_stop_cuts_them() {
    for is_cut in [false, true] {
        let server = TestServer::scripted(Setup::default());
        let turn = server.turn(&format!(
            " to=user<|message|>{}<|eot|>",
            "word ".repeat(200)
        ));
        server.slow_script(turn, Duration::from_millis(20));
        let mut body = chat();
        body["stream"] = json!(true);
        let mut lines = server.open(CHAT, &body);
        assert!(lines.next().expect("a line").starts_with("data: "));
        server.stopper.stop();
        while server.get("/health").status == 200 {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(server.get("/health").json()["status"], "draining");
        let refused = server.post(CHAT, &chat());
        assert_eq!(refused.status, 503);
        assert_eq!(refused.json()["error"]["code"], "draining");
        assert_eq!(refused.header("retry-after"), Some("1"));
        if is_cut {
            server.stopper.stop();
        }
        let last = lines.last().expect("a last line");
        match is_cut {
            false => assert_eq!(last, "data: [DONE]"),
            true => assert!(last.contains("\"code\":\"stopping\""), "{last}"),
        }
        server.join().expect("an end in order");
    }
}

#[test]
fn a_full_queue_is_429() {
    let mut setup = Setup::default();
    (setup.engine.sequences, setup.engine.queue) = (1, 0);
    let server = TestServer::scripted(setup);
    let turn = server.turn(&format!(
        " to=user<|message|>{}<|eot|>",
        "word ".repeat(200)
    ));
    server.slow_script(turn, Duration::from_millis(20));
    let mut body = chat();
    body["stream"] = json!(true);
    let mut lines = server.open(CHAT, &body);
    lines.next().expect("a line");
    let refused = server.post(CHAT, &chat());
    assert_eq!(refused.status, 429, "{}", refused.text);
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    drop(lines);
    server.wait_for("cancelled", |m| m.running == 0 && m.cancelled == 1);
}

#[test]
fn a_deadline_is_an_error_and_frees_its_place() {
    let server = TestServer::scripted(Setup::default());
    let turn = server.turn(&format!(
        " to=user<|message|>{}<|eot|>",
        "word ".repeat(500)
    ));
    server.slow_script(turn.clone(), Duration::from_millis(20));
    let mut body = chat();
    body["deadline_ms"] = json!(200);
    let reply = server.post(CHAT, &body);
    assert_eq!(reply.status, 504, "{}", reply.text);
    assert_eq!(
        reply.json()["error"]["message"],
        "the answer was not complete 200 ms after the request"
    );
    server.slow_script(turn, Duration::from_millis(20));
    body["stream"] = json!(true);
    let last = server.open(CHAT, &body).last().expect("a line");
    assert!(last.contains("\"code\":\"deadline_exceeded\""), "{last}");
    server.wait_for("expired", |m| m.running == 0 && m.expired == 2);
}

#[test]
fn the_earlier_of_two_deadlines_holds() {
    let server = with_settings(|settings| {
        settings.limits.deadline = Some(Duration::from_millis(200));
    });
    let turn = format!(" to=user<|message|>{}<|eot|>", "word ".repeat(500));
    server.slow_script(server.turn(&turn), Duration::from_millis(20));
    let mut body = chat();
    body["deadline_ms"] = json!(600_000);
    let reply = server.post(CHAT, &body);
    assert_eq!(reply.status, 504, "{}", reply.text);
    assert!(reply.text.contains(" 200 ms after"), "{}", reply.text);
}

#[test]
fn a_client_that_does_not_read_is_given_up() {
    let server = with_settings(|settings| {
        settings.limits = Limits {
            reader_grace: Duration::from_millis(200),
            ..Limits::default()
        };
    });
    let turn = server.turn(&format!(
        " to=user<|message|>{}<|eot|>",
        "word ".repeat(1800)
    ));
    server.slow_script(turn, Duration::from_millis(5));
    // Much to read, so that no buffer on the way holds all of it.
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": true, "n": 16, "logprobs": true, "top_logprobs": 20,
    })
    .to_string();
    let address = server.url.split_once("://").expect("a URL").1;
    let mut stream = TcpStream::connect(address).expect("a connection");
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).expect("sent");
    server.wait_for("given up", |m| m.cancelled == 1 && m.running == 0);
}

#[test]
fn a_row_that_is_no_number_fails_its_request_alone() {
    let server = TestServer::scripted(Setup::default());
    server.break_down(Fault::NotFinite);
    let reply = server.post(CHAT, &chat());
    assert_eq!(reply.status, 500, "{}", reply.text);
    assert!(reply.text.contains("are not finite"), "{}", reply.text);
    server.script(server.turn(" to=user<|message|>Hi.<|eot|>"));
    assert_eq!(server.post(CHAT, &chat()).status, 200);
}

#[test]
fn a_device_that_is_lost_ends_the_server() {
    let server = TestServer::scripted(Setup::default());
    server.break_down(Fault::DeviceLost);
    let reply = server.post(CHAT, &chat());
    assert_eq!(reply.status, 500, "{}", reply.text);
    assert_eq!(
        reply.json()["error"]["message"],
        "the device failed: unplugged"
    );
    match server.join() {
        Err(Error::Unhealthy { why }) => assert!(why.contains("unplugged"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn headers_and_bodies_have_their_time() {
    let server = with_settings(|settings| {
        settings.limits.header_timeout = Duration::from_secs(2);
        settings.limits.body_timeout = Duration::from_millis(300);
    });
    let host = server.url.split_once("://").expect("a URL").1.to_string();
    // Half a head: the connection is closed, with or without a word.
    let reply = raw(
        &server,
        &format!("GET /health HTTP/1.1\r\nhost: {host}\r\n"),
    );
    assert!(!reply.contains("200 OK"), "{reply}");
    // Half a body.
    let half = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n\
         content-length: 100\r\n\r\n{{"
    );
    let reply = raw(&server, &half);
    assert!(reply.starts_with("HTTP/1.1 408 "), "{reply}");
    assert!(reply.contains("body_timeout"), "{reply}");
}

/// Also where not even the version of HTTP is clear yet.
#[test]
fn a_connection_that_asks_for_nothing_is_closed() {
    let server = with_settings(|settings| {
        settings.limits.header_timeout = Duration::from_millis(300);
    });
    let address = server.url.split_once("://").expect("a URL").1;
    for beginning in ["", "P", "PRI * HTTP/2.0\r\n", "GET /health HTTP/1.1\r\n"] {
        let mut stream = TcpStream::connect(address).expect("a connection");
        let patience = Duration::from_secs(60);
        stream.set_read_timeout(Some(patience)).expect("a timeout");
        stream.write_all(beginning.as_bytes()).expect("sent");
        let mut bytes = Vec::new();
        let ended = stream.read_to_end(&mut bytes);
        assert!(ended.is_ok(), "{beginning:?}: {ended:?}");
        assert!(!bytes.starts_with(b"HTTP/1.1 200"), "{beginning:?}");
    }
}

#[test]
fn tls_by_certificate_and_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let made =
        rcgen::generate_simple_self_signed(["localhost".to_string()]).expect("a certificate");
    let files = TlsFiles {
        certificate: folder.path().join("cert.pem"),
        key: folder.path().join("key.pem"),
    };
    std::fs::write(&files.certificate, made.cert.pem()).expect("a file");
    std::fs::write(&files.key, made.signing_key.serialize_pem()).expect("a file");
    let server = with_settings(|settings| settings.tls = Some(files.clone()));
    // Plain HTTP gets nowhere: the first bytes back are a TLS alert or nothing.
    let address = server.url.split_once("://").expect("a URL").1;
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream
        .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .expect("sent");
    let mut bytes = Vec::new();
    // An aborted connection is as good an answer.
    let _ = stream.read_to_end(&mut bytes);
    assert!(!bytes.starts_with(b"HTTP"));
    assert_eq!(handshake(address, &made.cert.pem()), "HTTP/1.1 200 OK");

    std::fs::write(&files.key, "no key").expect("a file");
    let mut settings = Setup::default().settings;
    settings.tls = Some(files);
    assert!(matches!(
        server::Server::start(settings),
        Err(Error::Pem { .. })
    ));
}

/// The status line of `/health` over TLS.
fn handshake(address: &str, certificate: &str) -> String {
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
    use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes());
    roots
        .add(certificate.expect("a certificate"))
        .expect("a root");
    let provider = tokio_rustls::rustls::crypto::ring::default_provider();
    let config = ClientConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let connection = ClientConnection::new(config.into(), name).expect("a client");
    let stream = TcpStream::connect(address).expect("a connection");
    let mut stream = StreamOwned::new(connection, stream);
    stream
        .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .expect("sent");
    let mut text = String::new();
    // A peer that closes without a word of TLS is no matter here.
    let _ = stream.read_to_string(&mut text);
    text.lines().next().unwrap_or_default().to_string()
}
