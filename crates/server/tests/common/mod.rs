//! A server over real TCP in this process, and a model that says what it is
//! told.

#![allow(dead_code)] // each test uses a part of it

use engine::{Handle, SamplerSettings, Service};
use gguf::Gguf;
use model::backend::PageData;
use model::kv::PageCopy;
use model::{
    Batch, Capacity, Caps, Config, DeviceError, DraftRequest, DrafterConfig, Forward, KvType,
    Model, Options, Outputs, PageClass, PageId, Reference, Tables, Want, WindowConvention, select,
};
use serde_json::Value;
use server::{ModelParts, Server, Settings, Stopper};
use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use text::{ChatTemplate, ControlTokens, Special, Tokenizer};

/// What the model is asked for in most tests.
pub const CHAT: &str = "/v1/chat/completions";

/// The bundled model's file.
pub fn file() -> Gguf {
    testing::open(&testing::bundled("nano-glimmer-q8_0.gguf"))
}

/// The bundled model itself.
pub fn nano(kv_bytes: u64) -> Box<dyn Forward> {
    let options = Options {
        kv: KvType::F16,
        kv_bytes,
    };
    let model = Model::load(Reference::new(), &file(), options);
    Box::new(model.unwrap_or_else(|e| panic!("{e}")))
}

/// What a scripted model says next.
#[derive(Debug, Default)]
pub struct Script {
    /// The tokens of the next answer.
    tokens: Vec<u32>,
    /// Position of the row whose output is the first of them.
    base: Option<u32>,
    /// What each pass takes.
    pause: Duration,
    /// What goes wrong.
    fault: Option<Fault>,
}

/// What a pass can meet.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// A row of logits that are no numbers.
    NotFinite,
    /// The device is gone.
    DeviceLost,
}

/// A model that plays back tokens, whatever it reads.
struct Scripted {
    config: Config,
    script: Arc<Mutex<Script>>,
    end: u32,
}

impl Forward for Scripted {
    fn config(&self) -> &Config {
        &self.config
    }

    fn caps(&self) -> Caps {
        Caps {
            device: "script".to_string(),
            max_rows: 512,
            same_bits_rows: 512,
        }
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            layout: self.config.kv_layout(KvType::F16),
            max_slabs: 64,
            activation_bytes: 0,
        }
    }

    fn pass(
        &mut self,
        batch: &Batch,
        _: &Tables<'_>,
        want: &[Want],
    ) -> Result<Outputs, model::Error> {
        let mut script = self.script.lock().expect("a script");
        std::thread::sleep(script.pause);
        if let Some(Fault::DeviceLost) = script.fault {
            return Err(DeviceError::Lost("unplugged".to_string()).into());
        }
        let row = |(&row, &want): (&u32, &Want)| {
            let pos = batch.rows[row as usize].pos;
            let place = pos - *script.base.get_or_insert(pos);
            let token = script.tokens.get(place as usize).copied();
            let mut logits = vec![0.0; self.config.n_vocab];
            logits[token.unwrap_or(self.end) as usize] = match script.fault {
                Some(_) => f32::NAN,
                None => 10.0,
            };
            select(&logits, want)
        };
        Ok(batch.wanted.iter().zip(want).map(row).collect())
    }

    fn attach_drafter(
        &mut self,
        _: &Gguf,
        _: WindowConvention,
    ) -> Result<DrafterConfig, model::Error> {
        panic!("a script has no drafter")
    }

    fn draft(
        &mut self,
        _: &[DraftRequest],
        _: &Tables<'_>,
        _: Want,
    ) -> Result<Vec<Outputs>, model::Error> {
        panic!("a script has no drafter")
    }

    fn export_page(
        &mut self,
        class: PageClass,
        page: PageId,
        _: usize,
    ) -> Result<PageData, model::Error> {
        Err(model::Error::PageUnknown { class, page })
    }

    fn import_page(
        &mut self,
        class: PageClass,
        page: PageId,
        _: &PageData,
    ) -> Result<(), model::Error> {
        Err(model::Error::PageUnknown { class, page })
    }

    fn copy_pages(&mut self, _: &[PageCopy]) -> Result<(), model::Error> {
        Ok(())
    }
}

/// What a test server is made of.
pub struct Setup {
    pub settings: Settings,
    pub engine: engine::Settings,
    pub defaults: SamplerSettings,
    pub has_template: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            settings: Settings {
                address: ([127, 0, 0, 1], 0).into(),
                ..Settings::default()
            },
            engine: engine::Settings {
                prefix_cache_bytes: 64 << 20,
                ..engine::Settings::default()
            },
            defaults: SamplerSettings {
                temperature: 0.0,
                ..SamplerSettings::default()
            },
            has_template: true,
        }
    }
}

/// A running server.
pub struct TestServer {
    pub url: String,
    pub agent: ureq::Agent,
    pub stopper: Stopper,
    pub handle: Handle,
    pub tokenizer: Arc<Tokenizer>,
    script: Arc<Mutex<Script>>,
    thread: Option<JoinHandle<Result<(), server::Error>>>,
}

/// An answer as it came.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// The JSON of an answer that is one.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The objects of a stream, which must end as streams do.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text);
        let lines = self
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "));
        let mut lines: Vec<&str> = lines.collect();
        assert_eq!(lines.pop(), Some("[DONE]"), "{}", self.text);
        let json =
            |line: &&str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        lines.iter().map(json).collect()
    }
}

impl TestServer {
    /// Serves a scripted model.
    pub fn scripted(setup: Setup) -> TestServer {
        let file = file();
        let config = Config::from_metadata(file.metadata()).expect("a configuration");
        let tokenizer = Tokenizer::from_metadata(file.metadata()).expect("a tokenizer");
        let script = Arc::new(Mutex::new(Script::default()));
        let model = Scripted {
            config,
            script: Arc::clone(&script),
            end: tokenizer.id_of("<|eot|>").expect("an end"),
        };
        TestServer::start(setup, Box::new(model), script)
    }

    /// Serves the bundled model.
    pub fn nano(setup: Setup, kv_bytes: u64) -> TestServer {
        TestServer::start(setup, nano(kv_bytes), Arc::default())
    }

    fn start(setup: Setup, model: Box<dyn Forward>, script: Arc<Mutex<Script>>) -> TestServer {
        let file = file();
        let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata()).expect("a tokenizer"));
        let source = file
            .metadata()
            .str("tokenizer.chat_template")
            .expect("a text");
        let template = ChatTemplate::from_file(source, ControlTokens::of(&tokenizer));
        let is_tls = setup.settings.tls.is_some();
        let server = Server::start(setup.settings).unwrap_or_else(|e| panic!("{e}"));
        let service = Service::start(model, setup.engine).unwrap_or_else(|e| panic!("{e}"));
        let handle = service.handle();
        let parts = ModelParts {
            names: vec!["nano".to_string(), "other".to_string()],
            tokenizer: Arc::clone(&tokenizer),
            template: setup.has_template.then(|| template.expect("a template")),
            defaults: setup.defaults,
            handle: handle.clone(),
            date: Some("2026-11-30".parse().expect("a date")),
            reasoning: None,
            seed: None,
            identity: [7; 32],
        };
        server.serve(parts).unwrap_or_else(|e| panic!("{e}"));
        let scheme = if is_tls { "https" } else { "http" };
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        TestServer {
            url: format!("{scheme}://{}", server.address()),
            agent: config.build().into(),
            stopper: server.stopper(),
            handle,
            tokenizer,
            script,
            thread: Some(std::thread::spawn(move || {
                let outcome = server.wait();
                // What the engine failed of is what the server failed of.
                assert_eq!(service.join().is_err(), outcome.is_err());
                outcome
            })),
        }
    }

    /// What the model says to this chat request. Unlike [`TestServer::script`] it
    /// also says where it goes on behind tokens that are forced from the start.
    pub fn script_for(&self, body: &Value, tokens: &[u32]) {
        let prompt = self.post("/apply-template", body).ok();
        let n_prompt = prompt["tokens"].as_array().expect("tokens").len();
        *self.script.lock().expect("a script") = Script {
            tokens: tokens.to_vec(),
            base: Some(n_prompt as u32 - 1),
            ..Script::default()
        };
    }

    /// What goes wrong from now on.
    pub fn break_down(&self, fault: Fault) {
        self.script.lock().expect("a script").fault = Some(fault);
    }

    /// What the model says next.
    pub fn script(&self, tokens: Vec<u32>) {
        self.slow_script(tokens, Duration::ZERO);
    }

    /// As [`TestServer::script`], where each pass takes a while.
    pub fn slow_script(&self, tokens: Vec<u32>, pause: Duration) {
        *self.script.lock().expect("a script") = Script {
            tokens,
            pause,
            ..Script::default()
        };
    }

    /// The tokens of a turn whose control tokens are spelled.
    pub fn turn(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, Special::Parse)
    }

    /// As [`TestServer::turn`], with a token for each byte of text.
    pub fn turn_in_bytes(&self, text: &str) -> Vec<u32> {
        let of_byte = |byte: u8| {
            let mut ids = 0..self.tokenizer.n_vocab() as u32;
            let is_it = |id: &u32| self.tokenizer.token_bytes(*id) == Some(&[byte]);
            ids.find(is_it)
                .unwrap_or_else(|| panic!("no token for byte {byte}"))
        };
        let mut tokens = Vec::new();
        for id in self.turn(text) {
            match self.tokenizer.token_bytes(id) {
                Some(bytes @ [_, ..]) => tokens.extend(bytes.iter().map(|&byte| of_byte(byte))),
                _ => tokens.push(id),
            }
        }
        tokens
    }

    pub fn get(&self, path: &str) -> Reply {
        let sent = self.agent.get(format!("{}{path}", self.url)).call();
        reply(sent.unwrap_or_else(|e| panic!("{e}")))
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_text(
            path,
            &body.to_string(),
            &[("content-type", "application/json")],
        )
    }

    pub fn post_text(&self, path: &str, body: &str, headers: &[(&str, &str)]) -> Reply {
        let mut request = self.agent.post(format!("{}{path}", self.url));
        for &(name, value) in headers {
            request = request.header(name, value);
        }
        reply(request.send(body).unwrap_or_else(|e| panic!("{e}")))
    }

    /// The lines of an answer as they come; dropping it breaks off.
    pub fn open(&self, path: &str, body: &Value) -> impl Iterator<Item = String> + use<> {
        let request = self.agent.post(format!("{}{path}", self.url));
        let request = request.header("content-type", "application/json");
        let sent = request
            .send(body.to_string())
            .unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(sent.status(), 200);
        let lines = BufReader::new(sent.into_body().into_reader()).lines();
        lines.map_while(Result::ok).filter(|line| !line.is_empty())
    }

    /// Waits until the engine's numbers are as they should be.
    pub fn wait_for(&self, what: &str, is_so: impl Fn(&engine::Metrics) -> bool) {
        for _ in 0..6000 {
            if is_so(&self.handle.metrics()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("never {what}: {:?}", self.handle.metrics());
    }

    /// Waits for the end.
    pub fn join(mut self) -> Result<(), server::Error> {
        let thread = self.thread.take().expect("a running server");
        thread.join().expect("no panic")
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stopper.stop();
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.expect("no panic").unwrap_or_else(|e| panic!("{e}"));
            }
        }
    }
}

fn reply(response: http::Response<ureq::Body>) -> Reply {
    let (parts, body) = response.into_parts();
    let mut text = String::new();
    let mut reader = body.into_reader();
    reader
        .read_to_string(&mut text)
        .unwrap_or_else(|e| panic!("{e}"));
    Reply {
        status: parts.status.as_u16(),
        headers: parts.headers,
        text,
    }
}

/// What the deltas of a stream say about one choice, as a message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    pub reasoning: String,
    pub content: String,
    /// Name and arguments.
    pub calls: Vec<(String, Value)>,
    pub finish: String,
    /// Tokens and their log-probabilities.
    pub logprobs: Vec<(String, f64)>,
}

impl Said {
    /// From a complete answer.
    pub fn of_answer(answer: &Value, choice: usize) -> Said {
        let choice = &answer["choices"][choice];
        let mut said = Said::default();
        said.add(&choice["message"], choice);
        said
    }

    /// From the objects of a stream.
    pub fn of_events(events: &[Value], index: usize) -> Said {
        let mut said = Said::default();
        for choice in events
            .iter()
            .flat_map(|e| e["choices"].as_array())
            .flatten()
        {
            if choice["index"] == index {
                said.add(&choice["delta"], choice);
            }
        }
        said
    }

    fn add(&mut self, message: &Value, choice: &Value) {
        self.reasoning += message["reasoning_content"].as_str().unwrap_or_default();
        self.content += message["content"].as_str().unwrap_or_default();
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let arguments = call["function"]["arguments"].as_str().expect("a string");
            self.calls.push((
                call["function"]["name"]
                    .as_str()
                    .expect("a name")
                    .to_string(),
                serde_json::from_str(arguments).expect("arguments are JSON"),
            ));
            assert!(call["id"].as_str().expect("an id").starts_with("call_"));
        }
        if let Some(finish) = choice["finish_reason"].as_str() {
            assert_eq!(self.finish, "", "one reason");
            self.finish = finish.to_string();
        }
        for token in choice["logprobs"]["content"]
            .as_array()
            .into_iter()
            .flatten()
        {
            self.logprobs.push((
                token["token"].as_str().expect("a text").to_string(),
                token["logprob"].as_f64().expect("a number"),
            ));
        }
    }
}
