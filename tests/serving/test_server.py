"""A real server process and the real client: what people do with it, and what goes wrong."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from examples.serve_real import generated, served

from tests.serving.models import save_routed

pytestmark = pytest.mark.serving

METHOD = "depth-attention"
TOKENS = 12


class Served:
    def __init__(self, folder: Path, model, address: str) -> None:
        import openai
        from transformers import AutoTokenizer

        self.folder, self.model, self.address = str(folder), model, address
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

    def complete(self, prompt, **options):
        options = {"max_tokens": TOKENS, "temperature": 0, "seed": 0} | options
        return self.client.completions.create(model=self.folder, prompt=prompt, **options)

    def expected(self, prompt: str, tokens: int = TOKENS) -> str:
        ids = self.tokenizer(prompt).input_ids
        (answer,) = generated(self.model, [ids], tokens)
        return self.tokenizer.decode(answer["tokens"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("server")
    model = save_routed(tmp / "model", "llama", METHOD)
    options = ["--max-model-len", "120", "--enforce-eager"]
    with served(tmp / "model", "vllm", *options, log=tmp / "log") as started:
        server = Served(tmp / "model", model, started.url)
        with server.client:
            yield server


def words(numbers) -> str:
    return " ".join(f"w{i}" for i in numbers)


def test_a_completion_is_what_generate_says(server):
    prompt = words(range(9))
    answer = server.complete(prompt, extra_body={"ignore_eos": True})
    assert answer.choices[0].text.split() == server.expected(prompt).split()
    assert answer.usage.completion_tokens == TOKENS


def test_log_probabilities_are_those_of_generate(server):
    prompt = words(range(20, 30))
    answer = server.complete(prompt, logprobs=1, extra_body={"ignore_eos": True})
    ids = server.tokenizer(prompt).input_ids
    (wanted,) = generated(server.model, [ids], TOKENS)
    logprobs = answer.choices[0].logprobs.token_logprobs
    assert logprobs == pytest.approx(wanted["log_probabilities"], abs=1e-3)


def test_a_stream_adds_up_to_the_answer(server):
    prompt = words(range(40, 47))
    chunks = [c.choices[0].text for c in server.complete(prompt, stream=True) if c.choices]
    assert len(chunks) > 1
    assert "".join(chunks) == server.complete(prompt).choices[0].text


def test_a_chat_answers_as_its_template_written_out(server):
    message = {"role": "user", "content": words(range(5, 11))}
    chat = server.client.chat.completions.create(
        model=server.folder, messages=[message], max_tokens=TOKENS, temperature=0
    )
    written_out = server.complete(message["content"] + " ")
    assert chat.choices[0].message.content.strip() == written_out.choices[0].text.strip()


def test_a_stop_word_ends_the_answer_before_it(server):
    prompt = words(range(9))
    whole = server.complete(prompt).choices[0].text
    stop = whole.split()[3]
    answer = server.complete(prompt, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]


def test_concurrent_requests_are_answered_as_alone(server):
    prompts = [words((7 * i + j) % 93 for j in range(1 + i % 60)) for i in range(40)]
    alone = [server.complete(prompt).choices[0].text for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        together = [a.choices[0].text for a in pool.map(server.complete, prompts)]
    assert together == alone


def test_a_client_that_leaves_harms_nobody(server):
    prompt = words(range(3))
    whole = server.complete(prompt).choices[0].text
    stream = server.complete(words(range(30)), stream=True, max_tokens=80)
    next(iter(stream))
    stream.close()
    assert server.complete(prompt).choices[0].text == whole


def test_a_prompt_that_is_too_long_is_refused_with_the_length(server):
    import openai

    with pytest.raises(openai.BadRequestError, match="120"):
        server.complete(words(i % 93 for i in range(200)))


def test_garbage_is_refused_and_the_server_lives_on(server):
    for body in (b"", b"{", b"[1]", json.dumps({"prompt": 3, "model": {}}).encode(), b"\xff" * 64):
        request = urllib.request.Request(
            f"{server.address}/v1/completions",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        refused.value.close()
        assert 400 <= refused.value.code < 500
    assert server.complete(words(range(3))).choices[0].text


@pytest.mark.parametrize("method", ["delta-block:num_blocks=2", "depth-attention"])
def test_transformers_own_server_answers_as_generate(tmp_path, method):
    model = save_routed(tmp_path / "model", "llama", method)
    with served(tmp_path / "model", "transformers", log=tmp_path / "log") as started:
        server = Served(tmp_path / "model", model, started.url)
        message = {"role": "user", "content": words(range(5, 11))}
        chat = server.client.chat.completions.create(
            model=server.folder, messages=[message], max_tokens=TOKENS, temperature=0
        )
        text = chat.choices[0].message.content
        server.client.close()
    wanted = server.expected(message["content"] + " ")
    assert text and wanted.startswith(text.split("</s>")[0].strip())
