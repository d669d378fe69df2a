/** The drawer that answers the next question about one layer.
 *
 * The run page wires it once: `wireDrawer({ view, onChange })` with the page's view (from, to, metric and slot are read when the
 * drawer draws) and `onChange(values)`, which the drawer calls to change that view: { from, to } when somebody zooms in it, { q }
 * to filter the heatmap. It keeps its own choices in the address beside the page's: `layer`, `at` (a step) and `layer_*`.
 * The page calls `refreshLayer()` after each live update, zoom or theme change; without an open drawer that does nothing.
 */
import { DrawerCharts } from "./drawerplots.js";

const OWN = ["layer", "at", "layer_metric", "layer_slots", "layer_scale", "layer_blocks"];
const COPIED_MS = 1600;

let view = { from: null, to: null };
let onChange = () => {};
let dialog = null;
let body = null;
let remark = null;
let charts = null;
let shown = null;
let opener = null;
let filling = null;
/** Another layer was opened and its name not yet focused: a live update may come between. */
let isArriving = false;
let pointedAt = null;

/** Open the drawer on a layer, by its full name; `at` is the step that was pointed at, `metric` and `slot` what to draw. */
export function openLayer(name, { at = null, metric = null, slot = null } = {}) {
  const isNew = !dialog?.open;
  const own = { layer: name, at, layer_metric: metric, layer_slots: slot };
  if (!isNew) Object.assign(own, { layer_metric: metric ?? chosen("layer_metric"), layer_scale: chosen("layer_scale"), layer_blocks: chosen("layer_blocks") });
  address(own, { clear: true });
  return show(name);
}

/** Close it; Back opens it again. */
function closeLayer() {
  if (chosen("layer") !== null) address({}, { clear: true });
  if (dialog?.open) dialog.close();
}

/** Draw the open drawer again, after new samples, another zoom or another theme. */
export async function refreshLayer() {
  if (dialog?.open && shown !== null) await fill();
}

/** Take up the page's view, open what the address names and follow Back and Forward. */
export function wireDrawer(page) {
  ({ view, onChange } = page);
  build();
  window.addEventListener("popstate", follow);
  follow();
}

function chosen(name) {
  return new URLSearchParams(location.search).get(name);
}

/** Put own choices into the address, as a step that Back returns from. */
function address(values, { clear = false, push = true } = {}) {
  const query = new URLSearchParams(location.search);
  if (clear) for (const name of OWN) query.delete(name);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, String(value));
  }
  const text = `?${query}`;
  if (text === location.search) return;
  if (push) history.pushState(null, "", text);
  else history.replaceState(null, "", text);
}

function follow() {
  const name = chosen("layer");
  if (name !== null) show(name);
  else if (dialog.open) dialog.close();
}

function build() {
  dialog = document.createElement("dialog");
  dialog.className = "drawer";
  dialog.setAttribute("aria-labelledby", "drawer-title");
  body = document.createElement("div");
  body.className = "drawer-body";
  remark = document.createElement("p");
  remark.className = "drawer-remark";
  remark.setAttribute("role", "status");
  dialog.append(body, remark);
  (document.getElementById("drawer-root") ?? document.body).append(dialog);
  charts = new DrawerCharts({
    onZoom: (from, to) => onChange({ from, to }),
    onStep: (step) => choose({ at: step }),
    onDecision: showDecision,
  });
  dialog.addEventListener("cancel", (event) => {
    event.preventDefault();
    closeLayer();
  });
  dialog.addEventListener("close", closed);
  dialog.addEventListener("pointerdown", (event) => (pointedAt = event.target));
  dialog.addEventListener("click", clicked);
  dialog.addEventListener("change", changed);
  dialog.addEventListener("keydown", pressed);
}

async function show(name) {
  const isNew = !dialog.open;
  const isOther = name !== shown;
  shown = name;
  if (isOther && !body.querySelector("[data-part]")) body.replaceChildren();
  if (isNew) {
    const { key, layer } = document.activeElement?.dataset ?? {};
    opener = { element: document.activeElement, key, layer };
    body.replaceChildren();
    dialog.showModal();
  }
  if (isOther) say("");
  if (isNew || isOther) body.scrollTop = 0;
  isArriving ||= isNew || isOther;
  await fill();
}

/** Fetch what the address names and put it in place, the text before the pictures; only the latest wish is answered. */
async function fill() {
  filling?.abort();
  const own = (filling = new AbortController());
  dialog.setAttribute("aria-busy", "true");
  const path = `/runs/${encodeURIComponent(runName())}`;
  const query = wish();
  try {
    const figures = load(`${path}/figures/layer/all?${query}`, own.signal).then((answer) => answer.json());
    // Told below; without this a text that fails would leave its rejection to nobody.
    figures.catch(() => {});
    const text = await (await load(`${path}/layer?${query}`, own.signal)).text();
    if (own.signal.aborted) return;
    put(text);
    if (isArriving) document.getElementById("drawer-title").focus({ preventScroll: true });
    isArriving = false;
    if (remark.dataset.kind === "trouble") say("");
    const pictures = await figures;
    if (!own.signal.aborted) await charts.draw(pictures);
  } catch (error) {
    if (own.signal.aborted) return;
    say(error.message, "trouble");
    if (!body.firstElementChild) body.append(head());
  }
  if (filling === own) dialog.removeAttribute("aria-busy");
}

/** What stands there while nothing is known of the layer: its name and the way out. */
function head() {
  const line = document.createElement("div");
  line.className = "drawer-line drawer-lost";
  const name = document.createElement("h2");
  Object.assign(name, { id: "drawer-title", className: "drawer-title", tabIndex: -1 });
  name.append(Object.assign(document.createElement("bdi"), { textContent: shown }));
  const close = Object.assign(document.createElement("button"), { type: "button", className: "button", textContent: "Close" });
  close.dataset.close = "";
  line.append(name, close);
  return line;
}

const runName = () => document.querySelector("[data-run]").dataset.run;

function wish() {
  const query = new URLSearchParams({ theme: document.documentElement.dataset.theme, metric: view.metric ?? "" });
  for (const name of OWN) if (chosen(name) !== null) query.set(name, chosen(name));
  if (view.from !== null && view.from !== undefined) query.set("from_step", String(Math.max(0, Math.round(view.from))));
  if (view.to !== null && view.to !== undefined) query.set("to_step", String(Math.max(0, Math.round(view.to))));
  return query;
}

async function load(path, signal) {
  let answer;
  try {
    answer = await fetch(path, { signal, cache: "no-store" });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Error("the server cannot be reached; what you see is the last that came");
  }
  if (!answer.ok) throw new Error(await problem(answer));
  return answer;
}

async function problem(answer) {
  const { detail } = await answer.json().catch(() => ({}));
  if (answer.status === 401) return "sign in with a token that has the scope “control” to change something, “read” to look";
  return detail ?? `the server answered ${answer.status}`;
}

/** The first text is taken whole; later ones only where they differ, so that pictures, scroll and focus stay. */
function put(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").body;
  if (!body.querySelector("[data-part]")) {
    body.replaceChildren(...fresh.childNodes);
    return;
  }
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const open = [...body.querySelectorAll("details[open][data-key]")].map((each) => each.dataset.key);
  for (const part of fresh.querySelectorAll("[data-part]")) {
    const old = body.querySelector(`[data-part="${part.dataset.part}"]`);
    if (old.outerHTML !== part.outerHTML) old.replaceWith(part);
  }
  for (const key of open) byKey(key)?.setAttribute("open", "");
  if (focused && document.activeElement?.dataset.key !== focused) byKey(focused)?.focus({ preventScroll: true });
}

const byKey = (key) => body.querySelector(`[data-key="${CSS.escape(key)}"]`);

/** Escape, the cross or Back: focus returns to what opened it, or to what took its place meanwhile. */
function closed() {
  if (chosen("layer") !== null) address({}, { clear: true });
  filling?.abort();
  shown = null;
  charts.forget(body);
  body.replaceChildren();
  const { element, key, layer } = opener ?? {};
  if (element?.isConnected && element !== document.body) element.focus();
  else if (key) document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
  else if (layer) document.querySelector(`[data-layer="${CSS.escape(layer)}"]`)?.focus();
  else document.getElementById("map")?.focus({ preventScroll: true });
}

function choose(values) {
  address(values);
  return fill();
}

function clicked(event) {
  // A brush that ends beside the drawer is no click there.
  if (event.target === dialog && pointedAt === dialog) return closeLayer();
  const button = event.target.closest("button");
  if (!button || !body.contains(button)) return;
  const { dataset } = button;
  if ("close" in dataset) closeLayer();
  else if ("go" in dataset) go(dataset.go);
  else if ("copy" in dataset) copy(button);
  else if ("jump" in dataset) document.getElementById(`drawer-${dataset.jump}`).scrollIntoView({ block: "start", behavior: calm() ? "auto" : "smooth" });
  else if ("filter" in dataset) filter(dataset.filter);
  else if ("toggle" in dataset) toggle(button);
  else if ("unpin" in dataset) choose({ at: null });
  else if ("metric" in dataset) drawSignal(dataset);
  else if ("post" in dataset) post(button);
}

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function changed({ target }) {
  if (target.dataset.set === "metric") choose({ layer_metric: target.value, layer_slots: null, layer_scale: null });
  else if (target.dataset.set === "scale") choose({ layer_scale: target.value });
  else if (target.dataset.set === "blocks") choose({ layer_blocks: target.value });
}

function go(name) {
  address({ layer: name, at: null, layer_slots: null });
  show(name);
}

function filter(name) {
  closeLayer();
  onChange({ q: name });
}

/** One slot more or less; the last one stays, since no slot at all would mean all again. */
function toggle(button) {
  const all = [...body.querySelectorAll("[data-toggle]")];
  const next = button.getAttribute("aria-pressed") !== "true";
  const names = all.filter((each) => (each === button ? next : each.getAttribute("aria-pressed") === "true")).map((each) => each.dataset.toggle);
  if (!names.length) return;
  button.setAttribute("aria-pressed", String(next));
  choose({ layer_slots: names.join(",") });
}

async function drawSignal({ metric, slot, at }) {
  body.querySelector("#drawer-metric").scrollIntoView({ block: "start", behavior: "auto" });
  await choose({ layer_metric: metric, layer_slots: slot, layer_scale: null, at: at ?? null });
}

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    // Without a secure origin there is no clipboard: the name is selected instead.
    getSelection().selectAllChildren(document.getElementById("drawer-title"));
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
}

function showDecision(id) {
  const card = [...body.querySelectorAll("[data-decision]")].find((each) => each.dataset.decision === id);
  card?.scrollIntoView({ block: "center" });
  card?.focus({ preventScroll: true });
}

/** Change something: what happened is said below, a refusal with the scope that it takes. */
async function post(button) {
  const buttons = [...button.parentElement.querySelectorAll("button")];
  for (const each of buttons) each.disabled = true;
  say(`${button.textContent}…`);
  try {
    const answer = await fetch(button.dataset.post, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
    if (answer.ok) say(`${button.dataset.done}${await others(answer)}`, "done");
    else say(`Not done: ${await problem(answer)}${answer.status === 403 ? "; it takes the scope “control”" : ""}`, "refused");
  } catch {
    say("Not done: the server cannot be reached, nothing was changed", "refused");
  }
  for (const each of buttons) each.disabled = false;
  await fill();
}

/** What of the same remedy still waits for an approval. */
async function others(answer) {
  const count = (await answer.json().catch(() => ({}))).waiting?.length ?? 0;
  return count ? ` ${count} more ${count === 1 ? "decision" : "decisions"} of this remedy ${count === 1 ? "waits" : "wait"}: half of it helps little.` : "";
}

function say(text, kind = "") {
  remark.textContent = text;
  remark.dataset.kind = kind;
}

/** Keys of the drawer; the page's own do not act behind it, but the theme's does. */
function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const step = { j: "next", ArrowRight: "next", k: "previous", ArrowLeft: "previous" }[event.key];
  const button = step && byKey(step);
  if (!button) return;
  event.preventDefault();
  event.stopPropagation();
  if (!button.disabled) go(button.dataset.go);
}
