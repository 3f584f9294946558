// What openai for Node sends and reads. Arguments: the base URL, and a bias of tokens as JSON. Prints one object.
import OpenAI from "openai";

const [url, bias] = [process.argv[2], JSON.parse(process.argv[3])];
const client = new OpenAI({ baseURL: url, apiKey: "unused", maxRetries: 0, timeout: 300000 });
const messages = [{ role: "user", content: "What time is it?" }];
const parameters = {
  type: "object",
  properties: { zone: { enum: ["utc", "cet"] } },
  required: ["zone"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_time", parameters, strict: true } }];
const lenient = [{ type: "function", function: { name: "get_time", parameters } }];
const named = { type: "function", function: { name: "get_time" } };
const written = {
  structured_outputs: {
    regex: '<tool_call>\\n\\{"name": "get_time", "arguments": \\{"zone": "utc"\\}\\}\\n</tool_call>',
  },
};

async function asked(options) {
  const answer = await client.chat.completions.create({ messages, temperature: 0, ...options });
  const choice = answer.choices[0];
  const calls = (choice.message.tool_calls ?? []).map((c) => [c.function.name, JSON.parse(c.function.arguments)]);
  return { calls, text: choice.message.content, ended: choice.finish_reason };
}

async function streamed(options) {
  const found = { names: [], arguments: "", text: "", ended: null };
  const chunks = await client.chat.completions.create({ messages, temperature: 0, stream: true, ...options });
  for await (const chunk of chunks)
    for (const choice of chunk.choices) {
      found.ended = choice.finish_reason ?? found.ended;
      found.text += choice.delta.content ?? "";
      for (const call of choice.delta.tool_calls ?? []) {
        if (call.function?.name) found.names.push(call.function.name);
        found.arguments += call.function?.arguments ?? "";
      }
    }
  found.arguments = found.arguments ? JSON.parse(found.arguments) : null;
  return found;
}

async function refused(options) {
  try {
    await asked(options);
  } catch (error) {
    return `${error.constructor.name} ${error.status} ${error.code}`;
  }
  return "answered";
}

const found = { version: "node", models: (await client.models.list()).data.map((card) => card.id) };
for (const model of ["smol", "forte"]) {
  const forced = { model, max_tokens: 300, logit_bias: bias };
  found[model] = {
    text: await asked({ model, max_tokens: 8 }),
    stream: await streamed({ model, max_tokens: 8 }),
    named: await asked({ ...forced, tools, tool_choice: named }),
    required: await asked({ ...forced, tools, tool_choice: "required", parallel_tool_calls: false }),
    streamed: await streamed({ ...forced, tools, tool_choice: named }),
    auto: await asked({ model, max_tokens: 300, tools: lenient, ...written }),
    "auto, streamed": await streamed({ model, max_tokens: 300, tools: lenient, ...written }),
    long: ["stop", "length"].includes((await asked({ model, max_tokens: 100000, stop: ["a", "e", " "] })).ended),
  };
}
found.unknown = await refused({ model: "nobody" });
found.wrong = await refused({ model: "smol", guided_json: {} });
console.log(JSON.stringify(found));
