/** Keeps the run list current; filters and sorts it, with the choice in the address. */
import { Connection, isAway } from "./connection.js";
import { refreshFragments, updateAges } from "./fragments.js";

const REFRESH_MS = 5000;
const COPIED_MS = 1600;
const NUMBERS = ["step", "loss", "norm", "budget", "alerts"];

const filter = document.getElementById("filter");
const connection = new Connection(refresh);
const query = new URLSearchParams(location.search);
const view = {
  q: query.get("q") ?? "",
  state: new Set((query.get("state") ?? "").split(",").filter(Boolean)),
  sort: query.get("sort") ?? "",
};

async function refresh() {
  try {
    await refreshFragments("/");
    connection.back();
  } catch (error) {
    if (isAway(error)) connection.lost();
    else console.warn(error.message);
  }
}

function apply() {
  const rows = [...document.querySelectorAll("#runs tr[data-run]")];
  document.getElementById("list-tools").hidden = rows.length === 0;
  const wanted = view.q.toLowerCase();
  let matching = 0;
  for (const row of rows) {
    const fits = row.dataset.run.toLowerCase().includes(wanted) && (view.state.size === 0 || view.state.has(row.dataset.state));
    row.hidden = !fits;
    if (fits) matching++;
  }
  for (const body of document.querySelectorAll("#runs tbody")) body.hidden = !body.querySelector("tr[data-run]:not([hidden])");
  document.getElementById("matches").textContent = `${matching === rows.length ? "" : `${matching} of `}${rows.length} ${rows.length === 1 ? "run" : "runs"}`;
  const nothing = document.getElementById("nothing");
  if (nothing) nothing.hidden = matching > 0;
  for (const chip of document.querySelectorAll("#states button")) chip.setAttribute("aria-pressed", String(view.state.has(chip.dataset.state)));
  sort();
}

/** Rows are sorted inside their group: a run that reports never moves below one that is over. */
function sort() {
  const [key, direction] = [view.sort.replace("-", ""), view.sort.startsWith("-") ? -1 : 1];
  for (const button of document.querySelectorAll("#runs .sort")) {
    const head = button.closest("th");
    head.setAttribute("aria-sort", button.dataset.sort !== key ? "none" : direction < 0 ? "descending" : "ascending");
  }
  if (!key) return;
  for (const body of document.querySelectorAll("#runs tbody")) {
    const rows = [...body.querySelectorAll("tr[data-run]")];
    rows.sort((one, other) => direction * compare(valueOf(one, key), valueOf(other, key)));
    body.append(...rows);
  }
}

function valueOf(row, key) {
  const text = row.dataset[key] ?? "";
  if (!NUMBERS.includes(key)) return text;
  // What is missing or NaN stands behind every number.
  return text === "" || Number.isNaN(Number(text)) ? Infinity : Number(text);
}

function compare(one, other) {
  if (typeof one === "string") return one.localeCompare(other, "en", { numeric: true });
  return one === other ? 0 : one < other ? -1 : 1;
}

function remember() {
  const next = new URLSearchParams();
  if (view.q) next.set("q", view.q);
  if (view.state.size) next.set("state", [...view.state].join(","));
  if (view.sort) next.set("sort", view.sort);
  history.replaceState(null, "", next.size ? `?${next}` : location.pathname);
  apply();
}

function onClick(event) {
  const sorter = event.target.closest(".sort");
  const chip = event.target.closest("#states button");
  if (sorter) {
    const { sort: key } = sorter.dataset;
    view.sort = view.sort === key ? `-${key}` : view.sort === `-${key}` ? "" : key;
    if (!view.sort) location.search = new URLSearchParams([...new URLSearchParams(location.search)].filter(([name]) => name !== "sort"));
    else remember();
  } else if (chip) {
    if (!view.state.delete(chip.dataset.state)) view.state.add(chip.dataset.state);
    remember();
  } else if (event.target.id === "copy-snippet") copySnippet(event.target);
}

async function copySnippet(button) {
  try {
    await navigator.clipboard.writeText(document.getElementById("snippet").textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it by hand";
  }
  setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === filter && event.key === "Escape") {
    filter.value = view.q = "";
    remember();
    filter.blur();
  } else if (event.key === "/" && event.target !== filter) {
    event.preventDefault();
    filter.focus();
  }
}

filter.value = view.q;
filter.addEventListener("input", () => {
  view.q = filter.value;
  remember();
});
document.getElementById("list-tools").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("main").addEventListener("click", onClick);
document.addEventListener("keydown", onKey);
document.addEventListener("fragments", apply);
updateAges();
apply();
setInterval(updateAges, 1000);
setInterval(() => {
  if (!document.hidden && !connection.away) refresh();
}, REFRESH_MS);
