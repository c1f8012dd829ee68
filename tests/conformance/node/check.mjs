// What the openai package for Node.js makes of the server at OCTAVO_BASE_URL, which serves the model OCTAVO_MODEL.
//   OCTAVO_BASE_URL=http://127.0.0.1:8000/v1 OCTAVO_MODEL=smollm2-135m-instruct node --test check.mjs

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const model = process.env.OCTAVO_MODEL;
const client = new OpenAI({ baseURL: process.env.OCTAVO_BASE_URL, apiKey: "none", maxRetries: 0 });
const messages = [
  { role: "developer", content: "You answer questions." },
  { role: "user", content: [{ type: "text", text: "What is the capital of France?" }] },
];
const asked = { model, messages, temperature: 0, max_tokens: 24 };

// Exactly these keys: what the package's types require, and of the optional ones those that the server sends.
function hasKeys(object, ...keys) {
  assert.deepEqual(Object.keys(object).sort(), keys.sort());
}

async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

test("a chat and its stream", async () => {
  const answer = await client.chat.completions.create(asked);
  hasKeys(answer, "id", "object", "created", "model", "system_fingerprint", "choices", "usage");
  const [choice] = answer.choices;
  hasKeys(choice, "index", "message", "logprobs", "finish_reason");
  hasKeys(choice.message, "role", "content", "refusal");
  assert.match(choice.message.content, /Paris/);
  assert.equal(choice.finish_reason, "stop");
  const chunks = await all(
    await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }),
  );
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, choice.message.content);
  assert.equal(chunks.at(-1).usage.completion_tokens, answer.usage.completion_tokens);
  assert.deepEqual(chunks.at(-1).choices, []);
  for (const chunk of chunks.slice(0, -1)) {
    hasKeys(chunk, "id", "object", "created", "model", "system_fingerprint", "choices", "usage");
    hasKeys(chunk.choices[0], "index", "delta", "logprobs", "finish_reason");
    assert.equal(chunk.usage, null);
  }
});

test("the stream helper with several choices", async () => {
  const fields = { ...asked, n: 2, seed: 4, temperature: 1, logprobs: true, top_logprobs: 2 };
  const stream = client.chat.completions.stream(fields);
  const final = await stream.finalChatCompletion();
  assert.deepEqual(final.choices.map((choice) => choice.index), [0, 1]);
  const whole = await client.chat.completions.create(fields);
  assert.deepEqual(
    final.choices.map((choice) => choice.message.content),
    whole.choices.map((choice) => choice.message.content),
  );
  for (const choice of final.choices) {
    assert.equal(choice.message.role, "assistant");
    for (const token of choice.logprobs.content) assert.equal(token.top_logprobs.length, 2);
  }
});

test("completions of a text and of token ids", async () => {
  for (const prompt of ["The capital of France is", [504, 3575, 282, 4649, 314]]) {
    const fields = { model, prompt, temperature: 0, max_tokens: 8, logprobs: 1 };
    const answer = await client.completions.create(fields);
    hasKeys(answer, "id", "object", "created", "model", "system_fingerprint", "choices", "usage");
    hasKeys(answer.choices[0].logprobs, "tokens", "token_logprobs", "top_logprobs", "text_offset");
    const chunks = await all(await client.completions.create({ ...fields, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), answer.choices[0].text);
  }
});

test("embeddings in the package's own default form", async () => {
  const input = ["A page.", "A leaf."];
  const packed = await client.embeddings.create({ model, input });
  const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
  packed.data.forEach((item, index) => {
    hasKeys(item, "object", "index", "embedding");
    assert.equal(item.embedding.length, plain.data[index].embedding.length);
    item.embedding.forEach((number, k) => assert.ok(Math.abs(number - plain.data[index].embedding[k]) < 1e-6));
  });
});

test("models", async () => {
  const models = await all(client.models.list());
  assert.deepEqual(models.map((card) => card.id), [model]);
  assert.equal((await client.models.retrieve(model)).object, "model");
});

test("a response and its events", async () => {
  const fields = { model, input: "What is the capital of France?", temperature: 0 };
  const response = await client.responses.create(fields);
  assert.match(response.output_text, /Paris/);
  assert.equal(response.status, "completed");
  const stream = client.responses.stream(fields);
  const events = await all(stream);
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
  assert.equal(events.at(-1).type, "response.completed");
  assert.equal((await stream.finalResponse()).output_text, response.output_text);
});

test("errors are the package's own", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    assert.equal(error.type, "invalid_request_error");
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(client.completions.create({ model: "gpt-9", prompt: "a" }), OpenAI.NotFoundError);
  const tools = [{ type: "function", function: { name: "f", parameters: { not: {} } } }];
  const param = "tools[0].function.parameters";
  await assert.rejects(client.chat.completions.create({ ...asked, tools }), (error) => error.param === param);
});

test("a call and an answer in a form, streamed and added up", async () => {
  const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
  const choice = { tool_choice: "required", parallel_tool_calls: false, max_tokens: 100 };
  const calling = client.chat.completions.stream({ ...asked, ...choice, tools });
  const [call] = (await calling.finalMessage()).tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
  const response_format = { type: "json_schema", json_schema: { name: "place", schema: parameters, strict: true } };
  const formed = await client.chat.completions.parse({ ...asked, max_tokens: 100, response_format });
  assert.ok(["Paris", "Rome"].includes(formed.choices[0].message.parsed.city));
});

test("a stream that is left early", async () => {
  const stream = await client.chat.completions.create({ ...asked, max_tokens: 4000, stream: true });
  for await (const _ of stream) break;
  const other = await client.chat.completions.create({ ...asked, max_tokens: 1 });
  assert.equal(other.choices[0].finish_reason, "length");
});

test("headers of a raw response", async () => {
  const { data, response } = await client.chat.completions.create({ ...asked, max_tokens: 1 }).withResponse();
  assert.equal(data.choices.length, 1);
  assert.ok(response.headers.get("x-request-id"));
});
