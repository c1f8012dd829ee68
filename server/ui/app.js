// The page: a chat that streams, and the engine as it works. No build step, nothing from outside.
import { watch } from "./live.js";

const $ = (id) => document.getElementById(id);
const history = [];
let running = null; // AbortController of what is being answered
let model = null;

$("key").value = sessionStorage.getItem("octavo-key") ?? "";
const headers = () => {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

async function connect() {
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    model = body.data[0].id;
    $("about").textContent = model;
  } catch (error) {
    $("about").textContent = error.message;
  }
}

function say(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

// The data of the events of a stream, as they come.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}

function request() {
  const temperature = $("temperature").value;
  return {
    model,
    messages: history,
    max_tokens: Number($("max-tokens").value) || 200,
    n: Math.max(1, Math.min(64, Number($("answers").value) || 1)), // one connection: browsers open only six
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function ask(signal, onText) {
  const begin = performance.now();
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(request()), signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let text = "", first = null, usage = null, last = begin;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    const piece = event.choices[0]?.index === 0 && event.choices[0].delta.content;
    if (piece) {
      last = performance.now();
      first ??= last;
      text += piece;
      onText(text);
    }
  }
  return { text, first: (first ?? last) - begin, seconds: (last - (first ?? last)) / 1000, usage };
}

async function send() {
  const prompt = $("prompt").value.trim();
  if (!prompt || running) return;
  running = new AbortController();
  $("prompt").value = "";
  $("send").disabled = true;
  $("stop").disabled = false;
  $("figures").textContent = "";
  history.push({ role: "user", content: prompt });
  say("user", prompt);
  const item = say("assistant", "");
  let partial = "";
  try {
    const answer = await ask(running.signal, (text) => { partial = item.textContent = text; });
    const tokens = answer.usage?.completion_tokens ?? 0;
    const rate = tokens > 1 && answer.seconds > 0 ? `, ${(tokens / answer.seconds).toFixed(0)} tokens/s` : "";
    $("figures").textContent = `first token after ${answer.first.toFixed(0)} ms, ${tokens} tokens${rate}`;
  } catch (error) {
    if (error.name === "AbortError") $("figures").textContent = "stopped";
    else say("error", error.message);
  }
  if (partial) history.push({ role: "assistant", content: partial });
  else history.pop();
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  $("prompt").focus();
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  history.length = 0;
  $("messages").replaceChildren();
  $("figures").textContent = "";
  $("prompt").focus();
});
let live = watch(headers, events);
$("key").addEventListener("change", () => {
  sessionStorage.setItem("octavo-key", $("key").value.trim());
  connect();
  live.stop();
  live = watch(headers, events);
});
connect();
