// The page of `llamatrain ui`: it asks the server (ui/server.py) for everything, and the server alone.
"use strict";

const SECONDS = 2; // between two looks at a run
const ANNOUNCED = 15; // seconds between two messages for screen readers
const $ = (id) => document.getElementById(id);

// ---- requests ---------------------------------------------------------------

class Problem extends Error {
  constructor(message, field) {
    super(message);
    this.field = field || "";
  }
}

async function ask(path, body, options = {}) {
  const request = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, { ...request, ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Has it ended? Start it again with: llamatrain ui");
  }
  if (!response.ok) {
    const { error, field } = await response.json();
    throw new Problem(error, field);
  }
  return response;
}

const get = async (path, values = {}) => (await ask(`${path}?${new URLSearchParams(values)}`)).json();
const post = async (path, body) => (await ask(path, body)).json();

// ---- building the page ------------------------------------------------------

/** Return an element with attributes and children; functions become listeners. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set markup that the server made, unless it is already there. */
function setMarkup(element, markup) {
  if (element.markup !== markup) element.innerHTML = element.markup = markup;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function formatSize(bytes) {
  if (bytes === null || bytes === undefined) return "";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (bytes >= size) return `${Number((bytes / size).toPrecision(3))} ${unit}`;
  return `${bytes} B`;
}

function formatTime(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

const formatNumber = (number) => (Math.abs(number) >= 1000 ? Math.round(number).toLocaleString("en") : String(Number(number.toPrecision(3))));

// ---- errors stand next to their fields --------------------------------------

function clearErrors(container) {
  for (const element of container.querySelectorAll(".error")) element.hidden = true;
  for (const element of container.querySelectorAll("[aria-invalid]")) element.removeAttribute("aria-invalid");
  $("problem").hidden = true;
}

function showError(error, place = $("problem")) {
  const field = error.field && [$(`option-${error.field}`), $(error.field)].find((element) => element && !element.closest("[hidden]"));
  const target = (field && $(`${field.id}-error`)) || place;
  target.textContent = error.message;
  target.hidden = false;
  if (target !== place) {
    const advanced = field.closest("details");
    if (advanced) advanced.open = true;
    field.setAttribute("aria-invalid", "true");
    field.focus();
  } else {
    target.scrollIntoView({ block: "nearest" });
  }
}

/** Do something that takes time: the button waits, and errors are shown. */
async function busy(button, words, work, place) {
  if (button.disabled) return;
  button.disabled = true;
  const status = $("busy");
  status.textContent = words;
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showError(error, place);
  } finally {
    button.disabled = false;
    status.textContent = "";
  }
}

// ---- model and data ---------------------------------------------------------

const command = () => new FormData($("new")).get("command");

async function showFolder(folder) {
  const found = await get("/api/files", { folder });
  $("where").textContent = found.folder ? `${found.root}/${found.folder}` : found.root;
  const rows = found.entries.map(fileRow);
  if (found.parent !== null) rows.unshift(make("tr", {}, make("td", { colspan: 3 }, folderButton("..", found.parent, "the folder above"))));
  if (!rows.length) rows.push(make("tr", {}, make("td", {}, "the folder is empty")));
  $("files").replaceChildren(make("tbody", {}, ...rows));
}

function folderButton(name, path, label) {
  const open = async () => {
    try {
      await showFolder(path);
      $("files").querySelector("button")?.focus();
    } catch (error) {
      showError(error);
    }
  };
  return make("button", { type: "button", class: "entry", "aria-label": label || `Open the folder ${name}`, click: open }, name);
}

function fileRow(entry) {
  let name = entry.name;
  if (entry.kind === "folder" || entry.kind === "run") name = folderButton(`${entry.name}/`, entry.path);
  else if (entry.kind === "model") name = chooseButton(entry, "Choose the model", chooseModel);
  else if (entry.kind === "data") name = chooseButton(entry, "Add the data", addData);
  return make("tr", {}, make("td", {}, name), make("td", { class: "kind" }, entry.kind), make("td", { class: "n" }, formatSize(entry.size)));
}

function chooseButton(entry, what, choose) {
  return make("button", { type: "button", class: "entry", "aria-label": `${what} ${entry.name}`, click: () => choose(entry.path) }, entry.name);
}

function chooseModel(path) {
  $(command() === "finetune" ? "base" : "tokens_of").value = path;
  $("busy").textContent = `${path} is chosen`;
}

function addData(path) {
  const lines = $("data").value.split("\n").filter((line) => line.trim());
  if (!lines.includes(path)) lines.push(path);
  $("data").value = lines.join("\n");
  $("busy").textContent = `${path} is added to the data`;
}

// ---- options ----------------------------------------------------------------

let typed = {}; // what was typed, also for the other command

async function showFields() {
  const { fields, types } = await get("/api/fields", { command: command() });
  $("base-field").hidden = command() !== "finetune";
  $("tokens-field").hidden = command() === "finetune";
  const basic = fields.filter((field) => field.basic), panels = new Map();
  for (const field of fields) if (!field.basic) panels.set(field.panel, [...(panels.get(field.panel) || []), field]);
  $("basic").replaceChildren(...basic.map(makeField));
  $("panels").replaceChildren(...[...panels].map(([title, inside]) =>
    make("fieldset", {}, make("legend", {}, title), make("div", { class: "fields" }, ...inside.map(makeField)))));
  $("type").replaceChildren(...types.map((type) => make("option", { value: type }, type)));
}

function makeField(field) {
  const remember = (event) => { typed[field.name] = event.target.value; };
  const id = `option-${field.name}`, shared = { id, "aria-describedby": `${id}-help ${id}-error`, input: remember };
  const choices = field.kind === "switch" ? ["on", "off"] : field.choices;
  let input;
  if (choices.length) {
    const standard = field.default ? `default: ${field.default}` : "default";
    input = make("select", shared, make("option", { value: "" }, standard), ...choices.map((choice) => make("option", { value: choice }, choice)));
  } else if (field.kind === "lines") {
    input = make("textarea", { ...shared, rows: 1, spellcheck: "false", placeholder: field.unit });
  } else {
    input = make("input", { ...shared, autocomplete: "off", spellcheck: "false", placeholder: field.default || "default" });
  }
  input.value = typed[field.name] || "";
  const label = make("label", { for: id }, field.label);
  if (field.label !== field.name) label.append(" ", make("code", {}, field.name));
  return make("div", { class: "field" }, label, input, make("p", { class: "help", id: `${id}-help` }, field.sentence, field.kind === "lines" ? " One in each line." : ""),
    make("p", { class: "error", id: `${id}-error`, hidden: true }));
}

function readRun() {
  const options = Object.fromEntries(Object.entries(typed).filter(([name, value]) => $(`option-${name}`) && value.trim()));
  return { command: command(), base: $("base").value, data: $("data").value, tokens_of: $("tokens_of").value, options };
}

// ---- rows and plan ----------------------------------------------------------

async function showRows() {
  const { rows, summary } = await post("/api/preview", readRun());
  const place = $("rows");
  place.replaceChildren(make("h2", {}, "Rows as they are trained"), make("p", { class: "soft" }, "The marked text is trained; the rest is only read."));
  for (const [index, row] of rows.entries()) {
    const box = make("div", { class: "row" }, make("b", {}, `Row ${index + 1}`), ` ${row.used} of ${row.length} tokens, ${row.trained} trained`);
    for (const sample of row.samples) {
      if (sample.kind) box.append(make("p", { class: "soft" }, sample.kind));
      box.append(make("pre", {}, ...sample.runs.map(([text, trained]) => (trained ? make("mark", {}, text) : text))));
    }
    place.append(box);
  }
  place.append(...summary.map((line) => make("p", { class: "soft" }, line)));
  reveal(place);
}

async function showPlan() {
  const plan = await post("/api/plan", readRun());
  const place = $("plan-result"), adapter = Object.values(plan.adapter).reduce((sum, size) => sum + size, 0);
  const facts = [
    ["memory", formatSize(plan.total)],
    ["time", plan.seconds === null ? `unknown: ${plan.unknown}` : formatTime(plan.seconds)],
    ["speed", plan.tokens_per_second === null ? "unknown" : `${formatNumber(plan.tokens_per_second)} tokens a second`],
    ["parameters", plan.parameters.toLocaleString("en") + (adapter ? `, of which an adapter adds ${adapter.toLocaleString("en")}` : "")],
    ["batches", `${plan.batch * plan.splits} rows${plan.splits > 1 ? ` in ${plan.splits} micro-batches` : ""}, ${plan.precision}, ${plan.threads} threads`],
    ["recomputed", plan.remat],
  ];
  if (adapter) facts[3][1] = `${plan.parameters.toLocaleString("en")}, and ${adapter.toLocaleString("en")} of the adapter`;
  const needs = Object.entries(plan.needs).map(([name, size]) =>
    make("tr", {}, make("td", {}, name.replaceAll("_", " ")), make("td", { class: "n" }, formatSize(size))));
  place.replaceChildren(
    make("h2", {}, "Plan"),
    make("p", { class: plan.fits ? "soft" : "error" }, plan.fits ? "The run fits into the memory." : plan.excess),
    make("div", { class: "pick" },
      make("dl", { class: "facts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
      make("table", {}, make("tbody", {}, ...needs))),
  );
  reveal(place);
}

function reveal(place) {
  place.hidden = false;
  place.scrollIntoView({ block: "nearest" });
}

async function startRun() {
  const { folder } = await post("/api/start", readRun());
  location.hash = linkTo(folder);
}

// ---- runs -------------------------------------------------------------------

async function showRuns() {
  const { runs } = await get("/api/runs");
  const rows = runs.map((run) => make("div", { class: "card" },
    make("a", { href: linkTo(run.folder) }, run.folder), make("span", { class: `state ${run.state}` }, run.state),
    make("span", { class: "soft" }, describeProgress(run))));
  $("run-list").replaceChildren(...(rows.length ? rows : [make("p", { class: "soft" }, "There are no runs in this folder yet.")]));
}

function describeProgress(run) {
  const parts = [run.iters ? `step ${run.step} of ${run.iters}` : `step ${run.step}`];
  if (run.loss !== null) parts.push(`loss ${run.loss.toFixed(3)}`);
  if (run.left) parts.push(`${formatTime(run.left)} left`);
  if (run.memory) parts.push(`${formatSize(run.memory)} of memory`);
  return parts.join(", ");
}

let shown = null; // the run on the page
let announced = 0;

async function showRun(folder) {
  const run = await get("/api/run", { folder });
  if (folder !== currentRun()) return null;
  const isNew = shown?.folder !== run.folder, isLive = ["starting", "running", "stopping"].includes(run.state);
  const changed = isNew || shown.state !== run.state;
  setText($("run-title"), run.folder);
  setText($("state"), run.state);
  $("state").className = `state ${run.state}`;
  const starts = "The run starts; a first run compiles its kernels, which takes a minute or two.";
  setText($("status"), run.state === "starting" ? starts : describeProgress(run));
  if (changed || (isLive && Date.now() - announced > ANNOUNCED * 1000)) {
    setText($("announced"), `${run.state}: ${$("status").textContent}`);
    announced = Date.now();
  }
  setText($("run-error"), run.error);
  $("run-error").hidden = !run.error;
  $("stop").hidden = !isLive;
  setText($("stop"), run.state === "stopping" ? "Stop at once" : "Stop and save");
  $("resuming").hidden = !run.resumable;
  $("report").hidden = !run.step;
  $("report").href = `/report?${new URLSearchParams({ folder: run.folder })}`;
  setMarkup($("summary"), run.summary);
  setMarkup($("charts"), run.step ? run.charts : "");
  setMarkup($("samples"), run.samples);
  showLog(run);
  showResults(run, isLive, changed);
  if (isNew) startConversation();
  shown = run;
  return run;
}

function showLog(run) {
  const log = $("log"), atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  $("log-box").hidden = !run.log.length;
  if (run.state === "failed") $("log-box").open = true;
  setText($("line"), run.line);
  setText(log, run.log.join("\n"));
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function showResults(run, isLive, changed) {
  $("talk").hidden = !run.results.length;
  $("export").hidden = !run.results.length || isLive;
  if (changed || run.results.length !== shown.results.length) {
    for (const select of [$("result"), $("exported")]) {
      const before = select.value;
      select.replaceChildren(...run.results.map((name) => make("option", { value: name }, name)));
      if (run.results.includes(before)) select.value = before;
    }
    $("out").value = `${run.folder}/merged.gguf`;
    $("more").value = run.iters ? String(run.step < run.iters ? run.iters : 2 * run.iters) : "";
    $("other").value = run.base;
  }
  const files = JSON.stringify(run.files);
  if ($("run-files").files !== files) {
    $("run-files").files = files;
    const rows = run.files.map((file) => make("tr", {},
      make("td", {}, make("a", { href: `/download?${new URLSearchParams({ path: file.path })}`, download: file.name }, file.name)),
      make("td", { class: "n" }, formatSize(file.size))));
    $("run-files").replaceChildren(make("tbody", {}, ...rows));
  }
}

/** The model and the adapter of a result: an adapter is used with its base. */
function sourceOf(name) {
  const path = `${shown.folder}/${name}`, isAdapter = shown.results.includes("adapter.gguf");
  return isAdapter ? { model: shown.base, lora: path } : { model: path, lora: "" };
}

// ---- talking ----------------------------------------------------------------

let conversation = "", answering = null;

function startConversation() {
  conversation = crypto.randomUUID();
  $("columns").replaceChildren();
}

async function say() {
  const prompt = $("prompt").value;
  const other = $("other").value.trim(), sources = [sourceOf($("result").value)];
  if (other) sources.push({ model: other, lora: "" });
  const titles = [$("result").value, other].slice(0, sources.length);
  const columns = $("columns"), isChat = $("as-chat").checked;
  if (!isChat || [...columns.children].map((column) => column.title).join("\n") !== titles.join("\n")) {
    startConversation();
    columns.replaceChildren(...titles.map((title) => make("div", { title }, make("h3", {}, title))));
  }
  const answers = [...columns.children].map((column) => {
    const answer = make("p", { class: "said model", "aria-live": "polite", "aria-busy": "true" });
    column.append(make("p", { class: "said user" }, prompt), answer);
    return answer;
  });
  const sampling = { n: Number($("n").value), temp: Number($("temp").value) };
  const body = { name: conversation, sources, prompt, chat: isChat, sampling };
  answering = new AbortController();
  $("hush").hidden = false;
  try {
    const response = await ask("/api/chat", body, { signal: answering.signal });
    for await (const piece of readLines(response)) {
      const answer = answers[piece.side];
      if (piece.text) answer.append(piece.text);
      if (piece.done) answer.removeAttribute("aria-busy");
      if (piece.error) answer.after(make("p", { class: "error" }, piece.error));
      for (const note of piece.notes || []) answer.after(make("p", { class: "help" }, note));
    }
    if (isChat) $("prompt").value = "";
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    for (const answer of answers) answer.removeAttribute("aria-busy");
    $("hush").hidden = true;
  }
}

async function* readLines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Problem("The answer was cut off.");
    });
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

// ---- export -----------------------------------------------------------------

async function writeModel() {
  const source = sourceOf($("exported").value);
  $("written").textContent = "Writing the model ...";
  try {
    const { path, bytes, notes } = await post("/api/export", { ...source, out: $("out").value.trim(), type: $("type").value, overwrite: $("overwrite").checked });
    $("written").replaceChildren(`${path} is written (${formatSize(bytes)}). `, ...notes.map((note) => make("span", { class: "soft" }, `${note}. `)),
      make("a", { href: `/download?${new URLSearchParams({ path })}`, download: true }, "Download it"));
  } catch (error) {
    $("written").textContent = "";
    throw error;
  }
}

// ---- which page is shown ----------------------------------------------------

const linkTo = (folder) => `#run=${encodeURIComponent(folder)}`;
const currentRun = () => (location.hash.startsWith("#run=") ? decodeURIComponent(location.hash.slice(5)) : null);
let timer = 0;

async function refresh() {
  clearTimeout(timer);
  const folder = currentRun(), page = folder !== null ? "run" : location.hash === "#runs" ? "runs" : "new";
  for (const name of ["new", "runs", "run"]) $(name).hidden = name !== page;
  for (const name of ["new", "runs"]) {
    const isCurrent = name === page || (name === "runs" && page === "run");
    isCurrent ? $(`to-${name}`).setAttribute("aria-current", "page") : $(`to-${name}`).removeAttribute("aria-current");
  }
  document.title = folder !== null ? `${folder} – llamatrain` : "llamatrain";
  try {
    if (page === "runs") await showRuns();
    if (page === "run") await showRun(folder);
    if (page !== "new") $("problem").hidden = true;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showError(error);
  } finally {
    clearTimeout(timer);
    if (page !== "new") timer = setTimeout(refresh, SECONDS * 1000);
  }
}

function openPage() {
  $("problem").hidden = true;
  refresh();
  $("content").focus({ preventScroll: true });
  scrollTo(0, 0);
}

async function begin() {
  history.replaceState(null, "", location.pathname + location.hash); // without the token
  const form = $("new"), act = (button, words, work) => button.addEventListener("click", () => {
    clearErrors(form);
    busy(button, words, work);
  });
  act($("preview"), "Reading the data ...", showRows);
  act($("plan"), "Planning; the first plan measures this machine ...", showPlan);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearErrors(form);
    busy($("start"), "Starting ...", startRun);
  });
  for (const radio of form.elements.command) radio.addEventListener("change", () => showFields().catch(showError));
  $("stop").addEventListener("click", () => busy($("stop"), "", async () => { await post("/api/stop", { folder: shown.folder }); await refresh(); }, $("run-error")));
  $("resume").addEventListener("click", () => busy($("resume"), "", async () => { await post("/api/resume", { folder: shown.folder, iters: $("more").value }); await refresh(); }, $("problem")));
  $("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    clearErrors($("chat"));
    busy($("say"), "", say, $("prompt-error"));
  });
  $("hush").addEventListener("click", () => answering?.abort());
  $("fresh").addEventListener("click", () => { startConversation(); $("prompt").focus(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("chat").requestSubmit();
    }
  });
  $("exporting").addEventListener("submit", (event) => {
    event.preventDefault();
    clearErrors($("export"));
    busy($("merge"), "", writeModel, $("export-error"));
  });
  addEventListener("hashchange", openPage);
  try {
    await Promise.all([showFolder(""), showFields()]);
    if (!location.hash) {
      const { runs } = await get("/api/runs"), live = runs.find((run) => ["starting", "running", "stopping"].includes(run.state));
      if (live) location.replace(linkTo(live.folder)); // a run that goes on is what one comes back for
    }
  } catch (error) {
    showError(error);
  }
  refresh();
}

begin();
