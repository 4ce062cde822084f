// The calls of the official clients for Node. Run by check.py, in the folder that has them.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const url = process.argv[2];
const model = "SmolLM2-135M-Instruct";
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = { model, messages, temperature: 0, max_tokens: 64 };
const weather = {
  name: "get_weather",
  description: "The weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const tools = [{ type: "function", function: weather }];

const calls = {
  async chat() {
    const answer = await openai.chat.completions.create(ask);
    assert.match(answer.choices[0].message.content, /Paris/);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },
  async chatStream() {
    const stream = openai.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert.match(text, /Paris/);
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
  },
  async tools() {
    const answer = await openai.chat.completions.create({ ...ask, tools, tool_choice: "required" });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
  },
  async toolsStream() {
    const stream = openai.chat.completions.stream({ ...ask, tools, tool_choice: "required" });
    const final = await stream.finalChatCompletion();
    const [call] = final.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
  },
  async completion() {
    const answer = await openai.completions.create({ model, prompt: "The capital of France is", max_tokens: 3, temperature: 0 });
    assert.match(answer.choices[0].text, /Paris/);
  },
  async embeddings() {
    const answer = await openai.embeddings.create({ model, input: ["bread", "butter"] });
    assert.equal(answer.data.length, 2);
    assert.ok(answer.data[0].embedding.length > 100);
  },
  async responses() {
    const answer = await openai.responses.create({ model, input: "What is the capital of France?", temperature: 0 });
    assert.match(answer.output_text, /Paris/);
  },
  async responsesStream() {
    let text = "";
    const stream = await openai.responses.create({ model, input: "What is the capital of France?", temperature: 0, stream: true });
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.match(text, /Paris/);
  },
  async models() {
    const models = [];
    for await (const each of openai.models.list()) models.push(each.id);
    assert.deepEqual(models, [model]);
  },
  async badRequest() {
    await assert.rejects(openai.chat.completions.create({ ...ask, temperature: 9 }), OpenAI.BadRequestError);
  },
  async anthropicMessage() {
    const answer = await anthropic.messages.create({ model, messages, max_tokens: 64 });
    assert.equal(answer.content[0].type, "text");
    assert.equal(answer.role, "assistant");
  },
  async anthropicStream() {
    const stream = anthropic.messages.stream({ model, messages, max_tokens: 64 });
    const final = await stream.finalMessage();
    assert.ok(final.usage.output_tokens > 0);
  },
  async anthropicTools() {
    const tool = { name: weather.name, description: weather.description, input_schema: weather.parameters };
    const answer = await anthropic.messages.create({ model, messages, max_tokens: 64, tools: [tool], tool_choice: { type: "any" } });
    assert.equal(answer.stop_reason, "tool_use");
    const [use] = answer.content.filter((block) => block.type === "tool_use");
    assert.equal(typeof use.input.city, "string");
  },
};

let failures = 0;
for (const [name, call] of Object.entries(calls)) {
  try {
    await call();
    console.log(`ok      node ${name}`);
  } catch (error) {
    failures += 1;
    console.log(`FAILED  node ${name}: ${error}`);
  }
}
process.exit(failures ? 1 : 0);
