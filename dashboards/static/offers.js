/** Offers only the slots that exist for the chosen metric. */

/** Fill the slot list for the form's metric; the selection stays where it can. Returns whether it stayed. */
export function offerSlots(form, wanted = form.slot.value) {
  const entry = document.querySelector(`#offer [data-metric="${CSS.escape(form.metric.value)}"]`);
  const slots = entry?.dataset.slots ? entry.dataset.slots.split(",") : [];
  const present = [...form.slot.options].slice(1).map((option) => option.value);
  if (present.join() !== slots.join()) {
    form.slot.replaceChildren(form.slot.options[0], ...slots.map((name) => new Option(name, name)));
  }
  form.slot.value = slots.includes(wanted) ? wanted : "";
  return form.slot.value === wanted;
}

/** The colour scale that a metric opens with. */
export function usualScale(form) {
  return form.metric.selectedOptions[0]?.dataset.scale ?? form.scale.value;
}
