/** The heatmap as a table: the same rows, with what a picture says in numbers. */
import { marksOf, values, valueText } from "./ring.js";

const HEADS = ["Layer", "Worst in view", "At step", "Newest", "Steps sampled", "NaN", "Inf"];

/** Fill `element` from the heatmap as it is drawn. */
export function fillTable(element, plot) {
  const { rows, agg, unit, label } = plot.layout.meta;
  const [from, to] = plot.layout.xaxis.range;
  const steps = plot.data[0].x;
  const columns = steps.flatMap((step, column) => (step >= from && step <= to ? [column] : []));
  const marks = { NaN: countMarks(plot, "NaN", from, to), Inf: countMarks(plot, "Inf", from, to) };
  const markAt = marksOf(plot);
  const table = document.createElement("table");
  table.className = "table table--map";
  table.createCaption().textContent = `${label} of ${rows.length} ${rows.length === 1 ? "layer" : "layers"}, steps ${Math.ceil(from)} to ${Math.floor(to)}`;
  const head = table.createTHead().insertRow();
  for (const [place, text] of HEADS.entries()) head.append(cell("th", text, place > 0, { scope: "col" }));
  const body = table.createTBody();
  for (const [row, name] of rows.entries()) body.append(line(name, row));
  element.replaceChildren(table);

  function line(name, row) {
    const value = (column) => values(plot)[row][column];
    const finite = columns.filter((column) => value(column) !== null);
    const broken = columns.filter((column) => value(column) === null && markAt(row, column));
    const measured = [...finite, ...broken].sort((one, other) => one - other);
    const worse = (one, other) => (agg === "min" ? one < other : one > other);
    const text = (column) => (column === null ? "–" : value(column) === null ? markAt(row, column) : valueText(value(column), unit));
    // NaN and Inf are worse than any number.
    const worst = broken[0] ?? finite.reduce((best, column) => (best === null || worse(value(column), value(best)) ? column : best), null);
    const newest = measured.at(-1) ?? null;
    const tr = document.createElement("tr");
    const head = cell("th", "", false, { scope: "row" });
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "link", textContent: name });
    button.dataset.layer = name;
    if (worst !== null) button.dataset.at = String(steps[worst]);
    head.append(button);
    tr.append(
      head,
      cell("td", text(worst), true),
      cell("td", worst === null ? "–" : steps[worst].toLocaleString("en"), true),
      cell("td", text(newest), true),
      cell("td", `${measured.length} of ${columns.length}`, true),
      cell("td", String(marks.NaN.get(plot.data[0].y[row]) ?? 0), true),
      cell("td", String(marks.Inf.get(plot.data[0].y[row]) ?? 0), true),
    );
    return tr;
  }
}

function countMarks(plot, name, from, to) {
  const trace = plot.data.find((each) => each.name === name);
  const counts = new Map();
  for (const [place, y] of (trace?.y ?? []).entries()) {
    if (trace.x[place] >= from && trace.x[place] <= to) counts.set(y, (counts.get(y) ?? 0) + 1);
  }
  return counts;
}

function cell(kind, text, isNumber, attributes = {}) {
  const element = document.createElement(kind);
  element.textContent = text;
  if (isNumber) element.className = "num";
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
