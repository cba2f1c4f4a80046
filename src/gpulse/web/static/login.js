// Beside the form that takes the token: a link that somebody shared leads to its page afterwards too.
(() => {
  try {
    if (location.hash) {
      sessionStorage.setItem("gpulse.return", location.hash);
    }
  } catch {
    // Then they come to the front page.
  }
})();
