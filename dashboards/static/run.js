/** The run page: wires controls, charts and live updates together. */
import { Charts, followPointer, loadPlotly } from "./charts.js";
import { refreshFragments, updateAges } from "./fragments.js";
import { followRun } from "./live.js";
import { readControls, readView, writeView } from "./view.js";

const FILTER_DELAY_MS = 250;

const main = document.getElementById("run");
const form = document.getElementById("controls");
const notice = document.getElementById("notice");
const reset = document.getElementById("reset");
const view = readView(form);
let charts = null;

function say(error) {
  notice.textContent = error ? error.message : "";
  notice.hidden = !error;
}

async function refresh() {
  try {
    await Promise.all([refreshFragments(location.href), charts?.draw(view)]);
    say(null);
  } catch (error) {
    say(error);
  }
}

function change(values) {
  Object.assign(view, values);
  reset.hidden = view.from === null && view.to === null;
  writeView(view);
}

function zoom(from, to) {
  change({ from, to });
  charts.zoom(view);
  // The server then sends the visible steps at their full resolution.
  charts.draw(view).catch(say);
}

function onLiveState(state) {
  const live = document.getElementById("live");
  live.dataset.live = state;
  live.textContent = state;
}

function applyControls() {
  change(readControls(form));
  refresh();
}

function choose(select, value) {
  if ([...select.options].some((option) => option.value === value)) select.value = value;
}

/** Alerts zoom to their first bad step; layer names filter the heatmap to one row. */
function onSideClick(event) {
  const alert = event.target.closest("a[data-from]");
  const layer = event.target.closest("button[data-layer]");
  if (alert) {
    event.preventDefault();
    choose(form.metric, alert.dataset.metric);
    choose(form.slot, alert.dataset.slot);
    change({ from: Number(alert.dataset.from), to: null });
    applyControls();
  } else if (layer) {
    form.q.value = form.q.value === layer.dataset.layer ? "" : layer.dataset.layer;
    applyControls();
  }
}

function onKey(event, live) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input[type=search], select");
  if (event.key === "Escape" && event.target === form.q) {
    form.q.value = "";
    applyControls();
    form.q.blur();
  } else if (!typing && event.key === "/") {
    event.preventDefault();
    form.q.focus();
  } else if (!typing && event.key === "0") zoom(null, null);
  else if (!typing && event.key === "p") togglePause(live);
}

function togglePause(live) {
  const button = document.getElementById("pause");
  const paused = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(paused));
  button.textContent = paused ? "Resume" : "Pause";
  live.setPaused(paused);
}

function wireControls(live) {
  let typing = null;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    clearTimeout(typing);
    typing = setTimeout(applyControls, event.target === form.q ? FILTER_DELAY_MS : 0);
  });
  reset.addEventListener("click", () => zoom(null, null));
  document.querySelector(".side").addEventListener("click", onSideClick);
  document.getElementById("pause").addEventListener("click", () => togglePause(live));
  document.addEventListener("keydown", (event) => onKey(event, live));
  document.addEventListener("themechange", () => charts?.draw(view).catch(say));
}

async function start() {
  change({});
  updateAges();
  setInterval(updateAges, 1000);
  followPointer(document.getElementById("stack"), document.getElementById("cursor"));
  const live = followRun(main.dataset.run, refresh, onLiveState);
  wireControls(live);
  try {
    charts = new Charts(await loadPlotly(main.dataset.plotly), main.dataset.run, zoom);
    await charts.draw(view);
  } catch (error) {
    say(error);
  }
}

start();
