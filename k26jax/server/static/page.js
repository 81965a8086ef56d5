"use strict";
// The chat: asks /v1/chat/completions of the server that this page came from, and nobody else.

const at = (id) => document.getElementById(id);
const MOST_TREES = 1000;
const messages = [];
let served = null, running = null, trees = [];

function make(name, className, parent) {
  const found = document.createElement(name);
  found.className = className;
  parent.append(found);
  return found;
}

function showError(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

function headers() {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// Returns an answer that is well; throws what the server says else.
async function ask(path, options = {}) {
  const answer = await fetch(path, { headers: headers(), ...options });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  if (answer.status === 401) {
    at("settings").open = true;
    at("key-label").hidden = false;
    at("key").focus();
  }
  throw new Error(body.error?.message || `the server answered ${answer.status}`);
}

async function findModel() {
  const info = await (await ask("server_info")).json();
  served = info.served_model_names[0];
  const drafts = info.algorithm === "DDTREE"
    ? `, trees of ${info.engine.speculative_ddtree_budget} nodes` : "";
  at("model").textContent = `${served}: ${info.algorithm}${drafts}, context ${info.context_length}`;
  if (!info.server.draft_trees) {
    at("tree-note").textContent = "The server shows trees if it is started with --draft-trees.";
  }
  at("trees").dataset.has = info.server.draft_trees ? "yes" : "";
  showError("");
}

// Yields the JSON of each event; comments keep a silent stream alive.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream ended before its end");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      if (block === "data: [DONE]") return;
      yield JSON.parse(block.slice(6));
    }
  }
}

function body() {
  const system = at("system").value.trim();
  const found = {
    model: served,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (at("limit").value) found.max_tokens = Number(at("limit").value);
  if (at("temperature").value) found.temperature = Number(at("temperature").value);
  if (at("thinking").value) found.thinking = { type: at("thinking").value };
  if (at("trees").open && at("trees").dataset.has) found.draft_trees = true;
  return found;
}

// One answer as it comes: its place on the page and its figures.
class Answer {
  constructor() {
    const turn = make("article", "turn assistant", at("chat"));
    turn.setAttribute("aria-label", "Answer");
    this.thoughts = make("details", "thoughts", turn);
    this.thoughts.hidden = true;
    this.summary = make("summary", "", this.thoughts);
    this.reasoning = make("p", "text", this.thoughts);
    this.content = make("p", "text", turn);
    this.ending = make("p", "ending", turn);
    this.ending.textContent = "…";
    this.begun = performance.now();
    this.first = this.last = null;
    this.tokens = 0;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    const now = performance.now();
    for (const { delta, finish_reason: reason } of event.choices) {
      if (delta.reasoning_content || delta.content) this.ending.textContent = "";
      if (delta.reasoning_content) {
        this.thoughts.hidden = false;
        this.reasoning.append(delta.reasoning_content);
        this.summary.textContent = "Thinking…";
      }
      if (delta.content) {
        this.content.append(delta.content);
        this.summary.textContent = "Thoughts";
      }
      if (reason) this.end(reason);
    }
    const tokens = event.usage?.completion_tokens || 0;
    if (tokens > this.tokens) {
      this.first ??= [now, tokens];
      [this.last, this.tokens] = [now, tokens];
    }
    if (event.k26jax?.trees) addTrees(event.k26jax.trees);
    this.showFigures(event);
  }

  showFigures(event) {
    if (this.first === null) return;
    const seconds = (this.last - this.first[0]) / 1000, after = this.tokens - this.first[1];
    const parts = [`${this.tokens} tokens`];
    if (seconds > 0) parts.push(`${(after / seconds).toFixed(1)} tokens/s`);
    const length = event.k26jax?.accept_length;
    if (length) this.length = `accept length ${length.toFixed(2)}`;
    if (this.length) parts.push(this.length);
    parts.push(`first after ${((this.first[0] - this.begun) / 1000).toFixed(2)} s`);
    at("figures").textContent = parts.join(" · ");
  }

  end(reason) {
    this.summary.textContent = "Thoughts";
    this.ending.textContent = reason === "stop" ? "" : `ended: ${reason}`;
  }
}

function addTrees(found) {
  const step = at("step"), atEnd = step.value === step.max;
  trees.push(...found);
  if (trees.length > MOST_TREES) trees = trees.slice(-MOST_TREES);
  step.max = trees.length;
  if (atEnd || trees.length === found.length) step.value = trees.length;
  at("step-label").hidden = false;
  showTree();
}

function showTree() {
  const tree = trees[at("step").value - 1];
  if (!tree || !at("trees").open) return;
  const accepted = tree.path.length - 1, drafted = tree.tokens.length - 1;
  at("step-text").textContent = `${at("step").value} of ${trees.length}`;
  at("tree-note").textContent =
    `${accepted} of ${drafted} drafted nodes accepted: the marked ones after the first, which is the last token before.`;
  drawTree(at("tree"), tree);
}

function forgetTrees() {
  trees = [];
  at("step").max = at("step").value = 1;
  at("step-label").hidden = true;
  at("tree").replaceChildren();
}

// Wide, the conversation scrolls by itself; narrow, it scrolls together with what is below it.
function isDown() {
  const view = at("chat").parentElement.getBoundingClientRect();
  return at("chat").lastElementChild.getBoundingClientRect().bottom < view.bottom + 40;
}

function scrollDown() {
  at("chat").lastElementChild.scrollIntoView({ block: "end" });
}

async function send(text) {
  messages.push({ role: "user", content: text });
  const mine = make("article", "turn user", at("chat"));
  mine.setAttribute("aria-label", "You");
  make("p", "text", mine).textContent = text;
  const answer = new Answer();
  scrollDown();
  forgetTrees();
  running = new AbortController();
  setRunning(true);
  try {
    if (served === null) await findModel();
    const options = { method: "POST", body: JSON.stringify(body()), signal: running.signal };
    for await (const event of eventsOf(await ask("v1/chat/completions", options))) {
      const wasDown = isDown();
      answer.take(event);
      if (wasDown) scrollDown();
    }
    at("said").textContent = "The answer is complete.";
  } catch (error) {
    answer.end(error.name === "AbortError" ? "stopped" : "failed");
    if (error.name !== "AbortError") showError(error.message);
  }
  if (answer.tokens) {
    messages.push({ role: "assistant", content: answer.content.textContent });
  } else {
    messages.pop();
    at("text").value ||= text;
  }
  running = null;
  setRunning(false);
  at("text").focus();
}

function setRunning(isRunning) {
  at("send").hidden = isRunning;
  at("stop").hidden = !isRunning;
  at("clear").disabled = isRunning;
  if (isRunning) {
    showError("");
    at("said").textContent = "";
    at("figures").textContent = "waiting for the first token";
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  send(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  messages.length = 0;
  at("chat").replaceChildren();
  forgetTrees();
  at("figures").textContent = "ready";
  showError("");
  at("text").focus();
});
at("options").addEventListener("submit", (event) => event.preventDefault());
at("step").addEventListener("input", showTree);
at("trees").addEventListener("toggle", showTree);
at("key").addEventListener("change", () => findModel().catch((error) => showError(error.message)));
findModel().catch((error) => showError(error.message));
