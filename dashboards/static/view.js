/** What the user looks at (metric, scale, layers, steps), kept in the address so that it can be shared. */

const NUMBERS = ["from", "to"];

/** The view that the address describes, with the form's values where it says nothing. */
export function readView(form) {
  const query = new URLSearchParams(location.search);
  const view = { metric: form.metric.value, slot: form.slot.value, scale: form.scale.value, q: form.q.value, from: null, to: null };
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
