"""Talks to `muser serve` with the real `openai` package, runs the curl examples of docs/, and lets schemathesis
make requests of /openapi.json.

Run by `cargo xtask client`, which builds the server and installs the packages. The model is the bundled
nano-glimmer: answers are judged by their form, never by their wit.

    python openai_client.py target/release/muser
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import traceback

import openai

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEY = "key-of-the-tests"
# Those of schemathesis that hold: unknown fields are let through, so what it takes for wrong may be answered.
RESPONSE_CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Server:
    """A running `muser serve`."""

    def __init__(self, program, *flags):
        command = [program, "serve", "--port", "0", "--json", "--log-level", "warn", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(command)} did not start")
        self.start = json.loads(line)
        self.url = self.start["url"]

    def client(self, key=KEY):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(60) == 0, "the server did not end in order"


def user(text):
    return [{"role": "user", "content": text}]


def plain(client):
    answer = client.chat.completions.create(
        model="nano-glimmer", messages=user("Tell me a story."), max_completion_tokens=40, reasoning_effort="low"
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 40
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    again = client.chat.completions.create(
        model="nano-glimmer", messages=user("Tell me a story."), max_completion_tokens=1, reasoning_effort="low"
    )
    assert again.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1


def stream(client):
    def ask(**more):
        return client.chat.completions.create(
            model="nano-glimmer", messages=user("Tell me about a dog."), seed=3, max_tokens=40, **more
        )

    whole = ask().choices[0]
    content, reasoning, reasons, usage = "", "", [], None
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    assert content == (whole.message.content or "")
    assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
    assert reasons == [whole.finish_reason]
    assert usage.completion_tokens_details.reasoning_tokens > 0


def tools_round_trip(client):
    messages = user("How is the weather in Paris?")
    answer = client.chat.completions.create(
        model="nano-glimmer", messages=messages, tools=[WEATHER], tool_choice="required", temperature=0
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls[:1]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather"
    assert arguments["city"] in ("Paris", "Rome") and isinstance(arguments["days"], int), arguments
    messages.append(choice.message)
    for call in choice.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."})
    answer = client.chat.completions.create(
        model="nano-glimmer", messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=40
    )
    assert not answer.choices[0].message.tool_calls
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def json_schema(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="nano-glimmer",
        messages=user("Who are you?"),
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
        extra_body={"reasoning_budget": 20},
        max_tokens=200,
    )
    assert answer.choices[0].finish_reason == "stop", answer
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and 1 <= person["age"] <= 99 and len(person["name"]) <= 10, person


def logprobs(client):
    answer = client.chat.completions.create(
        model="nano-glimmer",
        messages=user("Hello"),
        logprobs=True,
        top_logprobs=3,
        temperature=0,
        max_tokens=60,
        extra_body={"reasoning_budget": 10},
    )
    choice = answer.choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        ranked = [other.logprob for other in token.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)


def three_choices(client):
    answer = client.chat.completions.create(
        model="nano-glimmer", messages=user("Tell me a story."), n=3, seed=1, temperature=1.0, max_tokens=30
    )
    said = [(getattr(c.message, "reasoning_content", None), c.message.content) for c in answer.choices]
    assert len(set(said)) == 3 and [c.index for c in answer.choices] == [0, 1, 2]


def completions(client):
    answer = client.completions.create(
        model="nano-glimmer", prompt=["Once upon a time", "The sea"], max_tokens=8, logprobs=2, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
    chunks = client.completions.create(
        model="nano-glimmer", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def models(client):
    (model,) = client.models.list().data
    assert model.id == "nano-glimmer"
    assert client.models.retrieve("nano-glimmer").owned_by == "muser"


def errors(client):
    def fails(kind, code, **fields):
        request = {"model": "nano-glimmer", "messages": user("x"), **fields}
        try:
            client.chat.completions.create(**request)
        except kind as error:
            assert error.code == code, error
        else:
            raise AssertionError(f"{fields} was answered")

    fails(openai.BadRequestError, "invalid_value", top_p=2)
    fails(openai.BadRequestError, "unsupported_parameter", store=True)
    fails(openai.BadRequestError, "context_length_exceeded", messages=user("word " * 5000))
    fails(openai.NotFoundError, "model_not_found", model="gpt-4o")
    try:
        openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0).models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key"
    else:
        raise AssertionError("a wrong key was let in")


def examples(url):
    """The curl examples of the documentation, each with JSON or lines of text as its answer."""
    n = 0
    for page in ("server.md", "prefix-cache.md"):
        text = (ROOT / "docs" / page).read_text()
        for block in re.findall(r"```sh\n(.*?)```", text, re.S):
            if "curl" not in block:
                continue
            n += 1
            script = block.replace("http://127.0.0.1:8080", url).replace("curl ", "curl --silent --show-error --fail ")
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True)
            assert done.returncode == 0 and done.stdout, f"{page}: {block}\n{done.stderr}"
    assert n >= 3, "examples are missing"


def schemathesis(url):
    """Requests made of the interface's own document: none may hang or meet an error of the server, and what comes back
    is what the document says: its status, its type, its headers, its form."""
    # A request that sets itself a deadline has asked for 504.
    config = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]\n'
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "schemathesis.toml"
        path.write_text(config)
        command = [pathlib.Path(sys.executable).with_name("schemathesis"), "--config-file", path, "run"]
        command += [f"{url}/openapi.json", "--checks", ",".join(RESPONSE_CHECKS), "--seed", "1", "--max-examples", "25"]
        command += ["--request-timeout", "60", "--workers", "4", "--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def main():
    program = sys.argv[1]
    checks = [plain, stream, tools_round_trip, json_schema, logprobs, three_choices, completions, models, errors]
    n_failed = 0

    def check(name, run):
        nonlocal n_failed
        try:
            run()
            print(f"test {name} ... ok")
        except Exception:
            n_failed += 1
            print(f"test {name} ... FAILED")
            traceback.print_exc(file=sys.stdout)

    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write(f"{KEY}\n")
        keys.flush()
        server = Server(program, "--api-key-file", keys.name)
        for run in checks:
            check(run.__name__, lambda run=run: run(server.client()))
        check("an end in order", server.stop)
    server = Server(program, "--deadline", "20")
    check("examples", lambda: examples(server.url))
    check("schemathesis", lambda: schemathesis(server.url))
    server.stop()
    n_passed = len(checks) + 3 - n_failed
    print(f"test result: {'FAILED' if n_failed else 'ok'}. {n_passed} passed; {n_failed} failed;")
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
