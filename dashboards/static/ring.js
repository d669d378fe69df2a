/** Rings one cell of the heatmap: where an alert began, or where the keyboard is. */

const LEAST_PX = 6;

export class Ring {
  #map = document.getElementById("map");
  #plot = document.getElementById("heatmap");
  #cell = document.getElementById("ring");
  #row = document.getElementById("ring-row");
  #words = document.getElementById("cell");

  /** Draw the ring for `view` over the heatmap as it is drawn now. */
  show(view) {
    const place = this.#place(view);
    this.#row.hidden = !place || !view.row;
    this.#cell.hidden = !place || place.x1 === null;
    if (!place) return;
    const { box, top, height } = place;
    set(this.#row, box.left, top, box.width, height);
    if (place.x1 !== null) {
      const width = Math.max(LEAST_PX, place.x1 - place.x0);
      set(this.#cell, (place.x0 + place.x1 - width) / 2, top, width, height);
    }
  }

  /** Say the ringed cell to a screen reader. */
  tell(view) {
    const { rows, label, unit } = this.#plot.layout.meta;
    const row = rows.indexOf(view.row);
    const column = this.#column(view.step);
    if (row < 0) {
      this.#words.textContent = view.row || view.step === null ? "" : `step ${view.step}, all layers`;
      return;
    }
    const value = column < 0 ? undefined : values(this.#plot)[row][column];
    const text = value === undefined ? "" : value === null ? this.#unmeasured(row, column, label) : `: ${label} ${valueText(value, unit)}`;
    // A layer may be called "0": without quotes it reads as a number.
    this.#words.textContent = `layer “${view.row}”${view.step === null ? "" : `, step ${view.step}`}${text}`;
  }

  /** The cell that an arrow key leads to from the view's, or null for another key. */
  step(view, key) {
    const { rows } = this.#plot.layout.meta;
    const steps = this.#plot.data[0].x;
    if (!rows.length || !steps.length) return null;
    const [from, to] = this.#plot.layout.xaxis.range;
    const seen = steps.filter((step) => step >= from && step <= to);
    const row = rows.indexOf(view.row);
    const column = view.step === null ? -1 : seen.findLastIndex((step) => step <= view.step);
    const last = seen.length - 1;
    const at = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, last],
    }[key];
    if (!at) return null;
    const clamp = (value, high) => Math.min(Math.max(value, 0), high);
    return { row: rows[row < 0 ? 0 : clamp(at[0], rows.length - 1)], step: seen[column < 0 ? last : clamp(at[1], last)] };
  }

  #unmeasured(row, column, label) {
    const mark = marksOf(this.#plot)(row, column);
    return mark ? `: ${label} ${mark}` : ": not sampled";
  }

  #column(step) {
    return step === null ? -1 : this.#plot.data[0].x.findLastIndex((each) => each <= step);
  }

  #place(view) {
    const layout = this.#plot.layout;
    if (!layout?.meta || (!view.row && view.step === null)) return null;
    const row = layout.meta.rows.indexOf(view.row);
    if (view.row && row < 0) return null;
    const { l, r, t, b } = layout.margin;
    const outer = { width: this.#map.clientWidth, height: this.#map.clientHeight };
    const box = { left: l, width: outer.width - l - r };
    const full = outer.height - t - b;
    // What speaks of the whole run, such as its loss, has a step and no row.
    const height = row < 0 ? full : Math.max(LEAST_PX, full / layout.meta.rows.length);
    const top = row < 0 ? t : t + ((row + 0.5) / layout.meta.rows.length) * full - height / 2;
    const [from, to] = layout.xaxis.range;
    const steps = this.#plot.data[0].x;
    const column = this.#column(view.step);
    if (column < 0 || view.step > to || view.step < from) return { box, top, height, x0: null, x1: null };
    // A cell reaches halfway to its neighbours.
    const [before, at, after] = [steps[column - 1], steps[column], steps[column + 1]];
    const width = layout.meta.step_width || 1;
    const pixel = (step) => l + (Math.min(Math.max((step - from) / (to - from), 0), 1)) * box.width;
    const left = before === undefined ? at - width / 2 : (before + at) / 2;
    const right = after === undefined ? at + width / 2 : (at + after) / 2;
    return { box, top, height, x0: pixel(left), x1: pixel(right) };
  }
}

/** The measured values behind the colours: on the log scale those are in customdata. */
export function values(plot) {
  return plot.data[0].customdata ?? plot.data[0].z;
}

/** Tells of a cell without a value whether it was measured: "NaN", "Inf", or undefined for one that was not. */
export function marksOf(plot) {
  const found = new Map();
  for (const trace of plot.data.filter(({ name }) => name === "NaN" || name === "Inf")) {
    for (const [place, y] of trace.y.entries()) found.set(`${trace.x[place]} ${y}`, trace.name);
  }
  const { x, y } = plot.data[0];
  return (row, column) => found.get(`${x[column]} ${y[row]}`);
}

/** A number for people, with its unit. */
export function valueText(value, unit) {
  if (value === null || value === undefined) return "–";
  const shown = unit === "%" ? value * 100 : value;
  const size = Math.abs(shown);
  const text = size !== 0 && (size < 1e-4 || size >= 1e6) ? shown.toExponential(2) : String(Number(shown.toPrecision(4)));
  return unit ? `${text} ${unit}` : text;
}

function set(element, left, top, width, height) {
  Object.assign(element.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
}
