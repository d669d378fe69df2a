/** What the user looks at, kept in the address so that it can be shared. */

const NUMBERS = ["from", "to", "step"];
/** Left out of the address while they hold. */
const DEFAULTS = { tab: "alerts", alerts: "open,held" };
const NO_ALERTS = "none";

/** The values of the controls; the filter's text counts as it stands, spaces and all. */
export function readControls(form) {
  const { metric, slot, order, scale, q } = form;
  return { metric: metric.value, slot: slot.value, order: order.value, scale: scale.value, q: q.value };
}

/** The view that the server has read from the address and found good. */
export function readView(form) {
  const { row, tab, alerts, table } = form.dataset;
  const view = { ...readControls(form), row, tab, alerts: alerts || NO_ALERTS, table };
  for (const name of NUMBERS) view[name] = toNumber(form.dataset[name]);
  return view;
}

/** The view of an address that this page wrote itself. */
export function readAddress(form) {
  const query = new URLSearchParams(location.search);
  const view = readControls(form);
  for (const name of ["metric", "order", "scale"]) view[name] = query.get(name) ?? view[name];
  for (const name of ["slot", "q", "row", "table"]) view[name] = query.get(name) ?? "";
  for (const [name, value] of Object.entries(DEFAULTS)) view[name] = query.get(name) ?? value;
  for (const name of NUMBERS) view[name] = toNumber(query.get(name));
  return view;
}

/** Put a view into the controls; a slot that is not offered stays unchosen. */
export function showControls(form, view) {
  for (const name of ["metric", "slot", "order", "scale", "q"]) form[name].value = view[name];
}

/** Put the view into the address; `push` makes it a step that Back returns from. */
export function writeView(view, { push = false } = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(view)) {
    if (value === null || value === "" || value === DEFAULTS[name]) query.delete(name);
    else query.set(name, NUMBERS.includes(name) ? String(Math.max(0, Math.round(value))) : value);
  }
  const address = `?${query}`;
  if (address === location.search) return;
  if (push) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

/** The alert filters of a view as a set, and a set as the view's text. */
export const chipsOf = (view) => new Set(view.alerts.split(",").filter((name) => name !== NO_ALERTS));
export const chipsText = (chips, order) => order.filter((name) => chips.has(name)).join(",") || NO_ALERTS;

function toNumber(text) {
  return text && Number.isFinite(Number(text)) ? Number(text) : null;
}
