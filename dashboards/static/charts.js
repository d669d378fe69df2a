/** Draws the three step charts with Plotly and keeps their step axes together. */

const NAMES = ["loss", "heatmap", "timeline"];
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: "autosize", scrollZoom: false };
const MAX_COLUMNS = 1000;
const EDGE_STEPS = 20;
const VALUE_PADDING = 0.08;
const CARD_GAP_PX = 12;
/** Below this width the margins shrink to what shortened labels need. */
const NARROW_PX = 720;
const NARROW_MARGINS = { l: 98, r: 80 };
const NARROW_HEAD = 5;
const NARROW_TAIL = 8;

/** Load Plotly from this server; the promise resolves with the library. */
export function loadPlotly(url) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = url;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("the chart library could not be loaded"));
    document.head.append(script);
  });
}

/** The loss, heatmap and decision charts of one run. */
export class Charts {
  #plotly;
  #run;
  #elements = NAMES.map((name) => document.getElementById(name));
  #revision = 0;
  #applying = false;
  #full = null;
  #drawing = 0;
  #onZoom;
  #onPick;
  #onDraw;

  /** `onZoom(from, to)` follows the brush, `onPick(layer, step)` a click on a cell or a row's name, `onDraw()` each picture. */
  constructor(plotly, run, { onZoom, onPick, onDraw }) {
    this.#plotly = plotly;
    this.#run = run;
    this.#onZoom = onZoom;
    this.#onPick = onPick;
    this.#onDraw = onDraw;
  }

  /** Fetch and draw everything for `view`. */
  async draw(view) {
    const turn = ++this.#drawing;
    const answers = await Promise.allSettled(NAMES.map((name) => this.#fetch(name, view)));
    // A later wish has been answered meanwhile, or will be.
    if (turn !== this.#drawing) return;
    const figures = answers.map((answer) => answer.value);
    const steps = figures[NAMES.indexOf("heatmap")]?.layout.meta;
    if (steps) this.#full = steps.first_step === null ? null : [steps.first_step - 0.5, steps.last_step + 0.5];
    this.#applying = true;
    for (const [index, figure] of figures.entries()) if (figure) await this.#react(this.#elements[index], figure, view);
    this.#applying = false;
    this.#onDraw();
    // One chart that fails must not take the others along, nor go unnoticed.
    const failed = answers.find((answer) => answer.status === "rejected");
    if (failed) throw failed.reason;
  }

  /** Zoom all charts to the steps of `view`, or to everything. */
  async zoom(view) {
    const range = this.#range(view);
    if (!range) return;
    this.#applying = true;
    for (const element of this.#elements) {
      const change = { "xaxis.range": [...range] };
      for (const [axis, bounds] of valueRanges(element.data, range)) change[`${axis}.range`] = bounds;
      await this.#plotly.relayout(element, change);
    }
    this.#applying = false;
    this.#onDraw();
  }

  /** Fill the space there is: Plotly itself follows the window only, not what moves inside of it. */
  async fit() {
    const drawn = this.#elements.filter((element) => element.layout);
    await Promise.all(drawn.map((element) => this.#plotly.Plots.resize(element)));
    if (drawn.length) this.#onDraw();
  }

  async #fetch(name, view) {
    const query = new URLSearchParams({ theme: document.documentElement.dataset.theme });
    if (name === "heatmap") {
      for (const key of ["metric", "slot", "order", "scale", "q"]) query.set(key, view[key]);
      const width = this.#elements[NAMES.indexOf(name)].clientWidth;
      query.set("max_cols", String(Math.max(200, Math.min(MAX_COLUMNS, width || MAX_COLUMNS))));
      // A little more than is seen, so that cells at the edges are whole.
      if (view.from !== null) query.set("from_step", String(Math.max(0, Math.floor(view.from) - EDGE_STEPS)));
      if (view.to !== null) query.set("to_step", String(Math.max(0, Math.ceil(view.to) + EDGE_STEPS)));
    }
    const path = `/runs/${encodeURIComponent(this.#run)}/figures/${name}?${query}`;
    const response = await fetch(path, { cache: "no-store" });
    if (!response.ok) throw Object.assign(new Error(await problemText(response, name)), { status: response.status });
    return response.json();
  }

  async #react(element, figure, view) {
    // Plotly compares identities: a new revision makes it look at the data again (plotly.js #6164).
    figure.layout.datarevision = ++this.#revision;
    if (element.clientWidth < NARROW_PX) narrow(figure.layout);
    const range = this.#range(view);
    if (range) Object.assign(figure.layout.xaxis, { range: [...range] });
    if (range) for (const [axis, bounds] of valueRanges(figure.data, range)) figure.layout[axis].range = bounds;
    const isNew = !element.classList.contains("js-plotly-plot");
    // A hover left over from a larger matrix would look up a cell that is gone (plotly.js #4987).
    if (!isNew) this.#plotly.Fx.unhover(element);
    if (element.id === "timeline") leaveHoverToCard(figure.data);
    showPlotArea(element, figure.layout.margin);
    await this.#plotly.react(element, figure.data, figure.layout, CONFIG);
    if (!isNew) return;
    element.on("plotly_relayout", (change) => this.#relayouted(change));
    if (element.id === "timeline") showCard(element, document.getElementById("card"));
    if (element.id === "heatmap") this.#followClicks(element);
  }

  #followClicks(element) {
    element.on("plotly_click", ({ points: [point] }) => {
      const row = point.fullData.type === "heatmap" ? point.pointNumber[0] : element.data[0].y.indexOf(point.y);
      this.#onPick(element.layout.meta.rows[row], point.x);
    });
    element.addEventListener("click", (event) => {
      const row = labelAt(element, event);
      if (row !== null) this.#onPick(row, null);
    });
    element.addEventListener("pointermove", (event) => {
      const row = labelAt(element, event);
      element.classList.toggle("over-label", row !== null);
      element.title = row ?? "";
    });
  }

  #range(view) {
    if (!this.#full) return null;
    // Whole cells at both ends.
    return [view.from === null ? this.#full[0] : view.from - 0.5, view.to === null ? this.#full[1] : view.to + 0.5];
  }

  #relayouted(change) {
    if (this.#applying) return;
    const [from, to] = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (change["xaxis.autorange"]) this.#onZoom(null, null);
    else if (from !== undefined) this.#onZoom(from, to);
  }
}

/** The layer whose name is at the pointer, left of the picture; null elsewhere. */
function labelAt(element, event) {
  const { meta, margin } = element.layout ?? {};
  const box = element.getBoundingClientRect();
  const height = box.height - margin.t - margin.b;
  const share = (event.clientY - box.top - margin.t) / height;
  if (!meta?.rows.length || event.clientX - box.left >= margin.l || share < 0 || share >= 1) return null;
  return meta.rows[Math.floor(share * meta.rows.length)];
}

/** Margins and labels for a small screen: a name loses what all begin with, then its middle. */
function narrow(layout) {
  Object.assign(layout.margin, NARROW_MARGINS);
  const axis = layout.yaxis;
  const shared = layout.meta ? sharedStart(layout.meta.rows) : "";
  if (axis.ticktext) axis.ticktext = shortLabels(axis.ticktext.map((name) => (name.startsWith(shared) ? name.slice(shared.length) : name)));
  for (const each of [axis, layout.yaxis2]) if (each?.title) each.title.standoff = 2;
  // What marks the limits on the colour bar moves in with the margin.
  for (const line of layout.shapes ?? []) if (line.xanchor === 1) line.x1 = 46;
  for (const note of layout.annotations ?? []) if (note.xshift) note.xshift = 48;
}

/** The dotted parts that all names begin with; a name always keeps its last part. */
function sharedStart(names) {
  const parts = names.map((name) => name.split(".").slice(0, -1));
  const first = names.length > 1 ? parts[0] : [];
  const length = first.findIndex((part, level) => parts.some((each) => each[level] !== part));
  const kept = first.slice(0, length < 0 ? first.length : length);
  return kept.length ? `${kept.join(".")}.` : "";
}

/** Names without their middle; those that would then read the same keep what tells them apart instead of their end. */
function shortLabels(names) {
  let labels = names.map((name) => shorten(name, name.length));
  for (let pass = 0; pass < names.length; pass++) {
    const next = labels.map((label, place) => {
      const alike = names.filter((name, other) => labels[other] === label && name !== names[place]);
      return alike.length ? shorten(names[place], Math.min(...alike.map((name) => firstDifference(name, names[place])))) : label;
    });
    if (next.every((label, place) => label === labels[place])) break;
    labels = next;
  }
  return labels;
}

/** What is left of a name too long: its head, and from `start` on as much as fits. */
function shorten(name, start) {
  if (name.length <= NARROW_HEAD + NARROW_TAIL) return name;
  const from = Math.max(NARROW_HEAD, Math.min(start, name.length - NARROW_TAIL + 1));
  return `${name.slice(0, NARROW_HEAD)}…${name.slice(from, from + NARROW_TAIL - 1)}`;
}

function firstDifference(one, other) {
  let place = 0;
  while (place < one.length && one[place] === other[place]) place++;
  return place;
}

/** Value axes fitted to the lines that are in view: a steep start must not flatten what comes after it. */
function* valueRanges(traces, [from, to]) {
  const extremes = {};
  for (const trace of traces) {
    if (trace.mode !== "lines" || typeof trace.y?.find((value) => value !== null) !== "number") continue;
    const seen = trace.y.filter((value, index) => value !== null && trace.x[index] >= from && trace.x[index] <= to);
    if (seen.length) extremes[trace.yaxis === "y2" ? "yaxis2" : "yaxis"] = [Math.min(...seen), Math.max(...seen)];
  }
  for (const [axis, [low, high]] of Object.entries(extremes)) {
    const padding = (high - low || Math.abs(high) || 1) * VALUE_PADDING;
    yield [axis, [low - padding, high + padding]];
  }
}

async function problemText(response, name) {
  const body = await response.json().catch(() => ({}));
  return `${name}: ${body.detail ?? `the server answered ${response.status}`}`;
}

/** Tell the style sheet where the plot area is, so that gaps show their hatching and nothing else does. */
function showPlotArea(element, { l, r, t, b }) {
  for (const [name, value] of Object.entries({ l, r, t, b })) element.style.setProperty(`--plot-${name}`, `${value}px`);
}

/** Plotly clips labels to the chart, and the lane is low: its stories are shown in a card instead. */
function leaveHoverToCard(traces) {
  for (const trace of traces.filter((each) => each.customdata)) {
    trace.hoverinfo = "none";
    delete trace.hovertemplate;
  }
}

function showCard(element, card) {
  element.on("plotly_hover", ({ points: [point], event }) => {
    if (!point.customdata) return;
    card.replaceChildren(...point.customdata.map(paragraph));
    card.hidden = false;
    const box = card.parentElement.getBoundingClientRect();
    const x = event.clientX - box.left;
    // To the left where it fits: what led to a decision is there, what it answers is above it.
    const left = x - CARD_GAP_PX - card.offsetWidth;
    card.style.left = `${left >= 0 ? left : x + CARD_GAP_PX}px`;
    card.style.bottom = `${box.bottom - event.clientY + CARD_GAP_PX}px`;
  });
  element.on("plotly_unhover", () => {
    card.hidden = true;
  });
}

function paragraph([heading, ...lines]) {
  const element = document.createElement("p");
  for (const [index, text] of [heading, ...lines].entries()) {
    const line = document.createElement(index === 0 ? "strong" : "span");
    line.textContent = text;
    element.append(line);
  }
  return element;
}

/** Draw one vertical line through all charts at the pointer, with its step. */
export function followPointer(stack, cursor) {
  const label = cursor.querySelector("span");
  stack.addEventListener("pointermove", (event) => {
    const heatmap = document.getElementById("heatmap");
    const range = heatmap.layout?.xaxis.range;
    const { l, r } = heatmap.layout?.margin ?? {};
    const box = stack.getBoundingClientRect();
    const share = range ? (event.clientX - box.left - l) / (box.width - l - r) : -1;
    cursor.hidden = share < 0 || share > 1;
    if (cursor.hidden) return;
    cursor.style.left = `${event.clientX - box.left}px`;
    label.textContent = Math.round(range[0] + share * (range[1] - range[0])).toLocaleString("en");
  });
  stack.addEventListener("pointerleave", () => {
    cursor.hidden = true;
  });
}
