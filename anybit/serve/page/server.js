"use strict";
// What the page asks of the server. Where it wants a key, the browser has asked for it already.

const server = {
  // What is served: name, formats, bytes, whether it has a chat template.
  async about() {
    const response = await fetch("page/about");
    if (!response.ok) throw new Error((await response.json()).error.message);
    return response.json();
  },

  // An answer, piece by piece: yields {content, reasoning, usage}. Without a template of its own, a
  // model continues the text.
  async *answer(messages, sampling, template, signal) {
    const text = messages.map(message => message.content).join("");
    const response = await fetch(template ? "v1/chat/completions" : "v1/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, signal,
      body: JSON.stringify({
        ...(template ? { messages } : { prompt: text }), ...sampling,
        stream: true, stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0] || {}, delta = choice.delta || {};
      yield {
        content: delta.content || choice.text || "",
        reasoning: delta.reasoning_content || "",
        usage: event.usage,
      };
    }
  },

  // Requests that run and wait, and the share of the cache in use.
  async load() {
    const text = await (await fetch("metrics")).text();
    const read = name => {
      const found = text.match(new RegExp(`^vllm:${name}\\{[^}]*\\} (\\S+)`, "m"));
      return Number(found ? found[1] : 0);
    };
    return {
      running: read("num_requests_running"),
      waiting: read("num_requests_waiting"),
      cache: read("kv_cache_usage_perc"),
    };
  },
};

// Server-sent events of a response, as objects.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
