/** Sets the colour scheme before the first paint, and keeps the choice. */
(() => {
  const KEY = "fp8-safeguard-theme";
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function stored() {
    const choice = localStorage.getItem(KEY);
    return choice === "dark" || choice === "light" ? choice : null;
  }

  function apply() {
    const wanted = new URLSearchParams(location.search).get("theme");
    const theme = (wanted === "dark" || wanted === "light" ? wanted : stored()) ?? (system.matches ? "dark" : "light");
    if (document.documentElement.dataset.theme === theme) return;
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new CustomEvent("themechange"));
  }

  function toggle() {
    localStorage.setItem(KEY, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    apply();
  }

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => document.getElementById("theme").addEventListener("click", toggle));
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof Element && event.target.matches("input, select, textarea");
    if (event.key === "d" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) toggle();
  });
})();
