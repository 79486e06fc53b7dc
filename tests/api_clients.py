#!/usr/bin/env python3
"""The official openai and anthropic clients, and what is built on them, against the real server with the demo checkpoint:
`make test-api`.

Usage: api_clients.py QUERN_BINARY. Prints one line a check; exit code 1 if one failed. litellm, langchain-openai, llm and lm-eval
are SKIPPED where they are not installed.
"""
import asyncio
import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback

import anthropic
import instructor
import openai
import pydantic

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


class Server:
    def __init__(self, binary):
        self.process = subprocess.Popen([binary, "serve", "--port", "0", "--api-key", "secret", "--log-format", "none"],
                                        stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"at (http://\S+)", line):
                self.url = found[1]
                return
        raise SystemExit("the server did not start")

    def stop(self):
        self.process.terminate()
        assert self.process.wait(20) == 0


def chat(client):
    r = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0)
    assert r.choices[0].message.content == PARIS, r
    assert r.choices[0].finish_reason == "stop"
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens


def stream(client):
    parts = list(client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, stream=True,
                                                stream_options={"include_usage": True}))
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == PARIS, text
    assert parts[-1].usage.completion_tokens > 0
    assert parts[-2].choices[0].finish_reason == "stop"


def tools(client):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    for streaming in (False, True):
        if streaming:
            with client.chat.completions.stream(model="demo", messages=messages, tools=[WEATHER], temperature=0) as s:
                for _ in s:
                    pass
                message = s.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER],
                                                     temperature=0).choices[0].message
        call = message.tool_calls[0]
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}, call
    messages += [message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
                 {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}]
    r = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], temperature=0, max_tokens=200)
    assert r.usage.prompt_tokens_details.cached_tokens > 0
    forced = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], tools=[WEATHER], temperature=0,
        tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert forced.choices[0].message.tool_calls[0].function.name == "get_weather"


def forced(client):
    """Calls that were demanded fit their schema, whatever the model would rather say."""
    add = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {
        "type": "object", "properties": {"sum": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
        "required": ["sum", "unit"], "additionalProperties": False}}}
    for choice in "required", {"type": "function", "function": {"name": "add"}}:
        for seed in range(3):
            r = client.chat.completions.create(model="demo", messages=FRANCE, tools=[add], tool_choice=choice, seed=seed,
                                               temperature=1.5, parallel_tool_calls=False, max_tokens=400,
                                               extra_body={"thinking_budget": 50})
            assert r.choices[0].finish_reason == "tool_calls", r
            arguments = json.loads(r.choices[0].message.tool_calls[0].function.arguments)
            assert isinstance(arguments["sum"], int) and arguments["unit"] in ("m", "km") and len(arguments) == 2, r


class Answer(pydantic.BaseModel):
    city: str = pydantic.Field(min_length=1, max_length=40)
    people: int
    capital: bool | None = None


def extraction(client):
    for mode in instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA:
        asked = instructor.from_openai(client, mode=mode)
        answer = asked.chat.completions.create(model="demo", messages=copy.deepcopy(FRANCE), response_model=Answer,
                                               max_retries=0, temperature=0, extra_body={"enable_thinking": False})
        assert isinstance(answer, Answer), answer


def schema(client):
    r = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "What is 48 + 37?"}], temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": {
            "type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
            "additionalProperties": False}}})
    assert isinstance(json.loads(r.choices[0].message.content)["sum"], int)


def logprobs(client):
    r = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, logprobs=True, top_logprobs=3)
    assert all(len(t.top_logprobs) == 3 and t.logprob <= 0 for t in r.choices[0].logprobs.content)


def errors(client):
    for call, kind in ((lambda: client.chat.completions.create(model="demo", messages=[]), openai.BadRequestError),
                       (lambda: client.chat.completions.create(model="demo", messages=FRANCE, temperature=-1),
                        openai.BadRequestError),
                       (lambda: client.with_options(api_key="wrong").models.list(), openai.AuthenticationError),
                       (lambda: client.models.retrieve("nothing"), openai.NotFoundError)):
        try:
            call()
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(kind)


def responses(client):
    r = client.responses.create(model="demo", input="What is the capital of France?", temperature=0)
    assert r.output_text == PARIS, r
    kinds = []
    with client.responses.stream(model="demo", input="What is the capital of France?", temperature=0) as s:
        for event in s:
            kinds.append(event.type)
        assert s.get_final_response().output_text == PARIS
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    r = client.responses.create(model="demo", input="What is the weather in Paris?", temperature=0,
                                tools=[{"type": "function", **WEATHER["function"]}])
    assert [o.name for o in r.output if o.type == "function_call"] == ["get_weather"]


def stateful(client):
    first = client.responses.create(model="demo", input="What is the capital of France?", temperature=0)
    following = client.responses.create(model="demo", input="And of Italy?", temperature=0,
                                        previous_response_id=first.id)
    assert following.output_text == "The capital of Italy is Rome.", following
    assert client.responses.retrieve(first.id).output_text == PARIS
    assert client.responses.input_items.list(first.id).data
    counted = client.post("/responses/input_tokens", cast_to=object,  # older clients have no method for it
                          body={"model": "demo", "input": "What is the capital of France?"})
    assert counted["input_tokens"] == first.usage.input_tokens, counted
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError as error:
        assert error.code == "response_not_found", error.body
    else:
        raise AssertionError("still there")
    try:
        client.embeddings.create(model="demo", input="x")
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("no error")


def streamed_tools(client):
    pieces = []
    with client.chat.completions.stream(model="demo", messages=[{"role": "user", "content": "Weather in Paris?"}],
                                        temperature=0, tools=[WEATHER]) as s:
        for event in s:
            if event.type == "tool_calls.function.arguments.delta":
                pieces.append(event.arguments_delta)
        final = s.get_final_completion().choices[0].message.tool_calls[0].function
    assert len(pieces) > 2 and "".join(pieces) == final.arguments, pieces


def completions(client):
    r = client.completions.create(model="demo", prompt="The capital of France", max_tokens=2, temperature=0)
    assert r.choices[0].text == " is Paris"
    r = client.completions.create(model="demo", prompt=["The capital of France", "The capital of Italy"], max_tokens=2,
                                  temperature=0, echo=True, logprobs=1)
    assert [c.text for c in r.choices] == ["The capital of France is Paris", "The capital of Italy is Rome"], r.choices
    for c in r.choices:
        assert "".join(c.logprobs.tokens) == c.text and len(c.logprobs.token_logprobs) == 6, c.logprobs
        assert all(p < 0 for p in c.logprobs.token_logprobs[1:]), c.logprobs
    assert [m.id for m in client.models.list()] == ["demo"]


def asynchronous(url):
    async def ask():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="secret") as client:
            one = client.chat.completions.create
            answers = await asyncio.gather(*(one(model="demo", messages=FRANCE, temperature=0) for _ in range(12)))
            assert all(a.choices[0].message.content == PARIS for a in answers)
            async with await one(model="demo", messages=FRANCE, temperature=0, stream=True) as parts:
                async for part in parts:
                    assert part.choices[0].delta.role == "assistant"
                    break  # and the connection is closed
    asyncio.run(ask())


def messages(client):
    r = client.messages.create(model="demo", max_tokens=200, extra_body={"temperature": 0}, messages=FRANCE,
                               thinking={"type": "enabled", "budget_tokens": 1024})
    assert [b.type for b in r.content] == ["thinking", "text"] and r.content[1].text == PARIS, r
    assert r.stop_reason == "end_turn"
    with client.messages.stream(model="demo", max_tokens=200, extra_body={"temperature": 0}, messages=FRANCE,
                                thinking={"type": "enabled", "budget_tokens": 1024}) as s:
        assert "".join(s.text_stream) == PARIS
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    r = client.messages.create(model="demo", max_tokens=200, extra_body={"temperature": 0}, tools=[tool],
                               tool_choice={"type": "any"}, messages=[{"role": "user", "content": "Weather in Paris?"}])
    use = next(b for b in r.content if b.type == "tool_use")
    assert use.name == "get_weather" and r.stop_reason == "tool_use" and "city" in use.input
    with client.messages.stream(model="demo", max_tokens=200, extra_body={"temperature": 0}, tools=[tool],
                                messages=[{"role": "user", "content": "Weather in Paris?"}]) as s:
        pieces = [e.partial_json for e in s if e.type == "input_json"]
        use = next(b for b in s.get_final_message().content if b.type == "tool_use")
    assert len(pieces) > 2 and "city" in use.input, pieces
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of"}]
    r = client.messages.create(model="demo", max_tokens=40, extra_body={"temperature": 0}, messages=begun)
    assert r.content[0].text == " France is Paris.", r
    assert client.messages.count_tokens(model="demo", messages=FRANCE).input_tokens > 5
    try:
        client.messages.create(model="demo", max_tokens=5, messages=[])
    except anthropic.BadRequestError as error:
        assert error.body["type"] == "error"
    else:
        raise AssertionError("no error")


class Skipped(Exception):
    pass


def needs(module, package):
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"{package} is not installed")


def litellm_calls(url):
    needs("litellm", "litellm")
    import litellm
    here = dict(model="openai/demo", api_base=url + "/v1", api_key="secret", temperature=0)
    assert litellm.completion(messages=FRANCE, **here).choices[0].message.content == PARIS
    parts = list(litellm.completion(messages=FRANCE, stream=True, **here))
    assert "".join(p.choices[0].delta.content or "" for p in parts) == PARIS, parts
    r = litellm.completion(messages=[{"role": "user", "content": "What is the weather in Paris?"}], tools=[WEATHER],
                           tool_choice="required", **here)
    assert "city" in json.loads(r.choices[0].message.tool_calls[0].function.arguments), r
    r = litellm.completion(model="anthropic/demo", api_base=url, api_key="secret", messages=FRANCE, temperature=0, max_tokens=200)
    assert r.choices[0].message.content == PARIS, r


def langchain_calls(url):
    needs("langchain_openai", "langchain-openai")
    from langchain_openai import ChatOpenAI

    class Sum(pydantic.BaseModel):
        sum: int

    chat_model = ChatOpenAI(model="demo", base_url=url + "/v1", api_key="secret", temperature=0, max_retries=0)
    assert chat_model.invoke(FRANCE[0]["content"]).content == PARIS
    assert "".join(str(p.content) for p in chat_model.stream(FRANCE[0]["content"])) == PARIS
    for method in ("function_calling", "json_schema"):
        answer = chat_model.with_structured_output(Sum, method=method).invoke("What is 48 + 37?")
        assert isinstance(answer.sum, int), (method, answer)


def llm_command(url):
    needs("llm", "llm")
    with tempfile.TemporaryDirectory() as home:
        with open(os.path.join(home, "extra-openai-models.yaml"), "w") as file:
            file.write(f"- model_id: quern\n  model_name: demo\n  api_base: {url}/v1\n  api_key_name: quern\n")
        program = shutil.which("llm", path=os.path.dirname(sys.executable)) or "llm"
        out = subprocess.run([program, "-m", "quern", "--key", "secret", "-o", "temperature", "0", FRANCE[0]["content"]],
                             env={**os.environ, "LLM_USER_PATH": home}, capture_output=True, text=True, timeout=120)
        assert out.stdout.strip() == PARIS, out


def lm_eval_likelihoods(url):
    needs("lm_eval", "lm-eval")
    needs("transformers", "transformers")  # its tokenizer
    os.environ["OPENAI_API_KEY"] = "secret"
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    demo = os.path.join(os.path.dirname(__file__), "..", "models", "demo")
    model = LocalCompletionsAPI(model="demo", base_url=url + "/v1/completions", tokenizer=demo, max_length=2048)
    pairs = [(" The capital of France is", " Paris."), (" The capital of France is", " seven.")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    right, wrong = model.loglikelihood(requests)
    assert right[0] > wrong[0], (right, wrong)


def main():
    server = Server(sys.argv[1])
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
    claude = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
    checks = [(f, client) for f in (chat, stream, tools, forced, extraction, schema, logprobs, errors, responses,
                                    stateful, streamed_tools,
                                    completions)]
    checks += [(asynchronous, server.url), (messages, claude)]
    checks += [(f, server.url) for f in (litellm_calls, langchain_calls, llm_command, lm_eval_likelihoods)]
    failed = skipped = 0
    for check, argument in checks:
        try:
            check(argument)
            print("ok     ", check.__name__)
        except Skipped as why:
            skipped += 1
            print("SKIPPED", check.__name__, "-", why)
        except Exception:
            failed += 1
            print("FAILED ", check.__name__)
            traceback.print_exc()
    server.stop()
    print(f"{len(checks) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
