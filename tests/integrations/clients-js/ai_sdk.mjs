// Vercel's ai with both of its providers: calls in steps, plain and streamed, and objects with and without a schema.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const about = { baseURL: process.argv[2], apiKey: "none" };
const schemas = createOpenAICompatible({ name: "edged", supportsStructuredOutputs: true, ...about });
const plain = createOpenAICompatible({ name: "edged", ...about });
const openai = createOpenAI(about);
// No response is kept, so that its items must come along.
const providerOptions = { openai: { store: false } };
const asked = [];
const answers = [];
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    asked.push(city);
    return "23 degrees";
  },
});
const asks = { prompt: "What is the weather?", tools: { weather }, stopWhen: stepCountIs(2), maxRetries: 0, providerOptions };
for (const model of [schemas("qwen"), openai("qwen"), openai.chat("qwen")]) {
  answers.push((await generateText({ model, ...asks })).text);
  answers.push(await streamText({ model, ...asks }).text);
}

const Weather = z.object({ city: z.enum(["Paris", "Rome"]), soon: z.boolean() });
const wants = { schema: Weather, prompt: "What is the weather?", maxRetries: 0, providerOptions };
const parsed = [];
for (const model of [schemas("qwen"), openai("qwen"), openai.chat("qwen")]) {
  parsed.push((await generateObject({ model, ...wants })).object.city);
}
// Without a schema on the wire the prompt alone has it, which the scripted model does not read: any object will do.
const anything = z.object({ city: z.enum(["Paris", "Rome"]).default("Paris") });
parsed.push((await generateObject({ model: plain("qwen"), ...wants, schema: anything })).object.city);
console.log(JSON.stringify({ asked, answers, parsed }));
