/** Follows a run's event stream and calls back, at most once per interval. */

const EVENTS = ["sample", "decision", "alert", "plan", "state"];
const MIN_INTERVAL_MS = 1000;
/** Refreshing takes at most half of the time: the server may share its machine with the training. */
const IDLE_SHARE = 2;
const MAX_INTERVAL_MS = 20000;
const RETRY_MS = 5000;
/** A run that stops sends no event, so the page asks now and then on its own. */
const HEARTBEAT_MS = 20000;

/**
 * Call `refresh` after events of `run`; report "live", "paused" or "reconnecting" to `onState`.
 * Returns { setPaused, request, report }.
 */
export function followRun(run, refresh, onState) {
  let paused = false;
  let connected = false;
  let running = false;
  let wanted = false;
  let timer = null;
  let last = 0;
  let interval = MIN_INTERVAL_MS;

  const report = () => onState(paused ? "paused" : connected ? "live" : "reconnecting");

  async function execute() {
    clearTimeout(timer);
    timer = null;
    if (running || paused || document.hidden) {
      wanted = true;
      return;
    }
    running = true;
    wanted = false;
    last = performance.now();
    await refresh();
    interval = Math.min(MAX_INTERVAL_MS, Math.max(MIN_INTERVAL_MS, IDLE_SHARE * (performance.now() - last)));
    running = false;
    if (wanted) request();
  }

  function request() {
    timer ??= setTimeout(execute, Math.max(50, interval - (performance.now() - last)));
  }

  function connect() {
    const source = new EventSource(`/api/v1/runs/${encodeURIComponent(run)}/events`);
    source.onopen = () => {
      connected = true;
      report();
      // Whatever happened while the stream was away is fetched once.
      request();
    };
    source.onerror = () => {
      connected = false;
      report();
      // Whether the server is away, or only this stream, shows when it is asked.
      request();
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
    };
    for (const name of EVENTS) source.addEventListener(name, request);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && wanted) request();
  });
  setInterval(request, HEARTBEAT_MS);
  connect();

  return {
    request,
    report,
    setPaused(value) {
      paused = value;
      report();
      // Whoever asks to see does not wait for the interval.
      if (!paused) execute();
    },
  };
}
