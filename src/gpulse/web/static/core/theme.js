// The reader's theme, before anything is painted. A plain script, so that no other colour flashes up first.
(() => {
  const themes = ["yellow", "blue", "auto"];
  const asked = new URLSearchParams(location.hash.split("?")[1] ?? "").get("theme");
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem("gpulse.theme"));
  } catch {
    // No storage, or nothing that can be read: the default.
  }
  const theme = themes.includes(asked) ? asked : kept;
  if (themes.includes(theme)) {
    document.documentElement.dataset.theme = theme;
  }
})();
