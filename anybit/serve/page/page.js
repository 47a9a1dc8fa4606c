"use strict";
// The page: shows the conversation, sends messages, keeps settings.

const $ = id => document.getElementById(id);
const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const STARTS = {
  chat: ["Explain quantization to a child.", "Write a haiku about memory.", "Sort a list in Python, three ways."],
  text: ["def fibonacci(n):", "class Stack:\n    def __init__(self):", "import os\n\ndef main("],
};
let about = null, running = null, timer = 0;

function element(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

function button(text, action) {
  const node = element("button", "", text);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

async function copy(text, node) {
  try { // only secure pages have a clipboard; the old way works on the others
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = node.textContent;
  node.textContent = "Copied";
  setTimeout(() => { node.textContent = before; }, 1200);
}

// Messages.

function render(node, text) {
  if (!about || !about.template) { // text that is continued is no Markdown
    node.classList.add("raw");
    node.textContent = text;
    return;
  }
  node.innerHTML = DOMPurify.sanitize(marked.parse(text), { FORBID_TAGS: ["img", "style", "form", "input"] });
  for (const link of node.querySelectorAll("a")) { link.target = "_blank"; link.rel = "noopener"; }
  for (const code of node.querySelectorAll("pre code")) {
    hljs.highlightElement(code);
    const block = code.parentElement, plain = code.textContent;
    const one = button("Copy", () => copy(plain, one));
    one.className = "copy";
    block.append(one);
  }
}

function show(message) {
  $("empty").hidden = true;
  const node = element("article", `message ${message.role}`);
  const thought = element("details", "thought"), text = element("div", "text"), tools = element("div", "tools");
  thought.append(element("summary", "", "Reasoning"), element("div"));
  thought.hidden = !message.reasoning;
  thought.lastChild.textContent = message.reasoning || "";
  if (message.role === "user") text.textContent = message.content;
  else render(text, message.content);
  node.append(thought, text, tools);
  $("chat").append(node);
  finish(node, message);
  scroll(true);
  return node;
}

// The buttons and figures under a message.
function finish(node, message) {
  const tools = node.querySelector(".tools");
  tools.replaceChildren();
  const one = button("Copy", () => copy(message.content, one));
  tools.append(one);
  if (message.role === "assistant") tools.append(button("Regenerate", () => again(message)));
  if (message.speed) tools.append(element("span", "", `${message.tokens} tokens, ${message.speed.toFixed(message.speed < 10 ? 1 : 0)} tokens/s`));
  if (message.error) tools.append(element("span", "error", message.error));
}

function scroll(force) {
  const chat = $("chat");
  if (force || chat.scrollHeight - chat.scrollTop - chat.clientHeight < 80) chat.scrollTop = chat.scrollHeight;
}

function showAll() {
  for (const node of document.querySelectorAll(".message")) node.remove();
  $("empty").hidden = history_.now.messages.length > 0;
  history_.now.messages.forEach(show);
  list();
}

// Sending.

// A setting within the bounds of its field.
function bounded(field) {
  const low = field.min === "" ? -Infinity : Number(field.min), high = field.max === "" ? Infinity : Number(field.max);
  return Math.min(Math.max(Number(field.value), low), high);
}

function sampling() {
  const out = {};
  for (const name of SETTINGS) if ($(name).value !== "") out[name] = bounded($(name));
  return out;
}

async function send(text) {
  const conversation = history_.now;
  conversation.messages.push({ role: "user", content: text });
  show(conversation.messages.at(-1));
  await answer(conversation);
}

async function again(message) {
  if (running) return;
  const conversation = history_.now, at = conversation.messages.indexOf(message);
  conversation.messages.length = at;
  showAll();
  await answer(conversation);
}

async function answer(conversation) {
  const given = conversation.messages.map(({ role, content }) => ({ role, content }));
  if ($("system").value.trim() && about && about.template) given.unshift({ role: "system", content: $("system").value });
  const message = { role: "assistant", content: "" };
  conversation.messages.push(message);
  history_.save();
  list();
  const node = show(message), text = node.querySelector(".text"), thought = node.querySelector(".thought");
  node.querySelector(".tools").replaceChildren();
  text.classList.add("busy");
  running = new AbortController();
  $("send").textContent = "Stop";
  let drawn = 0, first = 0, count = 0;
  const draw = () => {
    if (drawn) return;
    drawn = requestAnimationFrame(() => {
      drawn = 0;
      render(text, message.content);
      thought.hidden = !message.reasoning;
      thought.lastChild.textContent = message.reasoning || "";
      scroll(false);
    });
  };
  try {
    for await (const piece of server.answer(given, sampling(), about && about.template, running.signal)) {
      if (piece.content || piece.reasoning) {
        if (!first) watch();
        first = first || performance.now();
        count += 1;
      }
      message.content += piece.content;
      if (piece.reasoning) message.reasoning = (message.reasoning || "") + piece.reasoning;
      if (piece.usage) count = piece.usage.completion_tokens;
      draw();
    }
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
  }
  if (drawn) cancelAnimationFrame(drawn);
  drawn = 1; // what is left in the queue draws no more
  message.tokens = count;
  if (count > 1) message.speed = (count - 1) / (performance.now() - first) * 1000;
  render(text, message.content);
  text.classList.remove("busy");
  finish(node, message);
  running = null;
  $("send").textContent = "Send";
  $("said").textContent = message.error || message.content; // read aloud, once it is whole
  watch();
  history_.save();
  list();
  scroll(false);
  node.dataset.done = "1";
}

// Conversations.

function list() {
  $("list").replaceChildren(...history_.all.map(one => {
    const entry = element("div", history_.now && one.id === history_.now.id ? "entry now" : "entry");
    const open = button(one.title, () => { leave(); history_.open(one.id); showAll(); });
    open.className = "open";
    open.title = one.title;
    const remove = button("✕", () => {
      history_.remove(one.id);
      if (history_.now.id === one.id) { leave(); history_.begin(); showAll(); }
      list();
    });
    remove.className = "remove";
    remove.setAttribute("aria-label", `Delete ${one.title}`);
    entry.append(open, remove);
    return entry;
  }));
}

function leave() {
  if (running) running.abort();
  document.body.classList.remove("menu");
}

// Settings, which this browser remembers.

function restore() {
  const kept = JSON.parse(localStorage.getItem("anybit.settings") || "{}");
  for (const name of [...SETTINGS, "system"]) $(name).value = kept[name] ?? $(name).defaultValue;
}

function keep() {
  const values = Object.fromEntries([...SETTINGS, "system"].map(name => [name, $(name).value]));
  localStorage.setItem("anybit.settings", JSON.stringify(values));
}

// The header.

function size(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

async function introduce() {
  try {
    about = await server.about();
  } catch (error) {
    $("formats").textContent = error.message;
    return;
  }
  $("model").textContent = document.title = about.model;
  const formats = Object.keys(about.formats);
  $("formats").textContent = formats.length
    ? `${formats.join(", ")} · ${about.bits.toFixed(2)} bits a weight · ${size(about.bytes)} instead of ${size(about.dense_bytes)}`
    : `${about.dtype}, not quantized`;
  $("told").hidden = !about.template;
  $("hint").textContent = about.template
    ? "Everything stays on this server, and conversations in this browser."
    : "This model has no chat template: it continues a text instead of answering. Begin one.";
  $("starts").replaceChildren(...STARTS[about.template ? "chat" : "text"].map(text => button(text.split("\n")[0], () => {
    $("prompt").value = text;
    grow();
    $("prompt").focus();
  })));
}

async function watch() {
  clearTimeout(timer);
  try {
    const now = await server.load();
    const waiting = now.waiting ? `, ${now.waiting} waiting` : "";
    $("load").textContent = `${now.running} running${waiting} · cache ${(now.cache * 100).toFixed(0)} %`;
  } catch {
    $("load").textContent = "no answer from the server";
  }
  clearTimeout(timer);
  timer = setTimeout(watch, document.hidden ? 10000 : 2000);
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("prompt").value;
  if (!text.trim()) return;
  $("prompt").value = "";
  grow();
  send(text);
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
});
$("new").addEventListener("click", () => { leave(); history_.begin(); showAll(); $("prompt").focus(); });
$("menu").addEventListener("click", () => document.body.classList.toggle("menu"));
$("chat").addEventListener("click", () => document.body.classList.remove("menu"));
$("settings").addEventListener("click", () => {
  $("drawer").hidden = !$("drawer").hidden;
  $("settings").setAttribute("aria-expanded", String(!$("drawer").hidden));
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  if (document.body.classList.contains("menu")) $("menu").focus();
  document.body.classList.remove("menu");
});
$("drawer").addEventListener("change", event => {
  if (event.target.type === "number" && event.target.value !== "") event.target.value = bounded(event.target);
  keep();
});
$("drawer").addEventListener("input", keep);
$("defaults").addEventListener("click", () => {
  for (const name of [...SETTINGS, "system"]) $(name).value = $(name).defaultValue;
  keep();
});

restore();
history_.reopen();
list();
introduce().then(() => running || showAll()); // text is shown as Markdown only where the model has a chat template
watch();
