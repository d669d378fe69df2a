/** Refreshes the server-rendered parts of a page in place, and keeps ages current. */

const shown = new WeakMap();

/** Fetch `url` and swap in the children of each element marked data-fragment. */
export async function refreshFragments(url) {
  const response = await fetch(url, { headers: { Accept: "text/html" }, cache: "no-store" });
  if (!response.ok) throw new Error(`the page answered ${response.status}`);
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const old of document.querySelectorAll("[data-fragment]")) {
    const next = fresh.getElementById(old.id);
    if (next && next.innerHTML !== shown.get(old)) swap(old, next);
  }
  document.title = fresh.title;
  updateAges();
}

function swap(old, next) {
  const focused = old.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  shown.set(old, next.innerHTML);
  old.className = next.className;
  old.replaceChildren(...next.childNodes);
  if (focused) old.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

/** Write how long ago each <time data-age> was. */
export function updateAges() {
  for (const element of document.querySelectorAll("time[data-age]")) {
    const seconds = Math.max(0, (Date.now() - Date.parse(element.dateTime)) / 1000);
    element.textContent = ageText(seconds);
    element.title = element.dateTime;
  }
}

function ageText(seconds) {
  if (seconds < 2) return "now";
  if (seconds < 90) return `${Math.floor(seconds)} s ago`;
  if (seconds < 5400) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} days ago`;
}
