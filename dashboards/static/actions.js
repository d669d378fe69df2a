/** What people do to alerts, decisions and the run: one POST each, shown as pending until it is answered. */

const DOING = {
  ack: "acknowledging…",
  silence: "silencing…",
  resolve: "resolving…",
  approve: "approving…",
  reject: "rejecting…",
  revert: "reverting…",
};
const notice = document.getElementById("act-notice");
/** Verb by the alert ids or the decision that it is under way for. */
const pending = new Map();

/** Follow the buttons of alerts, decisions and the run; `done` is called after each change. */
export function wireActions(run, done) {
  const events = document.getElementById("events");
  events.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-act]");
    if (button) act(button, done);
    else if (event.target.closest("#kill")) askKill(run, done);
  });
  events.addEventListener("change", (event) => {
    if (event.target.id === "mode") setMode(run, event.target, done);
  });
  document.addEventListener("fragments", () => events.querySelectorAll("li.alert").forEach(showPending));
  document.addEventListener("pointerdown", closeMenus);
}

async function act(button, done) {
  const item = button.closest("li");
  const { act: verb, seconds, together } = button.dataset;
  const body = seconds ? { seconds: Number(seconds) } : together === undefined ? {} : { all_of_remedy: true };
  const paths = item.dataset.ids
    ? item.dataset.ids.split(",").map((id) => `/api/v1/alerts/${id}:${verb}`)
    : [`/api/v1/decisions/${encodeURIComponent(item.dataset.decision)}:${verb}`];
  const key = keyOf(item);
  pending.set(key, verb);
  button.closest("details")?.removeAttribute("open");
  showPending(item);
  try {
    let waiting = 0;
    for (const path of paths) waiting += (await send("POST", path, body)).waiting?.length ?? 0;
    say(waiting ? `Approved. ${waiting} more ${waiting === 1 ? "decision" : "decisions"} of this remedy ${waiting === 1 ? "waits" : "wait"}: half of it helps little.` : null);
    await done();
  } catch (error) {
    say(`Not done (${verb}): ${error.message}`, error.login);
  }
  pending.delete(key);
  document.querySelectorAll("#events li.alert").forEach(showPending);
}

const keyOf = (item) => item.dataset.ids ?? item.dataset.decision;

function showPending(item) {
  const verb = pending.get(keyOf(item));
  item.classList.toggle("is-pending", Boolean(verb));
  item.setAttribute("aria-busy", String(Boolean(verb)));
  for (const button of item.querySelectorAll(".act")) button.disabled = Boolean(verb);
  let remark = item.querySelector(".doing");
  if (!verb) remark?.remove();
  else if (!remark) {
    remark = document.createElement("span");
    remark.className = "doing";
    remark.textContent = DOING[verb];
    item.append(remark);
  }
}

function askKill(run, done) {
  const dialog = document.getElementById("confirm");
  dialog.returnValue = "cancel";
  dialog.onclose = async () => {
    if (dialog.returnValue === "kill") await attempt("kill switch", () => send("POST", `/api/v1/runs/${encodeURIComponent(run)}:kill-switch`, {}), done);
    document.getElementById("kill")?.focus();
  };
  dialog.showModal();
}

async function setMode(run, select, done) {
  select.disabled = true;
  const changed = await attempt("mode", () => send("PATCH", `/api/v1/runs/${encodeURIComponent(run)}`, { mode: select.value }), done);
  select.disabled = false;
  if (!changed) select.value = document.getElementById("run-state").dataset.mode;
}

async function attempt(what, change, done) {
  try {
    await change();
    say(null);
    await done();
    return true;
  } catch (error) {
    say(`Not done (${what}): ${error.message}`, error.login);
    return false;
  }
}

async function send(method, path, body) {
  let answer;
  try {
    answer = await fetch(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  } catch {
    throw new Error("the server cannot be reached; nothing was changed");
  }
  if (answer.ok) return answer.json().catch(() => ({}));
  const problem = await answer.json().catch(() => ({}));
  if (answer.status === 401) throw Object.assign(new Error("log in with a token that has the scope “control”"), { login: true });
  if (answer.status === 403) throw new Error(`${problem.detail ?? "refused"}; it takes a token with the scope “control”`);
  throw new Error(problem.detail ?? `the server answered ${answer.status}`);
}

function say(text, login = false) {
  notice.textContent = text ?? "";
  notice.hidden = !text;
  if (!login) return;
  const link = document.createElement("a");
  link.href = `/login?next=${encodeURIComponent(location.pathname + location.search)}`;
  link.textContent = "Log in";
  notice.append(" ", link);
}

function closeMenus(event) {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.removeAttribute("open");
}
