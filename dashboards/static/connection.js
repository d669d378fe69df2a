/** Says that the server is away, since when, and what is shown meanwhile; asks again until it is back. */

const RETRY_MS = 3000;
const AWAY_STATUS = [502, 503, 504];

/** Whether a failure means that no server answered, rather than that it refused. */
export function isAway(error) {
  return error instanceof TypeError || AWAY_STATUS.includes(error.status);
}

export class Connection {
  #banner = document.getElementById("banner");
  #retry;
  #timer = null;
  #since = null;

  constructor(retry) {
    this.#retry = retry;
  }

  get away() {
    return this.#since !== null;
  }

  /** A request failed for want of a server. */
  lost(shown) {
    if (this.#since === null) {
      this.#since = new Date();
      this.#banner.textContent =
        `The server has not answered since ${this.#since.toLocaleTimeString("en-GB")}. ` +
        `Shown is what had arrived by then${shown ? ` (${shown})` : ""}; the page goes on asking every ${RETRY_MS / 1000} s.`;
      this.#banner.hidden = false;
    }
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      this.#retry();
    }, RETRY_MS);
  }

  /** A request was answered. */
  back() {
    if (this.#since === null) return;
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#since = null;
    this.#banner.hidden = true;
  }
}
