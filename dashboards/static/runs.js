/** Keeps the run list current. */
import { refreshFragments, updateAges } from "./fragments.js";

const REFRESH_MS = 5000;

updateAges();
setInterval(updateAges, 1000);
setInterval(() => {
  // A server that is away leaves the ages growing, which says so; the next round tries again.
  if (!document.hidden) refreshFragments("/").catch((error) => console.warn(error.message));
}, REFRESH_MS);
