//! A running `muser serve`, and requests to it.
//!
//! Requests block their thread: a client here is a thread, which costs the machine under test less than a runtime would.

use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;
use ureq::Agent;

use crate::{Outcome, command};

/// How long an answer may take: a hang is an error, not a stuck run.
const PATIENCE: Duration = Duration::from_secs(300);

/// A server of this checkout, stopped when dropped.
pub struct Server {
    child: Child,
    url: String,
}

/// Connections to a server.
#[derive(Clone)]
pub struct Client {
    agent: Agent,
    url: String,
}

/// What came back of a streamed request.
#[derive(Debug, PartialEq)]
pub enum Streamed {
    /// The stream ended as it should.
    Done,
    /// The caller broke off.
    BrokenOff,
    /// The server refused: status and body.
    Refused(u16, String),
}

/// How Muser is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// As the tests are: with assertions.
    Checked,
    /// As it is measured.
    Release,
}

impl Build {
    /// Builds Muser; gives the path of the program.
    ///
    /// # Errors
    /// It cannot be built.
    pub fn muser(self, root: &Path) -> Outcome<PathBuf> {
        let (profile, folder) = match self {
            Build::Checked => (&[][..], "debug"),
            Build::Release => (&["--release"][..], "release"),
        };
        let arguments = [&["build", "--package", "muser"], profile].concat();
        command::run(&mut command::command(root, "cargo", &arguments))?;
        Ok(root.join("target").join(folder).join("muser"))
    }
}

impl Server {
    /// Builds Muser and starts a server with `arguments` on a free port.
    ///
    /// # Errors
    /// It cannot be built, or ends before it is ready.
    pub fn start(root: &Path, build: Build, arguments: &[&str]) -> Outcome<Server> {
        let program = build.muser(root)?;
        let all = [&["serve", "--port", "0", "--json"], arguments].concat();
        let mut child = command::command(root, &program.to_string_lossy(), &all)
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().ok_or("a pipe from the server")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        if line.is_empty() {
            return Err(format!("the server ended before it was ready: {}", child.wait()?).into());
        }
        let ready: Value = serde_json::from_str(&line)?;
        let url = ready["url"].as_str().ok_or("the server says no url")?;
        Ok(Server {
            child,
            url: url.to_owned(),
        })
    }

    /// A client of its own connections.
    pub fn client(&self) -> Client {
        let config = Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .build();
        Client {
            agent: config.into(),
            url: self.url.clone(),
        }
    }

    /// Memory of the process beside mapped files, in bytes.
    ///
    /// # Errors
    /// The system does not say.
    pub fn memory_bytes(&self) -> Outcome<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        Ok(kib.ok_or("no RssAnon")?.trim().parse::<u64>()? * 1024)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Nothing it still does is of interest.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Client {
    /// Sends `body` and gives each event of the stream to `event`, until it breaks off.
    ///
    /// # Errors
    /// The connection fails, or the stream ends without `[DONE]`.
    pub fn stream(
        &self,
        path: &str,
        body: &Value,
        mut event: impl FnMut(&Value) -> ControlFlow<()>,
    ) -> Outcome<Streamed> {
        let request = self.agent.post(format!("{}{path}", self.url));
        let request = request.header("content-type", "application/json");
        let mut response = request.send(body.to_string())?;
        let status = response.status().as_u16();
        if status != 200 {
            return Ok(Streamed::Refused(
                status,
                response.body_mut().read_to_string()?,
            ));
        }
        for line in BufReader::new(response.body_mut().as_reader()).lines() {
            let line = line?;
            let Some(data) = line.strip_prefix("data: ") else {
                continue;
            };
            if data == "[DONE]" {
                return Ok(Streamed::Done);
            }
            if event(&serde_json::from_str(data)?).is_break() {
                return Ok(Streamed::BrokenOff);
            }
        }
        Err("the stream ended without [DONE]".into())
    }

    /// A number of `/metrics` by name, without the prefix of the program.
    ///
    /// # Errors
    /// There is no such number.
    pub fn metric(&self, name: &str) -> Outcome<f64> {
        let mut response = self.agent.get(format!("{}/metrics", self.url)).call()?;
        let text = response.body_mut().read_to_string()?;
        let full = format!("muser_{name} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&full));
        let number = line.ok_or_else(|| format!("/metrics has no {full}"))?;
        Ok(number.trim().parse()?)
    }
}
