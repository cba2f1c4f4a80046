// Set the user's theme before the first paint. A classic script, so that no other color flashes up first.

(() => {
  const themes = ["auto", "light", "dark", "yellow", "blue"];
  const asked = new URLSearchParams(location.hash.split("?")[1] ?? "").get("theme") ?? "";
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem("gpulse.theme") ?? "null");
  } catch {
    // No storage, or nothing that can be read: the default.
  }
  const root = document.documentElement;
  const chosen = [asked, kept, "auto"].find((theme) => themes.includes(theme)) ?? "auto";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const theme = root.dataset.theme ?? "auto";
    const followed = system.matches ? "dark" : "light";
    root.dataset.scheme = theme === "auto" ? followed : theme;
    dispatchEvent(new Event("gpulse-theme"));
  };
  root.dataset.theme = chosen;
  show();
  system.addEventListener("change", show);
  new MutationObserver(show).observe(root, { attributeFilter: ["data-theme"] });
})();
