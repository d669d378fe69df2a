/** Waits for the first sample of a run: looks again until the page exists. */

const LOOK_MS = 2000;

async function look() {
  try {
    const response = await fetch(location.href, { method: "GET", cache: "no-store" });
    if (response.ok) location.reload();
    else document.getElementById("banner").hidden = true;
  } catch {
    const banner = document.getElementById("banner");
    banner.textContent = "The server does not answer; trying again every two seconds.";
    banner.hidden = false;
  }
}

setInterval(look, LOOK_MS);
