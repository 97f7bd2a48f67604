// npm's openai: calls with their results, plain and streamed; a schema of zod's, in chats and in the Responses API.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none" });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const about = { name: "weather", description: "The weather of a city.", parameters };
const tools = [{ type: "function", function: about }];
const question = { role: "user", content: "What is the weather?" };
const asked = [];
const answers = [];

for (const stream of [false, true]) {
  const body = { model: "qwen", messages: [question], tools, user: "ann" };
  const said = stream
    ? await client.chat.completions.stream(body).finalChatCompletion()
    : await client.chat.completions.create(body);
  const { message } = said.choices[0];
  const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "23 degrees" }));
  asked.push(...message.tool_calls.map((call) => JSON.parse(call.function.arguments).city));
  const after = await client.chat.completions.create({ ...body, messages: [question, message, ...results] });
  answers.push(after.choices[0].message.content);
}

const runner = client.chat.completions.runTools({
  model: "qwen",
  messages: [question],
  tools: [
    {
      type: "function",
      function: {
        ...about,
        parse: JSON.parse,
        function: ({ city }) => {
          asked.push(city);
          return "23 degrees";
        },
      },
    },
  ],
});
answers.push(await runner.finalContent());

for (const stream of [false, true]) {
  const body = { model: "qwen", input: "What is the weather?", tools: [{ type: "function", strict: false, ...about }] };
  const said = stream ? await client.responses.stream(body).finalResponse() : await client.responses.create(body);
  const calls = said.output.filter((item) => item.type === "function_call");
  asked.push(...calls.map((call) => JSON.parse(call.arguments).city));
  const results = calls.map(({ call_id }) => ({ type: "function_call_output", call_id, output: "23 degrees" }));
  const input = [{ role: "user", content: "What is the weather?" }, ...said.output, ...results];
  answers.push((await client.responses.create({ ...body, input })).output_text);
}

const Weather = z.object({ city: z.enum(["Paris", "Rome"]), days: z.array(z.boolean()).max(2), note: z.null() });
const body = { model: "qwen", messages: [question], response_format: zodResponseFormat(Weather, "weather") };
const chat = await client.chat.completions.parse(body);
const streamed = await client.chat.completions.stream(body).finalChatCompletion();
const format = zodTextFormat(Weather, "weather");
const response = await client.responses.parse({ model: "qwen", input: "The weather?", text: { format } });
const parsed = [chat.choices[0].message.parsed, streamed.choices[0].message.parsed, response.output_parsed];
console.log(JSON.stringify({ asked, answers, parsed: parsed.map((found) => Weather.parse(found).city) }));
