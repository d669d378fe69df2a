/** Refreshes the server-rendered parts of a page in place, and keeps ages current. */

const shown = new WeakMap();
let latest = 0;

/** Fetch `url` and swap in the children of each element marked data-fragment; "fragments" is then told to the document. */
export async function refreshFragments(url) {
  const turn = ++latest;
  const response = await fetch(url, { headers: { Accept: "text/html" }, cache: "no-store" });
  if (!response.ok) throw new PageError(response.status);
  // Without a session the server leads to its login page, which is not what was asked for.
  if (response.redirected) throw new PageError(401);
  const text = await response.text();
  // A later address has been asked for meanwhile: its answer must not be overtaken by this one.
  if (turn !== latest) return;
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const old of document.querySelectorAll("[data-fragment]")) {
    const next = fresh.getElementById(old.id);
    if (next && next.innerHTML !== shown.get(old)) swap(old, next);
  }
  document.title = fresh.title;
  updateAges();
  document.dispatchEvent(new CustomEvent("fragments"));
}

/** The server answered, but not with the page. */
class PageError extends Error {
  constructor(status) {
    super(status === 401 || status === 403 ? "this page may no longer be read: reload it to log in again" : `the page answered ${status}`);
    this.status = status;
  }
}

/** Children are exchanged; focus, and what was opened or closed, are found again by their data-key. */
function swap(old, next) {
  const focused = old.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const details = [...old.querySelectorAll("details[data-key]")].map((each) => [each.dataset.key, each.open]);
  shown.set(old, next.innerHTML);
  old.className = next.className;
  old.replaceChildren(...next.childNodes);
  for (const [key, open] of details) byKey(old, key)?.toggleAttribute("open", open);
  if (focused) byKey(old, focused)?.focus();
}

function byKey(root, key) {
  return root.querySelector(`[data-key="${CSS.escape(key)}"]`);
}

/** Write how long ago each <time data-age> was. */
export function updateAges() {
  for (const element of document.querySelectorAll("time[data-age]")) {
    const text = ageText(Math.max(0, (Date.now() - Date.parse(element.dateTime)) / 1000));
    if (element.textContent !== text) element.textContent = text;
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
