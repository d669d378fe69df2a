/** The run page: wires controls, charts, lists and live updates together. */
import { wireActions } from "./actions.js";
import { Charts, followPointer, loadPlotly } from "./charts.js";
import { Connection, isAway } from "./connection.js";
import { openLayer, refreshLayer, wireDrawer } from "./drawer.js";
import { refreshFragments, updateAges } from "./fragments.js";
import { wireKeys } from "./keys.js";
import { followRun } from "./live.js";
import { offerSlots, usualScale } from "./offers.js";
import { Ring } from "./ring.js";
import { fillTable } from "./table.js";
import { chipsOf, chipsText, readAddress, readControls, readView, showControls, writeView } from "./view.js";

const FILTER_DELAY_MS = 250;
const COPIED_MS = 1600;
const CHIPS = ["open", "held", "acknowledged", "silenced", "resolved"];

const main = document.getElementById("main");
const form = document.getElementById("controls");
const notice = document.getElementById("notice");
const reset = document.getElementById("reset");
const heatmap = document.getElementById("heatmap");
const tableView = document.getElementById("table");
const view = readView(form);
const ring = new Ring();
const connection = new Connection(() => refresh());
let charts = null;
let live = null;

function say(error) {
  notice.textContent = error ? error.message : "";
  notice.hidden = !error;
}

async function refresh() {
  try {
    await Promise.all([refreshFragments(location.href), charts?.draw(view)]);
    offerSlots(form);
    connection.back();
    say(null);
    refreshLayer();
  } catch (error) {
    failed(error);
  }
}

/** A server that is away is the banner's to tell; anything else is said under the charts. */
function failed(error) {
  if (!isAway(error)) return say(error);
  const { step } = document.getElementById("run-state").dataset;
  connection.lost(step && `step ${Number(step).toLocaleString("en")}`);
}

/** Take new values into the view, the page and the address; the pictures follow with `refresh` or `zoom`. */
function change(values, how) {
  Object.assign(view, values);
  reset.disabled = view.from === null && view.to === null;
  showTab();
  showChips();
  showTable();
  writeView(view, how);
  if (heatmap.layout) ring.show(view);
}

/** Show the steps between two places of the step axis: those whose middle lies there, as the address can say it. */
function zoom(from, to) {
  const [first, last] = from === null || to === null ? [from, to] : [Math.max(0, Math.ceil(from)), Math.floor(to)];
  const range = first !== null && first > last ? [Math.round(from), Math.round(from)] : [first, last];
  change({ from: range[0], to: range[1] }, { push: true });
  charts?.zoom(view);
  // The server then sends the visible steps at their full resolution.
  charts?.draw(view).catch(failed);
  refreshLayer();
}

function applyControls(how) {
  change(readControls(form), how);
  refresh();
}

/** Another metric keeps the slot if it has it, and opens on its own scale. */
function metricChosen() {
  offerSlots(form);
  form.scale.value = usualScale(form);
}

function onDraw() {
  document.getElementById("stack").removeAttribute("data-loading");
  ring.show(view);
  if (view.table) fillTable(tableView, heatmap);
}

/** Show the first bad cell of an alert: its metric and slot, a window around the step, the cell ringed. */
function jump({ metric, slot, from, to, row, step }) {
  if ([...form.metric.options].some((option) => option.value === metric)) {
    form.metric.value = metric;
    metricChosen();
    offerSlots(form, slot);
  }
  // Which rows the filter leaves is the server's to say; the ring needs its row.
  if (row && !heatmap.layout?.meta.rows.includes(row)) form.q.value = "";
  change({ ...readControls(form), from: Number(from), to: Number(to), row, step: Number(step), table: "" }, { push: true });
  document.getElementById("map").scrollIntoView({ block: "nearest" });
  document.getElementById("map").focus({ preventScroll: true });
  refresh().then(() => heatmap.layout && ring.tell(view));
}

function onSideClick(event) {
  const alert = event.target.closest("a[data-jump]");
  const layer = event.target.closest("button[data-layer]");
  const chip = event.target.closest("button[data-chip]");
  if (alert && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    jump(alert.dataset);
  } else if (layer) openLayer(layer.dataset.layer, layer.dataset.at ? { at: Number(layer.dataset.at) } : {});
  else if (chip) toggleChip(chip);
}

function toggleChip(chip) {
  const chosen = chipsOf(view);
  if (!chosen.delete(chip.dataset.chip)) chosen.add(chip.dataset.chip);
  change({ alerts: chipsText(chosen, CHIPS) }, { push: true });
  refresh();
}

/** Pressed at once: the list itself follows with the server's answer. */
function showChips() {
  const chosen = chipsOf(view);
  for (const chip of document.querySelectorAll("[data-chip]")) chip.setAttribute("aria-pressed", String(chosen.has(chip.dataset.chip)));
}

function showTab() {
  for (const name of ["alerts", "decisions"]) {
    const tab = document.getElementById(`tab-${name}`);
    const chosen = view.tab === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    document.getElementById(`panel-${name}`).hidden = !chosen;
  }
}

function showTable() {
  document.getElementById("astable").setAttribute("aria-pressed", String(Boolean(view.table)));
  if (view.table && heatmap.layout && tableView.hidden) fillTable(tableView, heatmap);
  tableView.hidden = !view.table;
}

function toggleTable() {
  change({ table: view.table ? "" : "1" }, { push: true });
  if (view.table) tableView.focus();
}

async function copyLink(button) {
  const words = button.querySelector("span");
  try {
    await navigator.clipboard.writeText(location.href);
    words.textContent = "Copied";
  } catch {
    // Without a secure origin there is no clipboard: the address bar has the same text.
    words.textContent = "Copy it from the address bar";
  }
  setTimeout(() => (words.textContent = "Copy link"), COPIED_MS);
}

/** Tell a stream that works from a trainer that reports: only both together are live. */
function onLiveState(state) {
  const element = document.getElementById("live");
  const run = document.getElementById("run-state").value;
  const shown = state === "live" && (run === "stale" || run === "ended") ? run : state;
  const age = document.querySelector("#status time[data-age]")?.textContent.replace(/ ago$/, "");
  document.getElementById("pause").hidden = shown === "ended";
  const text = shown === "stale" && age ? `no report for ${age}` : shown;
  if (element.dataset.live !== shown) element.dataset.live = shown;
  if (element.textContent !== text) element.textContent = text;
}

function togglePause() {
  const button = document.getElementById("pause");
  const paused = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(paused));
  button.textContent = paused ? "Resume" : "Pause";
  live.setPaused(paused);
}

/** Back and Forward: everything that the address says is shown again. */
function onHistory() {
  const next = readAddress(form);
  Object.assign(view, next);
  showControls(form, view);
  offerSlots(form, next.slot);
  change({});
  refresh();
}

function wireControls() {
  let typing = null;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    clearTimeout(typing);
    if (event.target === form.metric) metricChosen();
    if (event.target === form.q) typing = setTimeout(applyControls, FILTER_DELAY_MS);
    else applyControls({ push: true });
  });
  reset.addEventListener("click", () => zoom(null, null));
  document.getElementById("astable").addEventListener("click", toggleTable);
  document.getElementById("copy").addEventListener("click", (event) => copyLink(event.currentTarget));
  document.getElementById("dismiss")?.addEventListener("click", () => document.getElementById("notices").remove());
  for (const side of [document.querySelector(".side"), tableView, form]) side.addEventListener("click", onSideClick);
  for (const name of ["alerts", "decisions"]) document.getElementById(`tab-${name}`).addEventListener("click", () => change({ tab: name }, { push: true }));
  document.getElementById("pause").addEventListener("click", togglePause);
  document.addEventListener("themechange", () => {
    charts?.draw(view).catch(failed);
    refreshLayer();
  });
  window.addEventListener("popstate", onHistory);
  new ResizeObserver(() => charts?.fit()).observe(document.getElementById("stack"));
}

/** The drawer asks for another view of the page: a zoom, a filter, or only its own address. */
function onDrawerChange(values) {
  if ("q" in values) {
    form.q.value = values.q;
    applyControls({ push: true });
  } else if ("from" in values || "to" in values) zoom(values.from ?? null, values.to ?? null);
  else change(values);
}

async function start() {
  offerSlots(form);
  change({});
  updateAges();
  followPointer(document.getElementById("stack"), document.getElementById("cursor"));
  live = followRun(main.dataset.run, refresh, onLiveState);
  setInterval(() => {
    updateAges();
    live.report();
  }, 1000);
  wireControls();
  wireActions(main.dataset.run, refresh);
  wireKeys({ form, view, heatmap, ring, change, applyControls, zoom, togglePause, toggleTable, openLayer });
  wireDrawer({ view, onChange: onDrawerChange });
  try {
    const follow = { onZoom: zoom, onPick: (layer, at) => openLayer(layer, { at }), onDraw };
    charts = new Charts(await loadPlotly(main.dataset.plotly), main.dataset.run, follow);
    await charts.draw(view);
  } catch (error) {
    failed(error);
  }
}

start();
