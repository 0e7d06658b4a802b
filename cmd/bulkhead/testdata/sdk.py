"""Speaks to a running platform with the official Python SDK."""

import os

import openai

client = openai.OpenAI(max_retries=0)
model = os.environ["MODEL"]
messages = [{"role": "user", "content": "hi"}]

whole = client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0)
assert 0 < whole.usage.completion_tokens <= 20, whole

text, usage, reasons = "", None, []
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0, stream=True,
                                            stream_options={"include_usage": True}):
    if chunk.usage:
        usage = chunk.usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
assert text == whole.choices[0].message.content, (text, whole)
assert usage.total_tokens == whole.usage.total_tokens
assert reasons == [whole.choices[0].finish_reason]

raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=1)
assert raw.headers["x-bulkhead-receipt"].startswith("rcp_")

assert [m.id for m in client.models.list()] == [model]
assert client.completions.create(model=model, prompt="hi", max_tokens=3).usage.completion_tokens == 3

for call, error in [
    (lambda: client.models.retrieve("nope"), openai.NotFoundError),
    (lambda: client.chat.completions.create(model="nope", messages=messages), openai.NotFoundError),
    (lambda: client.chat.completions.create(model=model, messages=messages, n=2), openai.BadRequestError),
    (lambda: client.embeddings.create(model=model, input="x"), openai.BadRequestError),
    (lambda: client.with_options(api_key="wrong").models.list(), openai.AuthenticationError),
]:
    try:
        call()
    except error as e:
        assert e.message and e.request_id.startswith("req_"), e
    else:
        raise AssertionError(f"no {error.__name__}")
print("all well")
