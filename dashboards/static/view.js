/** What the user looks at (metric, scale, layers, steps), kept in the address so that it can be shared. */

const NUMBERS = ["from", "to"];

/** The values of the controls. */
export function readControls(form) {
  const { metric, slot, order, scale, q } = form;
  return { metric: metric.value, slot: slot.value, order: order.value, scale: scale.value, q: q.value.trim() };
}

/** The view that the address describes, with the form's values where it says nothing. */
export function readView(form) {
  const query = new URLSearchParams(location.search);
  const view = { ...readControls(form), from: null, to: null };
  for (const name of NUMBERS) {
    const text = query.get(name);
    if (text && Number.isFinite(Number(text))) view[name] = Number(text);
  }
  return view;
}

/** Put the view into the address without adding to the history. */
export function writeView(view) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(view)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, NUMBERS.includes(name) ? String(Math.round(value)) : value);
  }
  history.replaceState(null, "", `?${query}`);
}
