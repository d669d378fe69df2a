/** The run page by keyboard: shortcuts, tabs, rows of layers, cells of the heatmap. */

const TYPING = "input[type=search], input[type=text], select, textarea";

/** Follow keys; `page` holds the parts of the run page that they act on. */
export function wireKeys(page) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target === page.form.q) onFilterKey(event, page);
    else if (event.target.id === "map") onCellKey(event, page);
    else if (event.target.role === "tab") onTabKey(event);
    else if (event.target.matches("#worst button[data-layer], .alert-jump")) onRowKey(event);
    if (!event.defaultPrevented && !event.target.matches(TYPING)) onShortcut(event, page);
  });
}

function onShortcut(event, { form, zoom, togglePause, toggleTable }) {
  if (event.key === "/") {
    event.preventDefault();
    form.q.focus();
    form.q.select();
  } else if (event.key === "0") zoom(null, null);
  else if (event.key === "p") togglePause();
  else if (event.key === "t") toggleTable();
}

function onFilterKey(event, { form, applyControls }) {
  if (event.key === "Escape") {
    event.preventDefault();
    form.q.value = "";
    applyControls();
    form.q.blur();
  } else if (event.key === "ArrowDown") {
    event.preventDefault();
    document.querySelector("#worst button[data-layer]")?.focus();
  }
}

/** Up and down through a list of rows; past the first layer back to the filter. */
function onRowKey(event) {
  const kind = event.target.matches(".alert-jump") ? ".alert-jump" : "#worst button[data-layer]";
  const rows = [...document.querySelectorAll(kind)];
  const place = rows.indexOf(event.target);
  const next = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: rows.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  if (next < 0 && kind !== ".alert-jump") document.getElementById("filter").focus();
  else rows[Math.max(0, Math.min(next, rows.length - 1))].focus();
}

function onTabKey(event) {
  if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
  event.preventDefault();
  const other = document.getElementById(event.target.id === "tab-alerts" ? "tab-decisions" : "tab-alerts");
  other.click();
  other.focus();
}

function onCellKey(event, { view, heatmap, ring, change, openLayer }) {
  if (!heatmap.layout) return;
  if (event.key === "Enter" && view.row) {
    event.preventDefault();
    openLayer(view.row, { at: view.step });
    return;
  }
  if (event.key === "Escape" && (view.row || view.step !== null)) {
    event.preventDefault();
    change({ row: "", step: null });
    return;
  }
  const cell = ring.step(view, event.key);
  if (!cell) return;
  event.preventDefault();
  change(cell);
  ring.tell(view);
}
