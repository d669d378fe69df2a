/** The drawer's pictures, drawn with Plotly; those over steps move together. */

const ELEMENTS = { metric: "layer-metric", amax: "layer-amax", blocks: "layer-blocks", precision: "layer-precision", histogram: "layer-histogram" };
const OVER_STEPS = ["metric", "amax", "blocks", "precision"];
const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "autosize", scrollZoom: false };
/** Below this width the names at the lines' ends are left out and the picture takes their place. */
const NARROW_PX = 560;
const NARROW_MARGINS = { l: 46, r: 14 };

/** Plotly as the page loads it; the promise waits for that. */
function plotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  const { plotly: url } = document.querySelector("[data-plotly]").dataset;
  return new Promise((resolve, reject) => {
    const known = [...document.scripts].find((each) => each.getAttribute("src") === url);
    const script = known ?? Object.assign(document.createElement("script"), { src: url });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("the chart library could not be loaded")));
    if (!known) document.head.append(script);
  });
}

export class DrawerCharts {
  #onZoom;
  #onStep;
  #onDecision;
  #revision = 0;
  #drawing = 0;
  #applying = false;

  /** `onZoom(from, to)` follows a brush, `onStep(step)` a click in a picture, `onDecision(id)` one on a period. */
  constructor({ onZoom, onStep, onDecision }) {
    this.#onZoom = onZoom;
    this.#onStep = onStep;
    this.#onDecision = onDecision;
  }

  /** Draw figures by name. */
  async draw(figures) {
    const turn = ++this.#drawing;
    const library = await plotly();
    this.#applying = true;
    for (const [name, figure] of Object.entries(figures)) {
      const element = document.getElementById(ELEMENTS[name]);
      if (element && turn === this.#drawing) await this.#react(library, name, element, figure);
    }
    if (turn !== this.#drawing) return;
    this.#applying = false;
    document.querySelector(".drawer-steps")?.setAttribute("data-drawn", String(this.#revision));
  }

  /** The pictures within an element go: Plotly lets go of what it holds for them. */
  forget(root) {
    this.#drawing += 1;
    this.#applying = false;
    for (const element of root.querySelectorAll(".js-plotly-plot")) window.Plotly.purge(element);
  }

  async #react(library, name, element, figure) {
    figure.layout.datarevision = ++this.#revision;
    if (figure.layout.height) element.style.height = `${figure.layout.height}px`;
    delete figure.layout.height;
    if (element.clientWidth < NARROW_PX) narrow(name, figure.layout);
    const isNew = !element.classList.contains("js-plotly-plot");
    if (!isNew) library.Fx.unhover(element);
    await library.react(element, figure.data, figure.layout, CONFIG);
    if (!isNew) return;
    if (OVER_STEPS.includes(name)) {
      element.on("plotly_relayout", (change) => this.#relayouted(change));
      followPointer(element);
    }
    element.on("plotly_click", ({ points: [point] }) => this.#clicked(name, point));
  }

  #relayouted(change) {
    if (this.#applying) return;
    const [from, to] = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (change["xaxis.autorange"]) this.#onZoom(null, null);
    else if (from !== undefined) this.#onZoom(from, to);
  }

  #clicked(name, point) {
    if (name === "precision") {
      const [id] = point.data.customdata;
      if (id) this.#onDecision(id);
    } else if (name !== "histogram") this.#onStep(Math.max(0, Math.round(point.x)));
  }
}

function narrow(name, layout) {
  if (name === "histogram") return;
  Object.assign(layout.margin, NARROW_MARGINS);
  if (name === "amax") layout.annotations = layout.annotations?.filter((each) => each.x !== 1);
}

/** One vertical line through all pictures at the pointer, with its step. */
function followPointer(element) {
  element.addEventListener("pointermove", (event) => {
    const steps = element.closest(".drawer-steps");
    const cursor = steps.querySelector(".drawer-cursor");
    const { xaxis, margin } = element.layout;
    const box = element.getBoundingClientRect();
    const share = (event.clientX - box.left - margin.l) / (box.width - margin.l - margin.r);
    cursor.hidden = share < 0 || share > 1;
    if (cursor.hidden) return;
    cursor.style.left = `${event.clientX - steps.getBoundingClientRect().left}px`;
    const label = cursor.firstElementChild;
    label.textContent = Math.round(xaxis.range[0] + share * (xaxis.range[1] - xaxis.range[0])).toLocaleString("en");
    label.style.top = `${box.top - steps.getBoundingClientRect().top}px`;
  });
  element.addEventListener("pointerleave", () => {
    const cursor = element.closest(".drawer-steps")?.querySelector(".drawer-cursor");
    if (cursor) cursor.hidden = true;
  });
}
